import { Charts } from '../chart/index';
import type { ChartKind, Shown } from '../chart/index';
import type { State } from '../protocol';
import { h, sayOrHide, show } from './dom';
import type { Brought } from './feed';
import { listed } from './words';

/** The charts of a run, and in words which figures were not finite. */
export class Figures {
  readonly el = h('section', { class: 'nbtrain-section nbtrain-figures' });
  private readonly title = h('h4', { class: 'nbtrain-aloud' }, 'Charts');
  private readonly notFinite = h('div', { class: 'nbtrain-muted' });
  private readonly none = h('div', { class: 'nbtrain-muted' }, 'No step has ended yet.');
  private readonly place = h('div', { class: 'nbtrain-charts' });
  private hosts = new Map<ChartKind, HTMLElement>();
  /** What there is to draw, as far as it has come. */
  private there = { steps: false, rounds: false, plan: false };
  private charts: Charts | null = null;
  private supervised: boolean | null = null;

  constructor(private readonly pickStep: (step: number) => void) {
    this.el.append(this.title, this.none, this.place, this.notFinite);
  }

  update({ changed, tables, everything }: Brought): void {
    if (changed.about && changed.about.supervised !== this.supervised) {
      this.start(changed.about.supervised);
    } else if (everything) {
      this.charts?.clear();
    }
    if (everything) {
      this.there = { steps: false, rounds: false, plan: false };
    }
    for (const { name, columns, values } of tables) {
      this.charts?.update(name, columns, values);
      this.there[name] ||= Boolean(values[0]?.length);
    }
    if (changed.schedule) {
      this.there.plan = changed.schedule.steps.length > 0;
    }
    const shown = shownOf(changed);
    if (Object.keys(shown).length > 0) {
      this.charts?.show(shown);
    }
    if (changed.not_finite) {
      sayOrHide(this.notFinite, notFiniteWords(changed.not_finite));
    }
  }

  pick(step: number | null): void {
    this.charts?.show({ picked: step });
  }

  /** Draws what came; a chart without anything in it is left out. */
  draw(): void {
    const { steps, rounds, plan } = this.there;
    const filled = { curve: steps || rounds, outcomes: steps, rate: steps || plan };
    this.hosts.forEach((host, kind) => {
      show(host, filled[kind]);
    });
    show(this.none, !filled.curve);
    this.charts?.flush();
  }

  close(): void {
    this.charts?.destroy();
    this.charts = null;
  }

  private start(supervised: boolean): void {
    this.charts?.destroy();
    this.supervised = supervised;
    this.charts = new Charts({ supervised, onPick: this.pickStep });
    const kinds: ChartKind[] = supervised ? ['curve', 'rate'] : ['curve', 'outcomes', 'rate'];
    this.hosts = new Map(kinds.map(kind => [kind, h('div')]));
    this.place.replaceChildren(...this.hosts.values());
    for (const [kind, host] of this.hosts) {
      this.charts.mount(host, kind);
    }
  }
}

/** What of the state the charts draw beside the rows. */
function shownOf({ checkpoints, not_finite, schedule, progress }: Partial<State>): Partial<Shown> {
  return {
    ...(checkpoints && { checkpoints }),
    ...(not_finite && { notFinite: not_finite }),
    ...(schedule && { schedule }),
    ...(progress && { total: progress.total, completed: progress.completed })
  };
}

/** `loss was not finite (NaN or inf) at steps 3, 4 and 5` */
function notFiniteWords(all: State['not_finite']): string {
  const steps = new Map<string, number[]>();
  for (const { name, step } of all) {
    steps.set(name, [...(steps.get(name) ?? []), step]);
  }
  return [...steps]
    .map(([name, at]) => {
      const what = at.length === 1 ? 'step' : 'steps';
      return `${name} was not finite (NaN or inf) at ${what} ${listed(at)}`;
    })
    .join('\n');
}
