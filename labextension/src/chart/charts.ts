/** What a panel shows of a run's figures: several charts over the same rows. */
import { Curve } from './curve';
import { Outcomes } from './outcomes';
import { Plot } from './plot';
import { Rate } from './rate';
import { Rows } from './rows';
import type { Beside, Kind, Shown, Source } from './source';
import { watchTheme, type Theme } from './theme';

/**
 * `curve`: reward, or the loss of a supervised run, with the held-out rounds. `outcomes`: where
 * the groups of each step went. `rate`: the learning rate as planned and as used.
 */
export type ChartKind = 'curve' | 'outcomes' | 'rate';

export interface ChartsOptions {
  supervised: boolean;
  /** A person chose the checkpoint at this step: by a click near it, or by Enter. */
  onPick?: (step: number) => void;
}

const NOTHING: Beside = {
  checkpoints: [],
  picked: null,
  notFinite: [],
  schedule: { steps: [], rates: [] },
  total: 0,
  completed: 0
};

let made = 0;

export class Charts {
  private readonly source: Source;
  private readonly plots: Plot[] = [];
  private readonly syncKey = `nbtrain-${++made}`;
  private readonly stopWatching: () => void;
  private frame: number | null = null;

  constructor(private readonly options: ChartsOptions) {
    const { supervised } = options;
    this.source = { ...NOTHING, supervised, steps: new Rows(), rounds: new Rows() };
    this.stopWatching = watchTheme(() => this.plots.forEach(plot => plot.recolour()));
  }

  /** Draws a chart into `host`, which it empties, and keeps it up to date until `destroy`. */
  mount(host: HTMLElement, kind: ChartKind): void {
    host.dataset.chart = kind;
    const plot = new Plot(host, {
      source: this.source,
      syncKey: this.syncKey,
      kind: theme => this.kind(kind, theme),
      pick: step => this.options.onPick?.(step)
    });
    this.plots.push(plot);
  }

  /** Takes rows in; one whose id is known replaces what was known of it. `columns[0]` is `id`. */
  update(
    table: 'steps' | 'rounds',
    columns: readonly string[],
    values: readonly ArrayLike<number>[]
  ): void {
    this.source[table].upsert(columns, values);
    this.draw();
  }

  /** Changes what is drawn beside the rows; what is left out stays as it was. */
  show(what: Shown): void {
    Object.assign(this.source, what);
    this.draw();
  }

  /** Forgets every row and mark. */
  clear(): void {
    this.source.steps.clear();
    this.source.rounds.clear();
    this.show(NOTHING);
  }

  /** Draws what changed now; otherwise the next frame does, once for all changes. */
  flush(): void {
    if (this.frame !== null) {
      cancelAnimationFrame(this.frame);
      this.frame = null;
      this.plots.forEach(plot => plot.refresh());
    }
  }

  destroy(): void {
    this.stopWatching();
    if (this.frame !== null) {
      cancelAnimationFrame(this.frame);
    }
    this.plots.splice(0).forEach(plot => plot.destroy());
  }

  private kind(kind: ChartKind, theme: () => Theme): Kind {
    switch (kind) {
      case 'curve':
        return new Curve(this.source, theme);
      case 'outcomes':
        return new Outcomes(this.source);
      case 'rate':
        return new Rate(this.source, theme);
    }
  }

  private draw(): void {
    this.frame ??= requestAnimationFrame(() => this.flush());
  }
}
