/**
 * What a panel in a page and the kernel behind it say to each other.
 *
 * The kernel side is `nbtrain/notebook/panel/`; both change together.
 *
 * Everything goes through custom messages of the widget's comm. Figures travel as binary columns
 * of Float64 and are keyed by row id: a row may come again with other values (a step may change
 * until it is settled), and steps repeat after a resume, so neither order nor step identifies one.
 * A missing figure is NaN. Everything else is strict JSON.
 *
 * A page that has just drawn itself says `hello` and gets a whole `update` (`base` 0). Later
 * updates build on the one before: `base` is the serial that they need. Where a page does not have
 * that one it ignores the update and says `hello` again.
 */

/** From the page. */
export type FromPage =
  | { kind: 'code'; have: string | null }
  | { kind: 'hello' }
  | {
      kind: 'do';
      id: number;
      action: ActionName;
      args: Record<string, unknown>;
    };

/** From the kernel. */
export type FromKernel =
  | Code
  | Update
  /** The kernel lives. Sent every 3 s; a page that hears nothing for 10 s says so. */
  | { kind: 'tick' }
  /** How far an action is. */
  | { kind: 'doing'; id: number; said: string }
  /** The end of an action. */
  | { kind: 'done'; id: number; ok: true; said: string; result?: unknown }
  | { kind: 'done'; id: number; ok: false; said: string };

/** The panel's program; buffers: its JavaScript module and its style sheet, both UTF-8. */
export interface Code {
  kind: 'code';
  hash: string;
}

/** New rows and what changed of the state; buffers: one per column, tables in order. */
export interface Update {
  kind: 'update';
  /** Another run, or another attempt of it, is another feed: what came before is forgotten. */
  feed: string;
  serial: number;
  /** 0: this is everything; otherwise the serial that this one builds on. */
  base: number;
  tables: TableRows[];
  /** Only the parts that changed; each replaces the whole part. */
  state: Partial<State>;
}

/** `columns[0]` is always `id`. */
export interface TableRows {
  name: 'steps' | 'rounds';
  columns: string[];
  rows: number;
}

/**
 * The columns of the two tables. A supervised run has `loss`, `learning_rate` and `grad_norm` in
 * its steps, another has `avg_reward`, `used_reward`, `learning_rate` and where its groups went.
 * `value` of a round is the held-out reward or the validation loss, `complete` 0 or 1.
 */
export const STEPS_REINFORCED = [
  'id',
  'step',
  'avg_reward',
  'used_reward',
  'learning_rate',
  'used',
  'no_signal',
  'filtered',
  'too_small',
  'discarded',
  'pending'
] as const;
export const STEPS_SUPERVISED = ['id', 'step', 'loss', 'learning_rate', 'grad_norm'] as const;
export const ROUNDS = ['id', 'step', 'value', 'low', 'high', 'complete'] as const;

export type ActionName = 'cancel' | 'generate' | 'resume' | 'export' | 'follow';

/** Every text is the text of models, tasks or people: it is shown as text and never as markup. */
export interface State {
  head: Head;
  progress: Progress;
  about: About;
  schedule: Schedule;
  checkpoints: CheckpointRow[];
  trajectories: Trajectories;
  diagnosis: Finding[];
  /** Steps whose figure was recorded as NaN or infinite: shown as such, not as missing. */
  not_finite: { step: number; name: string }[];
  /** The last lines of the run's log. */
  log: string;
  actions: Record<ActionName, boolean>;
}

export interface Head {
  run_id: string;
  name: string | null;
  /** `run first (1a2b3c4d5e6f)` */
  title: string;
  status: 'pending' | 'running' | 'succeeded' | 'failed' | 'cancelled';
  /** The phase, or what became of the run, as its static summary says it. */
  headline: string;
  /** What it trains on what, in a line. */
  subject: string;
  activity: string | null;
  /** Failure or reason for an early end. */
  message: string | null;
  /** Ended well in name only (no weight changed, say). */
  doubtful: boolean;
  over: boolean;
  notes: string[];
}

export interface Progress {
  start: number;
  completed: number;
  total: number;
  eta_seconds: number | null;
  elapsed_seconds: number | null;
  /** Updates, trajectories and tokens in a line, and what moved as sentences. */
  counts: string;
  movement: string[];
}

export interface About {
  method: string;
  supervised: boolean;
  /** What ranks checkpoints: `held-out reward` or `validation loss`. */
  score: string;
  higher_is_better: boolean;
  /** Why nothing ranks the checkpoints, where nothing does. */
  unranked: string | null;
}

/** The learning rate over the whole run, thinned to at most 200 points. */
export interface Schedule {
  steps: number[];
  rates: number[];
}

/** Ranked: complete rounds by score, then the others by step. */
export interface CheckpointRow {
  id: string;
  step: number;
  score: number | null;
  low: number | null;
  high: number | null;
  /** Whether the round at its step was complete; null without a round. */
  complete: boolean | null;
  rank: number | null;
  best: boolean;
  /** `ties with step 40`; `highest`, of a loss `lowest`, of the one that the best ties with. */
  tie: string | null;
  holds: string;
  can_resume: boolean;
  has_weights: boolean;
}

export interface Trajectories {
  step: number | null;
  best: TrajectoryShown[];
  worst: TrajectoryShown[];
}

export interface TrajectoryShown {
  id: string;
  step: number;
  reward: number | null;
  terms: { name: string; score: number | null }[];
  /** Why it was or was not trained on. */
  verdict: string;
  /** How it ended. */
  reason: string;
  turns: number;
  tokens: number;
  prompt: string;
  completion: string;
}

export interface Finding {
  severity: 'problem' | 'hint' | 'fine';
  sentence: string;
  suggestion: string | null;
}

/** What `generate` takes and gives. */
export interface GenerateArgs {
  checkpoint: string;
  prompts: string[];
  n: number;
}
export interface GenerateResult {
  samples: { prompt: string; completion: string; ended: string }[];
}

/** What `resume` takes and gives; `follow` takes the run's id and turns the panel to it. */
export interface ResumeArgs {
  checkpoint: string;
  steps: number;
  name: string | null;
  weights_only: boolean;
}
export interface ResumeResult {
  run_id: string;
  title: string;
}

/** What `export` takes. */
export interface ExportArgs {
  checkpoint: string;
  folder: string;
}
