/** Pure preparation of curves: smooth, bin, thin, find. */
import { lowerBound } from './rows';

/** A figure to draw: `null` is a gap, `undefined` no figure asked for at this place. */
export type Drawn = number | null | undefined;

/** What is not there (NaN) is left out: a line goes on over it, except where `broken` says so. */
export function present(values: ArrayLike<number>, broken: readonly number[] = []): Drawn[] {
  const drawn = new Array<Drawn>(values.length);
  for (let n = 0; n < values.length; n++) {
    const value = values[n]!;
    drawn[n] = Number.isFinite(value) ? value : undefined;
  }
  for (const at of broken) {
    drawn[at] = null;
  }
  return drawn;
}

/** As many places without anything asked for. */
export function nothing(count: number): Drawn[] {
  return new Array<Drawn>(count).fill(undefined);
}

/** Trailing mean over up to `window` finite figures, shorter at the start; gaps stay gaps. */
export function smooth(values: readonly Drawn[], window: number): Drawn[] {
  const kept = new Float64Array(values.length);
  const means = new Array<Drawn>(values.length);
  let count = 0;
  let total = 0;
  for (let n = 0; n < values.length; n++) {
    const value = values[n];
    if (value == null) {
      means[n] = value;
      continue;
    }
    kept[count++] = value;
    total += value;
    if (count > window) {
      total -= kept[count - 1 - window]!;
    }
    means[n] = total / (count < window ? count : window);
  }
  return means;
}

/** Over how many figures a curve of `count` is smoothed; 0: too few to smooth. */
export function smoothingWindow(count: number): number {
  return count > 12 ? roundDown(Math.max(5, count / 20)) : 0;
}

export function countDrawn(values: readonly Drawn[]): number {
  let count = 0;
  for (let n = 0; n < values.length; n++) {
    count += values[n] == null ? 0 : 1;
  }
  return count;
}

/** Lowest and highest finite figure of several columns, or null where there is none. */
export function extent(...columns: (readonly Drawn[] | ArrayLike<number>)[]): Range | null {
  let low = Infinity;
  let high = -Infinity;
  for (const column of columns) {
    for (let n = 0; n < column.length; n++) {
      const value = column[n];
      // NaN is neither below nor above anything
      if (value != null && value > -Infinity && value < Infinity) {
        low = value < low ? value : low;
        high = value > high ? value : high;
      }
    }
  }
  return low <= high ? [low, high] : null;
}

export type Range = [low: number, high: number];

/** A range with a little air; one that is a single value gets room around it. */
export function airy(range: Range | null, empty: Range = [0, 1]): Range {
  if (!range) {
    return empty;
  }
  const [low, high] = range;
  const air = high > low ? (high - low) * 0.06 : Math.abs(low) * 0.1 || 0.5;
  return [low - air, high + air];
}

/** The place of the value nearest to `wanted` in sorted values; -1 in none. */
export function nearest(sorted: ArrayLike<number>, wanted: number): number {
  const at = lowerBound(sorted, wanted);
  if (at === 0) {
    return sorted.length ? 0 : -1;
  }
  if (at === sorted.length) {
    return at - 1;
  }
  return wanted - sorted[at - 1]! <= sorted[at]! - wanted ? at - 1 : at;
}

/** At most `limit` places of `count`, evenly spread, both ends among them. */
export function thin(count: number, limit: number): number[] {
  if (count <= limit) {
    return Array.from({ length: count }, (_, n) => n);
  }
  return Array.from({ length: limit }, (_, n) => Math.round((n * (count - 1)) / (limit - 1)));
}

/** Every value of two rising lists once, rising. */
export function union(a: ArrayLike<number>, b: ArrayLike<number>): number[] {
  if (holds(a, b)) {
    return Array.from(a);
  }
  const all: number[] = [];
  for (let n = 0, m = 0; n < a.length || m < b.length;) {
    const [x, y] = [a[n] ?? Infinity, b[m] ?? Infinity];
    all.push(Math.min(x, y));
    n += x <= y ? 1 : 0;
    m += y <= x ? 1 : 0;
  }
  return all;
}

