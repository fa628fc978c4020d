/** What all charts of a panel draw from, and what each kind of chart makes of it. */
import type uPlot from 'uplot';

import type { Swatch } from './marks';
import type { Rows } from './rows';
import type { Drawn, Range } from './series';
import type { Theme } from './theme';

export interface Checkpoint {
  step: number;
  best: boolean;
}

/** A figure that was recorded as NaN or infinite. */
export interface NotFinite {
  step: number;
  name: string;
}

/** What is drawn beside the rows. */
export interface Beside {
  checkpoints: readonly Checkpoint[];
  /** The step of the picked checkpoint. */
  picked: number | null;
  notFinite: readonly NotFinite[];
  /** The planned learning rate, over the whole run. */
  schedule: { steps: readonly number[]; rates: readonly number[] };
  /** How many steps the run wants, and how many it has. */
  total: number;
  completed: number;
}

/** A change of it: what is left out stays as it was. */
export type Shown = Partial<Beside>;

export interface Source extends Beside {
  supervised: boolean;
  steps: Rows;
  rounds: Rows;
}

/** What a chart draws: `ys` one per series, each as long as `xs`, where the cursor can rest. */
export interface Prepared {
  xs: number[];
  ys: Drawn[][];
  xRange: Range;
  yRange: Range;
  /** How many figures of the run are in it, and the newest step. */
  points: number;
  lastStep: number | null;
  /** The place that is read out while there is no cursor; -1: none. */
  rest: number;
}

export interface Legend {
  label: string;
  swatch: Swatch;
}

export interface Table {
  head: string[];
  rows: string[][];
}

/** What differs between the kinds of charts. Called anew after each change, `prepare` first. */
export interface Kind {
  readonly title: string;
  readonly height: number;
  readonly series: uPlot.Series[];
  /** Whether it counts things: its axis has whole numbers only. */
  readonly whole?: boolean;
  /** Whether it shows where the checkpoints are; the picked one is shown by all. */
  readonly marked?: boolean;
  /** Whether a figure of this column belongs to it. */
  tells(column: string): boolean;
  prepare(width: number): Prepared;
  /** Draws what is no line, over the lines. */
  draw(plot: uPlot, theme: Theme): void;
  legend(): Legend[];
  /** What stands at a place of `xs`, in words. */
  readout(at: number): string;
  /** What the chart shows, in words. */
  describe(): string;
  table(): Table;
}

/**
 * From the first to the last step of a run, the same for all charts of its past, so that they stand
 * over each other. Half a step of room at both ends is for bars.
 */
export function stepRange({ steps, rounds }: Source): Range {
  const ends = [steps, rounds].flatMap(table => {
    const all = table.byStep().steps;
    return all.length ? [all[0]!, all.at(-1)!] : [];
  });
  return ends.length ? [Math.min(...ends) - 0.5, Math.max(...ends) + 0.5] : [0.5, 1.5];
}
