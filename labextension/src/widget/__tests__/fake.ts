/** A kernel's side of the conversation, without a kernel. */
import type { CheckpointRow, FromKernel, FromPage, State, TableRows } from '../../protocol.js';
import { ROUNDS, STEPS_REINFORCED, STEPS_SUPERVISED } from '../../protocol.js';
import type { Model } from '../link';

type Listener = (...args: unknown[]) => void;

export class FakeModel implements Model {
  readonly sent: FromPage[] = [];
  saved = 0;
  private readonly traits = new Map<string, unknown>([['selected_id', '']]);
  private readonly listeners = new Map<string, Set<Listener>>();

  get(name: string): unknown {
    return this.traits.get(name);
  }

  set(name: string, value: unknown): void {
    this.traits.set(name, value);
  }

  save_changes(): void {
    this.saved += 1;
  }

  send(content: unknown): void {
    this.sent.push(content as FromPage);
  }

  on(name: string, callback: (...args: never[]) => void): void {
    const of = this.listeners.get(name) ?? new Set();
    this.listeners.set(name, of.add(callback as Listener));
  }

  off(name: string, callback: (...args: never[]) => void): void {
    this.listeners.get(name)?.delete(callback as Listener);
  }

  /** How many listen, to anything. */
  get listening(): number {
    return [...this.listeners.values()].reduce((sum, of) => sum + of.size, 0);
  }

  /** What Python does when it sets a trait. */
  fromPython(name: string, value: unknown): void {
    this.traits.set(name, value);
    this.listeners.get(`change:${name}`)?.forEach(listener => {
      listener();
    });
  }

  hear(message: FromKernel, buffers: readonly DataView[] = []): void {
    this.listeners.get('msg:custom')?.forEach(listener => {
      listener(message, buffers);
    });
  }

  of<K extends FromPage['kind']>(kind: K): Extract<FromPage, { kind: K }>[] {
    return this.sent.filter(
      (message): message is Extract<FromPage, { kind: K }> => message.kind === kind
    );
  }
}

export interface Table {
  name: TableRows['name'];
  columns: readonly string[];
  /** One array per column. */
  values: number[][];
}

export interface World {
  tables: Table[];
  state: State;
}

let serials = 0;

/** Says an update; returns its serial. */
export function tell(
  model: FakeModel,
  { tables = [], state = {} }: { tables?: Table[]; state?: Partial<State> },
  { feed = 'feed', base = 0 }: { feed?: string; base?: number } = {}
): number {
  serials += 1;
  model.hear(
    {
      kind: 'update',
      feed,
      serial: serials,
      base,
      tables: tables.map(({ name, columns, values }) => ({
        name,
        columns: [...columns],
        rows: values[0]?.length ?? 0
      })),
      state
    },
    tables.flatMap(({ values }) =>
      values.map(column => new DataView(Float64Array.from(column).buffer))
    )
  );
  return serials;
}

/** The same figures at each call. */
function noise(seed: number): () => number {
  let at = seed;
  return () => {
    at = (at * 1664525 + 1013904223) % 2 ** 32;
    return at / 2 ** 32 - 0.5;
  };
}

function columnsOf(rows: number[][], width: number): number[][] {
  return Array.from({ length: width }, (_, n) => rows.map(row => row[n] ?? NaN));
}

/** Rows of steps of a reinforcement run, from `first` on. */
export function reinforcedSteps(count: number, first = 1, total = count): Table {
  const random = noise(first);
  const rows = Array.from({ length: count }, (_, n) => {
    const step = first + n;
    const reward = 0.82 - 0.6 * Math.exp((-3 * step) / total) + 0.18 * random();
    const used = Math.round(6 + 4 * random());
    const tied = Math.round(3 + 3 * random());
    const filtered = Math.max(0, Math.round(2 * random()));
    const rest = 16 - used - tied - filtered;
    const rate = 1e-5 * Math.min(1, step / (0.05 * total)) * (1 - (0.9 * step) / total);
    return [
      step,
      step,
      reward,
      reward + 0.05 * random(),
      rate,
      used,
      tied,
      filtered,
      Math.floor(rest / 2),
      Math.floor(rest / 3),
      rest - Math.floor(rest / 2) - Math.floor(rest / 3)
    ];
  });
  return {
    name: 'steps',
    columns: STEPS_REINFORCED,
    values: columnsOf(rows, STEPS_REINFORCED.length)
  };
}

