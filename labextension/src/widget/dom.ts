/**
 * The little that a panel needs of the DOM. Text goes in as text nodes only: nothing that a model,
 * a task or a person wrote is ever read as markup.
 */

type Child = Node | string | null | undefined | false;
type Listener = (event: Event) => void;
export type Props = Record<string, string | number | boolean | Listener | null | undefined>;

/**
 * An element. A prop that is a function listens (`onclick`), `true` sets an empty attribute,
 * `false`, `null` and `undefined` set nothing; every other one is an attribute.
 */
export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (typeof value === 'function') {
      element.addEventListener(name.slice(2), value);
    } else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(name, value === true ? '' : String(value));
    }
  }
  for (const child of children) {
    if (child) {
      element.append(child);
    }
  }
  return element;
}

/** Sets the text, and touches nothing (a selection in it, say) where it is the same. */
export function say(element: Element, text: string | null | undefined): void {
  const said = text ?? '';
  if (element.textContent !== said) {
    element.textContent = said;
  }
}

/** Text in an element of its own that is gone when there is nothing to say. */
export function sayOrHide(element: HTMLElement, text: string | null | undefined): void {
  say(element, text);
  show(element, Boolean(text));
}

export function show(element: HTMLElement, shown: boolean): void {
  if (element.hidden === shown) {
    element.hidden = !shown;
  }
}

/** Sets an attribute, or takes it away with `null`. */
export function mark(element: Element, name: string, value: string | null): void {
  if (value === null) {
    element.removeAttribute(name);
  } else if (element.getAttribute(name) !== value) {
    element.setAttribute(name, value);
  }
}

/** An item of a list, drawn: its element, and how it takes newer values. */
export interface Drawn<T> {
  el: HTMLElement;
  update(item: T): void;
}

/**
 * Keeps the children of an element in step with a list of items. An item whose key was there
 * before keeps its element, and with it focus, selection and what is unfolded.
 */
export class Keyed<T> {
  private drawn = new Map<string, Drawn<T>>();

  constructor(
    private readonly parent: Element,
    private readonly keyOf: (item: T) => string,
    private readonly make: (item: T) => Drawn<T>
  ) {}

  update(items: readonly T[]): void {
    const focused = document.activeElement;
    const before = this.drawn;
    this.drawn = new Map();
    for (const item of items) {
      const key = this.keyOf(item);
      const one = before.get(key) ?? this.make(item);
      before.delete(key);
      if (!this.drawn.has(key)) {
        this.drawn.set(key, one);
        one.update(item);
      }
    }
    before.forEach(one => one.el.remove());
    let next = this.parent.firstElementChild;
    for (const { el } of this.drawn.values()) {
      if (el === next) {
        next = next.nextElementSibling;
      } else {
        this.parent.insertBefore(el, next);
      }
    }
    // An element that moves loses the focus
    if (focused instanceof HTMLElement && focused !== document.activeElement) {
      if (this.parent.contains(focused)) {
        focused.focus({ preventScroll: true });
      }
    }
  }
}

export function button(label: string, onclick: () => void, look = ''): HTMLButtonElement {
  return h('button', { type: 'button', class: `nbtrain-button ${look}`.trim(), onclick }, label);
}

let made = 0;

/** An id for what must be named within the document: many panels live in one. */
export function uniqueId(what: string): string {
  made += 1;
  return `nbtrain-${what}-${made}-${Math.random().toString(36).slice(2, 8)}`;
}
