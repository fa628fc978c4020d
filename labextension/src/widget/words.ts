/** Figures and spans of time in words. */

/** A figure in about four digits; `–` where there is none, `NaN` and `inf` where it is neither. */
export function figure(value: number | null | undefined): string {
  if (value === null || value === undefined) {
    return '–';
  }
  if (!Number.isFinite(value)) {
    return Number.isNaN(value) ? 'NaN' : value > 0 ? 'inf' : '-inf';
  }
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    return value.toExponential(2).replace(/\.?0+e/, 'e');
  }
  if (Number.isInteger(value)) {
    return String(value);
  }
  return value.toFixed(size < 0.1 ? 4 : size < 100 ? 3 : 1);
}

/** A score in the few digits that its interval supports. */
export function score(value: number | null): string {
  if (value === null || !Number.isFinite(value)) {
    return figure(value);
  }
  return Math.abs(value) < 0.01 && value !== 0 ? figure(value) : value.toFixed(2);
}

/** `[0.78, 0.88]`, or nothing where there is no interval. */
export function interval(low: number | null, high: number | null): string {
  return low === null || high === null ? '' : `[${score(low)}, ${score(high)}]`;
}

/** `42 s`, `3 min 5 s`, `2 h 10 min`, `3 d 4 h`. */
export function duration(seconds: number): string {
  const whole = Math.max(0, Math.round(seconds));
  const units = [
    { size: 86400, unit: 'd', finer: 3600, and: 'h' },
    { size: 3600, unit: 'h', finer: 60, and: 'min' },
    { size: 60, unit: 'min', finer: 1, and: 's' }
  ];
  const of = units.find(({ size }) => whole >= size);
  if (!of) {
    return `${whole} s`;
  }
  const rest = Math.floor((whole % of.size) / of.finer);
  const said = `${Math.floor(whole / of.size)} ${of.unit}`;
  return rest ? `${said} ${rest} ${of.and}` : said;
}

/** `1 reply`, `3 replies`. */
export function counted(n: number, one: string, many = `${one}s`): string {
  return `${n} ${n === 1 ? one : many}`;
}

/** `3`, `3 and 4`, `3, 4, 5 and 12 more`. */
export function listed(items: readonly (string | number)[], most = 6): string {
  const shown = items.slice(0, most).map(String);
  if (items.length > most) {
    return `${shown.join(', ')} and ${items.length - most} more`;
  }
  const last = shown.pop();
  return shown.length ? `${shown.join(', ')} and ${last}` : (last ?? '');
}

/** A Python string literal. */
export function pythonText(text: string): string {
  return /['\\\n\r]/.test(text) ? JSON.stringify(text) : `'${text}'`;
}
