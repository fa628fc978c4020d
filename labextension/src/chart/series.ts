/** Pure preparation of curves: smooth, bin, thin, find. */
import { lowerBound } from './rows';

/** A figure to draw: `null` is a gap, `undefined` no figure asked for at this place. */
export type Drawn = number | null | undefined;

/** NaN and infinity become gaps. */
export function gaps(values: ArrayLike<number>): Drawn[] {
  const drawn = new Array<Drawn>(values.length);
  for (let n = 0; n < values.length; n++) {
    const value = values[n]!;
    drawn[n] = Number.isFinite(value) ? value : null;
  }
  return drawn;
}

/** Trailing mean over up to `window` finite figures, shorter at the start; gaps stay gaps. */
export function smooth(values: readonly Drawn[], window: number): Drawn[] {
  const kept = new Float64Array(values.length);
  let count = 0;
  let total = 0;
  return values.map(value => {
    if (value == null) {
      return value;
    }
    kept[count++] = value;
    total += value;
    if (count > window) {
      total -= kept[count - 1 - window]!;
    }
    return total / Math.min(count, window);
  });
}

/** Over how many figures a curve of `count` is smoothed; 0: too few to smooth. */
export function smoothingWindow(count: number): number {
  return count > 12 ? Math.max(5, Math.floor(count / 20)) : 0;
}

export function countDrawn(values: readonly Drawn[]): number {
  return values.reduce<number>((sum, value) => sum + (value == null ? 0 : 1), 0);
}

/** Lowest and highest finite figure of several columns, or null where there is none. */
export function extent(...columns: (readonly Drawn[] | ArrayLike<number>)[]): Range | null {
  let low = Infinity;
  let high = -Infinity;
  for (const column of columns) {
    for (let n = 0; n < column.length; n++) {
      const value = column[n];
      if (value != null && Number.isFinite(value)) {
        low = Math.min(low, value);
        high = Math.max(high, value);
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
  const all: number[] = [];
  for (let n = 0, m = 0; n < a.length || m < b.length;) {
    const [x, y] = [a[n] ?? Infinity, b[m] ?? Infinity];
    all.push(Math.min(x, y));
    n += x <= y ? 1 : 0;
    m += y <= x ? 1 : 0;
  }
  return all;
}

/** A column given at the rising `from`, brought to `to`, which holds them all and maybe more. */
export function align(
  to: readonly number[],
  from: ArrayLike<number>,
  values: readonly Drawn[]
): Drawn[] {
  if (to.length === from.length) {
    return values.slice();
  }
  let n = 0;
  return to.map(at => (from[n] === at ? values[n++] : undefined));
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
  const bins: Bins = { width: 1, first: [], last: [], steps: [], sums: parts.map(() => []) };
  if (!steps.length) {
    return bins;
  }
  const start = steps[0]!;
  bins.width = roundWidth((steps[steps.length - 1]! - start + 1) / Math.max(1, most));
  let current = -1;
  for (let row = 0; row < steps.length; row++) {
    const number = Math.floor((steps[row]! - start) / bins.width);
    if (number !== current) {
      current = number;
      bins.first.push(start + number * bins.width);
      bins.last.push(start + (number + 1) * bins.width - 1);
      bins.steps.push(0);
      bins.sums.forEach(sums => sums.push(0));
    }
    const at = bins.steps.length - 1;
    bins.steps[at]!++;
    parts.forEach((part, n) => {
      const value = part[row]!;
      bins.sums[n]![at]! += Number.isFinite(value) ? value : 0;
    });
  }
  return bins;
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