/** Whether a rising list holds every value of another, which is short as a rule. */
function holds(a: ArrayLike<number>, b: ArrayLike<number>): boolean {
  for (let m = 0; m < b.length; m++) {
    if (a[lowerBound(a, b[m]!)] !== b[m]) {
      return false;
    }
  }
  return true;
}

/** A column given at the rising `from`, brought to `to`, which holds them all and maybe more. */
export function align(to: readonly number[], from: ArrayLike<number>, values: Drawn[]): Drawn[] {
  if (to.length === from.length) {
    return values;
  }
  const placed = new Array<Drawn>(to.length);
  for (let at = 0, n = 0; at < to.length; at++) {
    placed[at] = from[n] === to[at] ? values[n++] : undefined;
  }
  return placed;
}

/** What a sorted line has at `at`, between its points by proportion; null outside of it. */
export function interpolate(
  xs: ArrayLike<number>,
  ys: ArrayLike<number>,
  at: number
): number | null {
  const after = lowerBound(xs, at);
  if (xs[after] === at) {
    return ys[after]!;
  }
  if (after === 0 || after === xs.length) {
    return null;
  }
  const [x0, x1] = [xs[after - 1]!, xs[after]!];
  const [y0, y1] = [ys[after - 1]!, ys[after]!];
  return y0 + ((at - x0) / (x1 - x0)) * (y1 - y0);
}

/** Neighbouring steps taken together because the page has no room for each. */
export interface Bins {
  /** How many steps one bin covers; 1: a bin is a step. */
  width: number;
  first: number[];
  last: number[];
  /** How many recorded steps each bin holds. */
  steps: number[];
  /** Sums by part, then by bin; NaN counts as nothing. */
  sums: number[][];
}

/** Sums `parts` over as few neighbouring steps as leave at most `most` bins. */
export function bin(
  steps: ArrayLike<number>,
  parts: readonly ArrayLike<number>[],
  most: number
): Bins {
  const bins: Bins = { width: 1, first: [], last: [], steps: [], sums: [] };
  if (!steps.length) {
    bins.sums = parts.map(() => []);
    return bins;
  }
  const start = steps[0]!;
  bins.width = roundWidth((steps[steps.length - 1]! - start + 1) / Math.max(1, most));
  const { width } = bins;
  const ends: number[] = []; // the row after the last one of each bin
  for (let row = 0; row < steps.length;) {
    const number = Math.floor((steps[row]! - start) / width);
    const last = start + (number + 1) * width - 1;
    const begun = row;
    row = lowerBound(steps, last + 1);
    bins.first.push(start + number * width);
    bins.last.push(last);
    bins.steps.push(row - begun);
    ends.push(row);
  }
  bins.sums = parts.map(part => sumsUntil(part, ends));
  return bins;
}

function sumsUntil(part: ArrayLike<number>, ends: readonly number[]): number[] {
  let row = 0;
  return ends.map(end => {
    let sum = 0;
    for (; row < end; row++) {
      sum += part[row]! || 0; // NaN counts as nothing
    }
    return sum;
  });
}

/** The last of 1, 2, 5, 10, 20, … that is not above, so that it seldom changes. */
function roundDown(most: number): number {
  const ten = 10 ** Math.floor(Math.log10(most));
  return [5, 2, 1].map(of => of * ten).find(of => of <= most)!;
}

/** The next of 1, 2, 5, 10, 20, … so that bins do not shift with every step. */
function roundWidth(least: number): number {
  for (let ten = 1; ; ten *= 10) {
    for (const width of [ten, 2 * ten, 5 * ten]) {
      if (width >= least) {
        return width;
      }
    }
  }
}
