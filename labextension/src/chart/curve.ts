/** The curve: reward or loss by step, smoothed, with the held-out rounds. */
import type uPlot from 'uplot';

import { drawInterval, drawPoint } from './marks';
import {
  stepRange,
  type Kind,
  type Legend,
  type Prepared,
  type Source,
  type Table
} from './source';
import {
  airy,
  align,
  countDrawn,
  extent,
  nearest,
  nothing,
  present,
  smooth,
  smoothingWindow,
  thin,
  union,
  type Drawn,
  type Range
} from './series';
import { lowerBound } from './rows';
import type { Theme } from './theme';
import { figure } from './words';

interface Round {
  step: number;
  value: number;
  low: number;
  high: number;
  complete: boolean;
}

const DASH = [5, 3];

export class Curve implements Kind {
  readonly height = 220;
  readonly marked = true;
  readonly title: string;
  readonly series: uPlot.Series[];
  private xs: number[] = [];
  private raw: Drawn[] = [];
  private mean: Drawn[] = [];
  private used: Drawn[] = [];
  /** How many figures there are, and whether any differs of those that were trained on. */
  private count = 0;
  private usedDiffers = false;
  private window = 0;
  private rounds: Round[] = [];

  constructor(
    private readonly source: Source,
    theme: () => Theme
  ) {
    this.title = source.supervised ? 'Loss' : 'Reward';
    const points = { show: () => this.window === 0, size: 5 };
    this.series = [
      {
        width: 1,
        // faint where the smoothed line stands before it
        stroke: () => theme().ink.line + (this.window > 50 ? '40' : this.window ? '66' : ''),
        points: { ...points, fill: () => theme().ink.line }
      },
      { width: 2, stroke: () => theme().ink.line, points: { show: false } },
      { width: 1.5, dash: DASH, stroke: () => theme().ink.second, points: { show: false } }
    ];
  }

  tells(column: string): boolean {
    return column !== 'learning_rate';
  }

  prepare(): Prepared {
    const rows = this.source.steps.byStep();
    const figures = rows.column(this.source.supervised ? 'loss' : 'avg_reward');
    const raw = present(figures, this.broken(rows.steps, figures));
    const used = this.ofUsed(rows.column('used_reward'), figures);
    this.count = countDrawn(raw);
    this.window = smoothingWindow(this.count);
    this.rounds = this.readRounds();
    this.xs = union(
      rows.steps,
      this.rounds.map(round => round.step)
    );
    const place = (values: Drawn[]) => align(this.xs, rows.steps, values);
    this.raw = place(raw);
    this.mean = place(this.window ? smooth(raw, this.window) : nothing(raw.length));
    this.used = place(this.window && this.usedDiffers ? smooth(used, this.window) : used);
    return {
      xs: this.xs,
      ys: [this.raw, this.mean, this.used],
      xRange: stepRange(this.source),
      yRange: airy(this.extent()),
      points: rows.steps.length,
      lastStep: rows.steps.at(-1) ?? null,
      rest: this.xs.length - 1
    };
  }

  draw(plot: uPlot, theme: Theme): void {
    const canvas = plot.ctx;
    const at = (round: Round, value: number): [number, number] => [
      plot.valToPos(round.step, 'x', true),
      plot.valToPos(value, 'y', true)
    ];
    const ratio = window.devicePixelRatio || 1;
    canvas.strokeStyle = theme.ink.rounds;
    canvas.lineWidth = 1.2 * ratio;
    canvas.setLineDash([]);
    const whole = this.rounds.filter(round => round.complete);
    canvas.beginPath();
    whole.forEach(round => canvas.lineTo(...at(round, round.value)));
    canvas.stroke();
    const room = plot.bbox.width / Math.max(1, this.rounds.length);
    const spread = this.rounds.filter(round => round.low <= round.high);
    if (room < 7 * ratio) {
      this.drawBand(canvas, theme, spread, at);
    } else {
      canvas.lineWidth = ratio;
      for (const round of spread) {
        const [x, low] = at(round, round.low);
        drawInterval(canvas, x, low, at(round, round.high)[1], 3 * ratio);
      }
    }
    canvas.lineWidth = 1.5 * ratio;
    const radius = (room < 7 * ratio ? 1.5 : 3.5) * ratio;
    for (const round of this.rounds) {
      drawPoint(canvas, ...at(round, round.value), radius, theme.ink.rounds, !round.complete);
    }
  }

  legend(): Legend[] {
    const what = this.title.toLowerCase();
    const legend: Legend[] = [];
    if (this.count) {
      const label = this.window ? `${what} (mean over ${this.window} steps)` : what;
      legend.push({ label, swatch: { kind: 'line', ink: 'line' } });
    }
    if (this.usedDiffers) {
      const label = 'reward of what was trained on';
      legend.push({ label, swatch: { kind: 'line', ink: 'second', dash: DASH } });
    }
    if (this.rounds.some(round => round.complete)) {
      const interval = this.rounds.some(round => round.low <= round.high) ? ', 95 % interval' : '';
      const label = this.roundsAre + interval;
      legend.push({ label, swatch: { kind: 'point', ink: 'rounds', hollow: false } });
    }
    if (this.rounds.some(round => !round.complete)) {
      const label = `${this.roundsAre}, round not complete`;
      legend.push({ label, swatch: { kind: 'point', ink: 'rounds', hollow: true } });
    }
    return legend;
  }

