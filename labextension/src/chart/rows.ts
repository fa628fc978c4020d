/** Rows of a table as columns of figures, kept by row id. */

/** A table's rows by step: each step once, with the newest row that it has. */
export interface ByStep {
  steps: Float64Array;
  column(name: string): Float64Array;
}

const NOTHING = new Float64Array(0);

export class Rows {
  private count = 0;
  private room = 0;
  private readonly columns = new Map<string, Float64Array>();
  private ordered: ByStep | null = null;

  get size(): number {
    return this.count;
  }

  clear(): void {
    this.count = 0;
    this.room = 0;
    this.columns.clear();
    this.ordered = null;
  }

  /** Takes rows in. `names[0]` is `id`; a known id is overwritten, a missing figure is NaN. */
  upsert(names: readonly string[], values: readonly ArrayLike<number>[]): void {
    const ids = values[0];
    if (names[0] !== 'id' || !ids) {
      throw new Error('rows come with their id in the first column');
    }
    this.reserve(this.count + ids.length, names);
    const mine = names.map(name => this.columns.get(name)!);
    for (let row = 0; row < ids.length; row++) {
      const place = this.place(ids[row]!);
      for (let n = 0; n < mine.length; n++) {
        mine[n]![place] = values[n]?.[row] ?? NaN;
      }
    }
    this.ordered = null;
  }

  byStep(): ByStep {
    this.ordered ??= this.order();
    return this.ordered;
  }

  /** Where the row of an id stands, or is to stand: rows stay sorted by id. */
  private place(id: number): number {
    const ids = this.columns.get('id')!;
    if (this.count === 0 || id > ids[this.count - 1]!) {
      return this.count++;
    }
    const at = lowerBound(ids, id, this.count);
    if (ids[at] !== id) {
      for (const column of this.columns.values()) {
        column.copyWithin(at + 1, at, this.count);
        column[at] = NaN;
      }
      this.count++;
    }
    return at;
  }

  private reserve(needed: number, names: readonly string[]): void {
    if (needed > this.room) {
      this.room = Math.max(256, needed, 2 * this.room);
      for (const [name, old] of this.columns) {
        this.columns.set(name, this.blank(old));
      }
    }
    for (const name of names) {
      if (!this.columns.has(name)) {
        this.columns.set(name, this.blank());
      }
    }
  }

  private blank(from: Float64Array = NOTHING): Float64Array {
    const column = new Float64Array(this.room).fill(NaN);
    column.set(from.subarray(0, this.count));
    return column;
  }

  private order(): ByStep {
    const count = this.count;
    const own = (name: string) => this.columns.get(name)?.subarray(0, count);
    const steps = own('step') ?? NOTHING;
    if (isRising(steps)) {
      return { steps, column: name => own(name) ?? new Float64Array(steps.length).fill(NaN) };
    }
    // Steps come again after a resume, always with higher ids: the last row of a step counts.
    const last = new Map<number, number>();
    for (let row = 0; row < count; row++) {
      last.set(steps[row]!, row);
    }
    const rows = [...last].sort(([a], [b]) => a - b).map(([, row]) => row);
    const pick = (column: Float64Array) => Float64Array.from(rows, row => column[row]!);
    return {
      steps: pick(steps),
      column: name => {
        const column = own(name);
        return column ? pick(column) : new Float64Array(rows.length).fill(NaN);
      }
    };
  }
}

function isRising(values: Float64Array): boolean {
  for (let n = 1; n < values.length; n++) {
    if (!(values[n]! > values[n - 1]!)) {
      return false;
    }
  }
  return true;
}

/** The first place among the first `count` sorted values that is not below `wanted`. */
export function lowerBound(
  sorted: ArrayLike<number>,
  wanted: number,
  count: number = sorted.length
): number {
  let low = 0;
  let high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle]! < wanted) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}
