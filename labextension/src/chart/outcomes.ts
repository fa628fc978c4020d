/** Where the groups of each step went, as stacked bars. */
import type uPlot from 'uplot';

import { fillOf, type Hatch } from './marks';
import {
  stepRange,
  type Kind,
  type Legend,
  type Prepared,
  type Source,
  type Table
} from './source';
import { bin, thin, type Bins } from './series';
import type { Ink, Theme } from './theme';
import { figure, named, steps } from './words';

interface Part {
  column: string;
  ink: Ink;
  hatch: Hatch;
}

/** From the bottom of a bar to its top; no two share both colour and hatch. */
const PARTS: readonly Part[] = [
  { column: 'used', ink: 'good', hatch: 'solid' },
  { column: 'no_signal', ink: 'rounds', hatch: 'rising' },
  { column: 'filtered', ink: 'sky', hatch: 'falling' },
  { column: 'too_small', ink: 'violet', hatch: 'dots' },
  { column: 'discarded', ink: 'bad', hatch: 'level' },
  { column: 'pending', ink: 'grey', hatch: 'hollow' }
];

const NARROWEST = 5; // pixels that a bar needs

export class Outcomes implements Kind {
  readonly title = 'Groups by the step in which they completed';
  readonly height = 130;
  readonly whole = true;
  /** The bars are drawn by hand; the one line only gives the cursor its places. */
  readonly series: uPlot.Series[] = [{ stroke: 'transparent', points: { show: false } }];
  private bins: Bins = { width: 1, first: [], last: [], steps: [], sums: [] };

  /** Hatches are canvases of their own: made again only for other colours. */
  private filledFor: { theme: Theme; ratio: number; fills: (CanvasPattern | string)[] } | null =
    null;

  constructor(private readonly source: Source) {}

  tells(): boolean {
    return false;
  }

  prepare(width: number): Prepared {
    const rows = this.source.steps.byStep();
    const columns = PARTS.map(part => rows.column(part.column));
    this.bins = bin(rows.steps, columns, Math.max(10, width / NARROWEST));
    const { first, last } = this.bins;
    const heights = first.map((_, at) => this.perStep(at).reduce((sum, value) => sum + value, 0));
    return {
      xs: first.map((step, at) => (step + last[at]!) / 2),
      ys: [heights],
      xRange: stepRange(this.source),
      yRange: [0, heights.reduce((most, height) => Math.max(most, height), 1) * 1.04],
      points: rows.steps.length,
      lastStep: rows.steps.at(-1) ?? null,
      rest: first.length - 1
    };
  }

  draw(plot: uPlot, theme: Theme): void {
    const canvas = plot.ctx;
    const ratio = window.devicePixelRatio || 1;
    const x = (step: number) => plot.valToPos(step, 'x', true);
    const y = (value: number) => plot.valToPos(value, 'y', true);
    const fills = this.fills(canvas, theme, ratio);
    canvas.lineWidth = ratio;
    canvas.setLineDash([]);
    this.bins.first.forEach((first, at) => {
      const left = x(first - 0.5);
      const whole = x(this.bins.last[at]! + 0.5) - left;
      const gap = Math.min(ratio, whole / 5);
      const [from, wide] = [left + gap / 2, Math.min(whole - gap, 40 * ratio)];
      const start = from + (whole - gap - wide) / 2;
      let below = 0;
      this.perStep(at).forEach((value, n) => {
        if (value > 0) {
          const top = y(below + value);
          canvas.fillStyle = fills[n]!;
          canvas.fillRect(start, top, wide, y(below) - top);
          if (wide > 6 * ratio) {
            canvas.strokeStyle = theme.ink[PARTS[n]!.ink];
            canvas.strokeRect(start, top, wide, y(below) - top);
          }
          below += value;
        }
      });
    });
  }

  legend(): Legend[] {
    return this.present().map(n => {
      const { column, ink, hatch } = PARTS[n]!;
      return { label: named(column), swatch: { kind: 'area', ink, hatch } };
    });
  }

  readout(at: number): string {
    const { first, last, width, steps: count } = this.bins;
    const where = width > 1 ? `${steps(first[at]!, last[at]!)}, ${count[at]!} steps together` : '';
    return [where || `step ${first[at]!}`, ...this.inWords(at)].join(' · ');
  }

  describe(): string {
    const { first } = this.bins;
    if (!first.length) {
      return 'No groups yet.';
    }
    const totals = this.present().map(n => `${this.total(n)} ${named(PARTS[n]!.column)}`);
    const newest = this.inWords(first.length - 1).join(', ');
    const span = steps(first[0]!, this.source.steps.byStep().steps.at(-1)!);
    return `Groups of ${span} by what became of them: ${totals.join(', ')}; newest: ${newest}.`;
  }

  table(): Table {
    const present = this.present();
    const { first, last, sums } = this.bins;
    return {
      head: ['steps', ...present.map(n => named(PARTS[n]!.column))],
      rows: thin(first.length, 20).map(at => [
        steps(first[at]!, last[at]!),
        ...present.map(n => figure(sums[n]![at]))
      ])
    };
  }

  private fills(
    canvas: CanvasRenderingContext2D,
    theme: Theme,
    ratio: number
  ): (CanvasPattern | string)[] {
    if (this.filledFor?.theme !== theme || this.filledFor.ratio !== ratio) {
      const fills = PARTS.map(part => fillOf(canvas, theme.ink[part.ink], part.hatch, ratio));
      this.filledFor = { theme, ratio, fills };
    }
    return this.filledFor.fills;
  }

  private perStep(at: number): number[] {
    return this.bins.sums.map(sums => sums[at]! / this.bins.steps[at]!);
  }

  private inWords(at: number): string[] {
    return this.present()
      .filter(n => this.bins.sums[n]![at]! > 0)
      .map(n => `${named(PARTS[n]!.column)} ${this.bins.sums[n]![at]!}`);
  }

  /** The parts that hold any group. */
  private present(): number[] {
    return PARTS.map((_, n) => n).filter(n => this.total(n) > 0);
  }

  private total(part: number): number {
    return (this.bins.sums[part] ?? []).reduce((sum, value) => sum + value, 0);
  }
}
