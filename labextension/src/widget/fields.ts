/** Labelled fields, and what is read from them. */
import { h } from './dom';

/** A label above its field. */
export function field(label: string, input: HTMLElement, look = ''): HTMLElement {
  return h('label', { class: `nbtrain-field ${look}`.trim() }, h('span', {}, label), input);
}

export function count(value: number, max: number | null): HTMLInputElement {
  return h('input', { type: 'number', min: 1, max, step: 1, value });
}

/** The whole number in a field, or in words what is wrong with it. */
export function whole(input: HTMLInputElement, what: string, most = Infinity): number | string {
  const value = Number(input.value);
  if (input.value.trim() === '' || !Number.isInteger(value) || value < 1 || value > most) {
    const bound = most === Infinity ? 'at least 1' : `from 1 to ${most}`;
    return `${what} is a whole number, ${bound}.`;
  }
  return value;
}
