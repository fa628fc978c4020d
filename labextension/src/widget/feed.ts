import type { State, TableRows, Update } from '../protocol';

/** New rows of a table; `values[0]` are their ids. */
export interface NewRows {
  name: TableRows['name'];
  columns: readonly string[];
  values: readonly Float64Array[];
}

/** What an update brings; with `everything`, what came before is forgotten. */
export interface Brought {
  changed: Partial<State>;
  tables: NewRows[];
  everything: boolean;
}

/** What the page knows of the run, and whether an update builds on it. */
export class Feed {
  state: Partial<State> = {};
  private name: string | null = null;
  private serial = 0;

  /** What the update brings, or `null` where it does not build on what is here. */
  take(update: Update, buffers: readonly DataView[]): Brought | null {
    const everything = update.base === 0;
    if (!everything && (update.feed !== this.name || update.base !== this.serial)) {
      return null;
    }
    this.name = update.feed;
    this.serial = update.serial;
    this.state = everything ? update.state : { ...this.state, ...update.state };
    let next = 0;
    const tables = update.tables.map(({ name, columns, rows }) => ({
      name,
      columns,
      values: columns.map(() => asColumn(buffers[next++], rows))
    }));
    return { changed: update.state, tables, everything };
  }
}

/** A buffer as figures. It is copied where it does not begin on a multiple of eight bytes. */
function asColumn(buffer: DataView | undefined, rows: number): Float64Array {
  if (!buffer || buffer.byteLength < rows * 8) {
    return new Float64Array(rows).fill(NaN);
  }
  if (buffer.byteOffset % 8 === 0) {
    return new Float64Array(buffer.buffer, buffer.byteOffset, rows);
  }
  const from = buffer.byteOffset;
  return new Float64Array(buffer.buffer.slice(from, from + rows * 8));
}