export function supervisedSteps(count: number, first = 1, total = count): Table {
  const random = noise(first);
  const rows = Array.from({ length: count }, (_, n) => {
    const step = first + n;
    const rate = 2e-4 * Math.min(1, step / (0.05 * total)) * (1 - (0.95 * step) / total);
    return [
      step,
      step,
      0.6 + 1.9 * Math.exp((-4 * step) / total) + 0.12 * random(),
      rate,
      1 + random()
    ];
  });
  return {
    name: 'steps',
    columns: STEPS_SUPERVISED,
    values: columnsOf(rows, STEPS_SUPERVISED.length)
  };
}

function rounds(every: number, upTo: number, at: (step: number) => number): Table {
  const random = noise(every);
  const rows: number[][] = [];
  for (let step = every; step <= upTo; step += every) {
    const value = at(step) + 0.03 * random();
    const whole = step + every <= upTo;
    rows.push([step, step, value, value - 0.05, value + 0.05, whole ? 1 : 0]);
  }
  return { name: 'rounds', columns: ROUNDS, values: columnsOf(rows, ROUNDS.length) };
}

export function checkpoint(step: number, more: Partial<CheckpointRow> = {}): CheckpointRow {
  return {
    id: `ckpt${step}`,
    step,
    score: null,
    low: null,
    high: null,
    complete: null,
    rank: null,
    best: false,
    tie: null,
    holds: 'weights and training state',
    can_resume: true,
    has_weights: true,
    ...more
  };
}

/** The checkpoints at the rounds, ranked. */
function ranked({ values }: Table, higher: boolean): CheckpointRow[] {
  const [, steps = [], scores = [], lows = [], highs = [], complete = []] = values;
  const rows = steps.map((step, n) =>
    checkpoint(step, {
      score: scores[n]!,
      low: lows[n]!,
      high: highs[n]!,
      complete: complete[n] === 1,
      ...(n % 3 === 2 && { holds: 'weights', can_resume: false })
    })
  );
  const sign = higher ? -1 : 1;
  const whole = rows
    .filter(row => row.complete)
    .sort((one, other) => sign * (one.score! - other.score!))
    .map((row, n) => ({
      ...row,
      rank: n + 1,
      best: n === 1,
      tie: n === 0 || n > 3 ? null : `ties with step ${steps[n]}`
    }));
  return [...whole, ...rows.filter(row => !row.complete)];
}

const TASK =
  'You are given a list of integers. Return the two that sum to the target.\n' +
  'nums = [2, 7, 11, 15], target = 9\nAnswer with the indices only, in the form [i, j].';

const REPLY =
  'Let me look at the list. 2 + 7 = 9, so the first two numbers are the ones that are wanted.\n\n' +
  '<script>alert("never")</script> <img src=x onerror="alert(1)">\n\n' +
  'The indices of 2 and 7 are 0 and 1, because the counting starts with zero.\n\n[0, 1]';

