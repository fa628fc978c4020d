/** Figures and summaries in words, for readouts and screen readers. */

/** A figure to four significant digits; very small and very large ones by exponent. */
export function figure(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) {
    return '–';
  }
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    return value.toExponential(2).replace(/\.?0+e/, 'e');
  }
  return String(Number(value.toPrecision(4)));
}

/** What a column is called in a sentence. */
export function named(column: string): string {
  return COLUMNS[column] ?? column.replaceAll('_', ' ');
}

const COLUMNS: Record<string, string> = {
  avg_reward: 'reward',
  used_reward: 'reward of what was trained on',
  grad_norm: 'gradient norm',
  no_signal: 'no signal'
};

export function steps(first: number, last: number): string {
  return first === last ? `step ${first}` : `steps ${first}–${last}`;
}
