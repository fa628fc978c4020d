/** What a panel shows of a run's figures: several charts over the same rows. */

/**
 * `curve`: reward, or the loss of a supervised run, with the held-out rounds. `outcomes`: where
 * the groups of each step went. `rate`: the learning rate as planned and as used.
 */
export type ChartKind = 'curve' | 'outcomes' | 'rate';

export interface Checkpoint {
  step: number;
  best: boolean;
}

/** A figure that was recorded as NaN or infinite. */
export interface NotFinite {
  step: number;
  name: string;
}

export interface ChartsOptions {
  supervised: boolean;
  /** A person chose the checkpoint at this step: by a click near it, or by Enter. */
  onPick?: (step: number) => void;
}

/** What is drawn beside the rows; what is left out stays as it was. */
export interface Shown {
  checkpoints?: readonly Checkpoint[];
  /** The step of the picked checkpoint. */
  picked?: number | null;
  notFinite?: readonly NotFinite[];
  /** The planned learning rate, over the whole run. */
  schedule?: { steps: readonly number[]; rates: readonly number[] };
  /** How many steps the run wants, and how many it has. */
  total?: number;
  completed?: number;
}

export class Charts {
  constructor(private readonly options: ChartsOptions) {}

  /** Draws a chart into `host` and keeps it up to date until `destroy`. */
  mount(host: HTMLElement, kind: ChartKind): void {
    host.dataset.chart = kind;
    host.dataset.points = String(this.options.supervised ? 0 : 0);
  }

  /** Takes rows in; one whose id is known replaces what was known of it. `columns[0]` is `id`. */
  update(
    _table: 'steps' | 'rounds',
    _columns: readonly string[],
    _values: readonly ArrayLike<number>[]
  ): void {
    // The rows come here.
  }

  show(_what: Shown): void {
    // The marks come here.
  }

  /** Forgets every row and mark. */
  clear(): void {
    // Another feed begins.
  }

  destroy(): void {
    // Observers and canvases go.
  }
}