  readout(at: number): string {
    const said = [`step ${this.xs[at]!}`];
    if (this.raw[at] != null) {
      const mean = this.window ? ` (mean of ${this.window}: ${figure(this.mean[at])})` : '';
      said.push(`${this.title.toLowerCase()} ${figure(this.raw[at])}${mean}`);
    }
    if (this.used[at] != null) {
      said.push(`trained on ${figure(this.used[at])}`);
    }
    const round = this.rounds.find(one => one.step === this.xs[at]);
    if (round) {
      said.push(`${this.roundsAre} ${withInterval(round)}`);
    }
    return said.join(' · ');
  }

  describe(): string {
    const what = this.title.toLowerCase();
    const said: string[] = [];
    if (this.count) {
      const known = (value: Drawn): boolean => value != null;
      const ends = [this.raw.findIndex(known), this.raw.findLastIndex(known)];
      const [first, last] = ends.map(at => `${figure(this.raw[at])} at step ${this.xs[at]!}`);
      said.push(`${this.title} by step: ${first}, ${last}`);
    } else {
      said.push(`No ${what} yet`);
    }
    const best = this.best();
    if (best) {
      said.push(`best ${this.roundsAre} ${withInterval(best)} at step ${best.step}`);
    }
    return `${said.join('; ')}.`;
  }

  table(): Table {
    const what = this.title.toLowerCase();
    const places = thin(this.xs.length, 20);
    // A thinned table keeps every round that it has room for: they are what is compared.
    const rounds = thin(this.rounds.length, 20).map(n => nearest(this.xs, this.rounds[n]!.step));
    return {
      head: ['step', what, this.roundsAre],
      rows: union(places, rounds).map(n => {
        const round = this.rounds.find(one => one.step === this.xs[n]);
        return [String(this.xs[n]), figure(this.raw[n]), round ? withInterval(round) : '–'];
      })
    };
  }

  private get roundsAre(): string {
    return this.source.supervised ? 'validation loss' : 'held-out reward';
  }

  private best(): Round | undefined {
    const better = (a: Round, b: Round) =>
      this.source.supervised ? a.value < b.value : a.value > b.value;
    return this.rounds
      .filter(round => round.complete)
      .reduce<Round | undefined>(
        (best, round) => (!best || better(round, best) ? round : best),
        undefined
      );
  }

  private readRounds(): Round[] {
    const rows = this.source.rounds.byStep();
    const [values, lows, highs, whole] = ['value', 'low', 'high', 'complete'].map(name =>
      rows.column(name)
    );
    return Array.from(rows.steps, (step, n) => ({
      step,
      value: values![n]!,
      low: lows![n]!,
      high: highs![n]!,
      complete: whole![n] === 1
    })).filter(round => Number.isFinite(round.value));
  }

  /** Told only where it differs: otherwise everything was trained on. */
  private ofUsed(used: Float64Array, figures: Float64Array): Drawn[] {
    this.usedDiffers = used.some((value, n) => Number.isFinite(value) && value !== figures[n]);
    return this.usedDiffers ? present(used) : nothing(used.length);
  }

  /** The places of figures that are no numbers at all: there a line is interrupted. */
  private broken(steps: Float64Array, figures: Float64Array): number[] {
    const own = this.source.supervised ? 'loss' : 'avg_reward';
    return this.source.notFinite
      .filter(one => one.name === own)
      .map(one => ({ at: lowerBound(steps, one.step), step: one.step }))
      .filter(({ at, step }) => steps[at] === step && !Number.isFinite(figures[at]))
      .map(({ at }) => at);
  }

  private extent(): Range | null {
    return extent(
      this.raw,
      this.used,
      this.rounds.map(round => round.value),
      this.rounds.map(round => round.low),
      this.rounds.map(round => round.high)
    );
  }

  private drawBand(
    canvas: CanvasRenderingContext2D,
    theme: Theme,
    rounds: Round[],
    at: (round: Round, value: number) => [number, number]
  ): void {
    canvas.beginPath();
    rounds.forEach(round => canvas.lineTo(...at(round, round.high)));
    [...rounds].reverse().forEach(round => canvas.lineTo(...at(round, round.low)));
    canvas.closePath();
    canvas.fillStyle = `${theme.ink.rounds}33`;
    canvas.fill();
  }
}

function withInterval(round: Round): string {
  const interval =
    round.low <= round.high ? ` (${figure(round.low)} to ${figure(round.high)})` : '';
  return figure(round.value) + interval + (round.complete ? '' : ', incomplete');
}
