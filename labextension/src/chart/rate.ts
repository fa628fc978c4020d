/** The learning rate: planned over the whole run, and as it was used. */
import type uPlot from 'uplot';

import {
  stepRange,
  type Kind,
  type Legend,
  type Prepared,
  type Source,
  type Table
} from './source';
import { align, extent, interpolate, present, thin, union, type Drawn } from './series';
import type { Theme } from './theme';
import { figure } from './words';

const DASH = [4, 3];

export class Rate implements Kind {
  readonly title = 'Learning rate';
  readonly height = 96;
  readonly series: uPlot.Series[];
  private xs: number[] = [];
  private planned: Drawn[] = [];
  private recorded: Drawn[] = [];
  /** The place of the newest rate that was used; -1: none was. */
  private now = -1;

  constructor(
    private readonly source: Source,
    theme: () => Theme
  ) {
    this.series = [
      { width: 1.5, dash: DASH, stroke: () => theme().ink.grey, points: { show: false } },
      { width: 2, stroke: () => theme().ink.line, points: { show: false } }
    ];
  }

  tells(column: string): boolean {
    return column === 'learning_rate';
  }

  prepare(): Prepared {
    const { schedule, total } = this.source;
    const rows = this.source.steps.byStep();
    this.xs = union(rows.steps, schedule.steps);
    this.planned = align(this.xs, schedule.steps, present(schedule.rates));
    this.recorded = align(this.xs, rows.steps, present(rows.column('learning_rate')));
    this.now = this.recorded.findLastIndex(value => value != null);
    const highest = extent(this.planned, this.recorded)?.[1] ?? 0;
    // Where the other charts begin; it goes on to the end of the plan
    const [first, last] = stepRange(this.source);
    return {
      xs: this.xs,
      ys: [this.planned, this.recorded],
      xRange: [
        Math.min(first, (this.xs[0] ?? 1) - 0.5),
        Math.max(last, total + 0.5, (this.xs.at(-1) ?? 1) + 0.5)
      ],
      yRange: [0, highest * 1.1 || 1],
      points: rows.steps.length,
      lastStep: rows.steps.at(-1) ?? null,
      rest: this.now < 0 ? this.xs.length - 1 : this.now
    };
  }

  draw(plot: uPlot, theme: Theme): void {
    const { completed, total } = this.source;
    if (completed <= 0 || completed >= total) {
      return;
    }
    const canvas = plot.ctx;
    const ratio = window.devicePixelRatio || 1;
    const x = plot.valToPos(completed, 'x', true);
    const { top, height, left, width } = plot.bbox;
    canvas.strokeStyle = canvas.fillStyle = theme.muted;
    canvas.lineWidth = ratio;
    canvas.setLineDash([]);
    canvas.beginPath();
    canvas.moveTo(x, top);
    canvas.lineTo(x, top + height);
    canvas.stroke();
    canvas.font = `${10 * ratio}px sans-serif`;
    const toTheRight = x < left + width - 40 * ratio;
    canvas.textAlign = toTheRight ? 'left' : 'right';
    canvas.textBaseline = 'bottom';
    canvas.fillText('now', x + (toTheRight ? 4 : -4) * ratio, top + height - 2 * ratio);
  }

  legend(): Legend[] {
    const legend: Legend[] = [];
    if (this.now >= 0) {
      legend.push({ label: 'used', swatch: { kind: 'line', ink: 'line' } });
    }
    if (this.source.schedule.steps.length) {
      legend.push({ label: 'planned', swatch: { kind: 'line', ink: 'grey', dash: DASH } });
    }
    return legend;
  }

  readout(at: number): string {
    const said = [`step ${this.xs[at]!}`];
    const { schedule } = this.source;
    const planned = interpolate(schedule.steps, schedule.rates, this.xs[at]!);
    if (this.recorded[at] != null) {
      said.push(`rate ${figure(this.recorded[at])}`);
    }
    if (planned !== null && planned !== this.recorded[at]) {
      said.push(`planned ${figure(planned)}`);
    }
    return said.join(' · ');
  }

  describe(): string {
    const said: string[] = [];
    const { steps, rates } = this.source.schedule;
    if (rates.length) {
      const most = extent(rates)![1];
      said.push(
        `Learning rate planned over ${this.source.total} steps: ${figure(rates[0])} at step ` +
          `${steps[0]!}, highest ${figure(most)} at step ${steps[rates.indexOf(most)]!}, ` +
          `${figure(rates.at(-1))} at step ${steps.at(-1)!}`
      );
    }
    if (this.now >= 0) {
      said.push(`used ${figure(this.recorded[this.now])} at step ${this.xs[this.now]!}`);
    }
    return said.length ? `${said.join('; ')}.` : 'No learning rate yet.';
  }

  table(): Table {
    const { schedule } = this.source;
    return {
      head: ['step', 'used', 'planned'],
      rows: thin(this.xs.length, 20).map(n => [
        String(this.xs[n]),
        figure(this.recorded[n]),
        figure(interpolate(schedule.steps, schedule.rates, this.xs[n]!))
      ])
    };
  }
}
