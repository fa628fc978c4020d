import type { State, TrajectoryShown } from '../protocol';
import { button, h, Keyed, mark, say, show } from './dom';
import type { Drawn } from './dom';
import { counted, figure } from './words';

/** The best and the worst of the newest step. */
export class Trajectories {
  readonly el = h('details', { class: 'nbtrain-section', open: true, hidden: true });
  private readonly title = h('summary', {}, 'Trajectories');
  private readonly best = new Side('Best');
  private readonly worst = new Side('Worst');

  constructor() {
    this.el.append(this.title, h('div', { class: 'nbtrain-sides' }, this.best.el, this.worst.el));
  }

  update({ trajectories }: Partial<State>): void {
    if (!trajectories) {
      return;
    }
    const { step, best, worst } = trajectories;
    say(this.title, step === null ? 'Trajectories' : `Trajectories of step ${step}`);
    show(this.el, best.length + worst.length > 0);
    this.best.update(best);
    this.worst.update(worst);
  }
}

class Side {
  readonly el: HTMLElement;
  private readonly cards: Keyed<TrajectoryShown>;

  constructor(name: string) {
    const list = h('div', { class: 'nbtrain-cards' });
    this.el = h('div', {}, h('h5', {}, name), list);
    this.cards = new Keyed(list, shown => shown.id, card);
  }

  update(items: TrajectoryShown[]): void {
    show(this.el, items.length > 0);
    this.cards.update(items);
  }
}

function card(): Drawn<TrajectoryShown> {
  const reward = h('strong');
  const verdict = h('span', { class: 'nbtrain-verdict' });
  const terms = h('div', { class: 'nbtrain-muted' });
  const how = h('div', { class: 'nbtrain-muted' });
  const prompt = new Folded('Prompt');
  const completion = new Folded('Completion');
  const head = h('div', { class: 'nbtrain-line' }, reward, verdict);
  return {
    el: h('article', { class: 'nbtrain-card' }, head, terms, how, prompt.el, completion.el),
    update: item => {
      say(reward, item.reward === null ? 'no reward' : `reward ${figure(item.reward)}`);
      say(verdict, item.verdict);
      // A name of the other direction must not turn the figure behind it
      terms.replaceChildren(
        ...item.terms.flatMap(({ name, score }, at) => [
          at ? ' · ' : '',
          h('bdi', {}, name),
          ` ${figure(score)}`
        ])
      );
      show(terms, item.terms.length > 0);
      const size = `${counted(item.turns, 'turn')}, ${counted(item.tokens, 'token')}`;
      say(how, `${item.reason} · ${size}`);
      prompt.say(item.prompt);
      completion.say(item.completion);
    }
  };
}

/** A text of which the first lines are shown until somebody wants more. */
class Folded {
  readonly el = h('div');
  private readonly text = h('pre', { class: 'nbtrain-text', dir: 'auto' });
  private readonly more = button(
    'more',
    () => {
      this.fold(!this.folded);
    },
    'nbtrain-link'
  );
  private folded = true;

  constructor(private readonly name: string) {
    this.el.append(h('div', { class: 'nbtrain-label' }, name), this.text, this.more);
    this.fold(true);
    // What fits depends on the width: the observer goes with the element
    new ResizeObserver(() => {
      this.offerMore();
    }).observe(this.text);
  }

  say(text: string): void {
    say(this.text, text === '' ? '(empty)' : text);
    this.offerMore();
  }

  private fold(folded: boolean): void {
    this.folded = folded;
    this.text.classList.toggle('nbtrain-folded', folded);
    say(this.more, folded ? 'more' : 'less');
    mark(this.more, 'aria-expanded', String(!folded));
    mark(this.more, 'aria-label', `${folded ? 'more' : 'less'} of the ${this.name.toLowerCase()}`);
  }

  private offerMore(): void {
    const { scrollHeight, clientHeight } = this.text;
    show(this.more, !this.folded || scrollHeight > clientHeight + 1);
  }
}