/** A reinforcement run in its middle. */
export function reinforced(completed = 120, total = 200): World {
  const steps = reinforcedSteps(completed, 1, total);
  const every = Math.max(1, Math.floor(total / 20));
  const table = rounds(every, completed, at => 0.8 - 0.5 * Math.exp((-3 * at) / total));
  const shown = Array.from({ length: 200 }, (_, n) => Math.round((n * total) / 199));
  const trajectory = (id: string, reward: number | null, verdict: string, reason: string) => ({
    id,
    step: completed,
    reward,
    terms: [
      { name: 'correct', score: reward },
      { name: 'format', score: 1 },
      { name: 'length', score: -0.125 }
    ],
    verdict,
    reason,
    turns: 1,
    tokens: 214,
    prompt: TASK,
    completion: REPLY
  });
  return {
    tables: [steps, table],
    state: {
      head: {
        run_id: '1a2b3c4d5e6f7a8b',
        name: 'first',
        title: 'run first (1a2b3c4d5e6f)',
        status: 'running',
        headline: 'training',
        subject: 'gspo · two sums · Qwen2.5-0.5B-Instruct',
        activity: 'generating 16 groups of 8 for step 121',
        message: null,
        doubtful: false,
        over: false,
        notes: []
      },
      progress: {
        start: 0,
        completed,
        total,
        eta_seconds: 1480,
        elapsed_seconds: 2210,
        counts: '15,360 replies, 15,342 graded; 3.1 M tokens generated',
        movement: ['reward 0.31 → 0.74 (means of the first and last 10 steps)']
      },
      about: {
        method: 'gspo',
        supervised: false,
        score: 'held-out reward',
        higher_is_better: true,
        unranked: null
      },
      schedule: {
        steps: shown,
        rates: shown.map(at => 1e-5 * Math.min(1, at / (0.05 * total)) * (1 - (0.9 * at) / total))
      },
      checkpoints: ranked(table, true),
      trajectories: {
        step: completed,
        best: [trajectory('t1', 1.875, 'trained on', 'stop')],
        worst: [trajectory('t2', -0.125, 'not trained on: no signal in its group', 'max_tokens')]
      },
      diagnosis: [
        {
          severity: 'problem',
          sentence:
            '5 of the last 16 groups had no signal: every reply of theirs got the same reward.',
          suggestion: 'Raise group_size, or leave out tasks that are always solved.'
        },
        {
          severity: 'hint',
          sentence: 'Replies grew from 120 to 214 tokens while the held-out reward stood still.',
          suggestion: 'Look at the best trajectories: length alone may be what is rewarded.'
        },
        { severity: 'fine', sentence: 'The learning rate has warmed up.', suggestion: null },
        { severity: 'fine', sentence: 'Every trajectory has a grade.', suggestion: null }
      ],
      not_finite: [],
      log: Array.from({ length: 60 }, (_, n) => `12:00:${n % 60} step ${n + 60} done`).join('\n'),
      actions: { cancel: true, generate: true, resume: true, export: true, follow: true }
    }
  };
}

/** A supervised run that ended, with figures that are not finite. */
export function supervised(completed = 400, total = 400): World {
  const steps = supervisedSteps(completed, 1, total);
  for (const [at, value] of [NaN, Infinity, -Infinity].entries()) {
    steps.values[2]![101 + at] = value;
  }
  const table = rounds(total / 10, completed, at => 0.8 + 1.6 * Math.exp((-4 * at) / total));
  const { state } = reinforced(completed, total);
  return {
    tables: [steps, table],
    state: {
      ...state,
      head: {
        ...state.head,
        run_id: '9f8e7d6c5b4a',
        name: 'warm start',
        title: 'run warm start (9f8e7d6c5b4a)',
        status: 'succeeded',
        headline: 'succeeded after 400 steps',
        subject: 'sft · worked sums · Qwen2.5-0.5B-Instruct',
        activity: null,
        over: true,
        notes: ['registered as model warm-start, version 3']
      },
      progress: {
        ...state.progress,
        eta_seconds: null,
        counts: '12,800 examples, 4.1 M tokens',
        movement: ['loss 2.31 → 0.64 (means of the first and last 10 steps)']
      },
      about: {
        method: 'sft',
        supervised: true,
        score: 'validation loss',
        higher_is_better: false,
        unranked: null
      },
      schedule: {
        steps: state.schedule.steps,
        rates: state.schedule.steps.map(
          at => 2e-4 * Math.min(1, at / (0.05 * total)) * (1 - (0.95 * at) / total)
        )
      },
      checkpoints: ranked(table, false),
      trajectories: { step: null, best: [], worst: [] },
      diagnosis: state.diagnosis.filter(({ severity }) => severity === 'fine'),
      not_finite: [102, 103, 104].map(step => ({ step, name: 'loss' })),
      actions: { ...state.actions, cancel: false }
    }
  };
}
