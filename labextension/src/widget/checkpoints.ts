import type { About, CheckpointRow, State } from '../protocol';
import { button, h, Keyed, mark, say, sayOrHide, show, uniqueId } from './dom';
import type { Drawn } from './dom';
import { interval, score as scored } from './words';

const SHOWN = 8;

/** The ranked checkpoints; one of them can be picked, with the mouse or the arrow keys. */
export class Checkpoints {
  readonly el = h('section', { class: 'nbtrain-section' });
  private readonly group = uniqueId('picked');
  private readonly scoreName = h('th', { scope: 'col' });
  private readonly body = h('tbody');
  private readonly table: HTMLElement;
  private readonly none = h('div', { class: 'nbtrain-muted' }, 'None.');
  private readonly earliest = h('div', { class: 'nbtrain-muted', hidden: true });
  private readonly unranked = h('div', { class: 'nbtrain-muted' });
  private readonly more = button(
    '',
    () => {
      this.all = !this.all;
      this.draw();
    },
    'nbtrain-link'
  );
  private readonly rows: Keyed<CheckpointRow>;
  private bestMeans = '';
  private all = false;
  private picked: string | null = null;
  private items: CheckpointRow[] = [];

  constructor(private readonly pick: (id: string) => void) {
    const title = h('h4', { id: uniqueId('checkpoints') }, 'Checkpoints');
    const columns = ['rank', 'step'].map(name => h('th', { scope: 'col' }, name));
    this.table = h(
      'table',
      { class: 'nbtrain-table', 'aria-labelledby': title.id },
      h(
        'thead',
        {},
        h(
          'tr',
          {},
          h('th', { scope: 'col' }, h('span', { class: 'nbtrain-aloud' }, 'picked')),
          ...columns,
          this.scoreName,
          h('th', { scope: 'col' }, 'round'),
          h('th', { scope: 'col' }, 'holds')
        )
      ),
      this.body
    );
    // The group is around the table: on it, the role would hide the table from a screen reader
    const wide = h(
      'div',
      { role: 'radiogroup', 'aria-labelledby': title.id, class: 'nbtrain-wide' },
      this.table
    );
    this.rows = new Keyed(
      this.body,
      row => row.id,
      row => this.row(row)
    );
    this.el.append(title, this.unranked, this.none, wide, this.more, this.earliest);
  }

  update({ about, checkpoints }: Partial<State>): void {
    if (about) {
      this.name(about);
    }
    if (checkpoints) {
      this.items = checkpoints;
      this.draw();
    }
  }

  /** Shows which one is picked; `null` for none. */
  show(id: string | null): void {
    this.picked = id;
    this.draw();
  }

  private name(about: About): void {
    say(this.scoreName, about.score);
    sayOrHide(this.unranked, about.unranked);
    const top = about.higher_is_better ? 'highest' : 'lowest';
    this.bestMeans = `★ best: the earliest checkpoint whose difference to the ${top} may be nothing.`;
    if (!this.earliest.hidden) {
      say(this.earliest, this.bestMeans);
    }
  }

  private draw(): void {
    const { items } = this;
    this.rows.update(
      this.all ? items : items.filter((row, at) => at < SHOWN || row.id === this.picked)
    );
    const best = items.find(row => row.best);
    sayOrHide(this.earliest, best?.tie ? this.bestMeans : null);
    show(this.none, items.length === 0);
    show(this.table, items.length > 0);
    show(this.more, items.length > SHOWN);
    say(this.more, this.all ? 'show fewer' : `show all ${items.length}`);
    mark(this.more, 'aria-expanded', String(this.all));
  }

  private row(first: CheckpointRow): Drawn<CheckpointRow> {
    const radio = h('input', {
      type: 'radio',
      name: this.group,
      value: first.id,
      onchange: () => {
        this.pick(first.id);
      }
    });
    const cell = (name: string): HTMLElement => h('td', { class: `nbtrain-${name}` });
    const [rank, step, score] = [cell('rank'), cell('step'), cell('score')];
    const [round, holds] = [cell('round'), cell('holds')];
    const value = h('span');
    const bounds = h('span');
    const best = h('span', { class: 'nbtrain-best' }, '★ best');
    const tie = h('span', { class: 'nbtrain-muted' });
    score.append(value, ' ', bounds, ' ', best, ' ', tie);
    const el = h(
      'tr',
      {
        onclick: () => {
          radio.click();
        }
      },
      h('td', {}, radio),
      rank,
      step,
      score,
      round,
      holds
    );
    radio.addEventListener('click', event => {
      event.stopPropagation();
    });
    return {
      el,
      update: item => {
        const picked = item.id === this.picked;
        radio.checked = picked;
        mark(el, 'aria-selected', String(picked));
        mark(radio, 'aria-label', `step ${item.step}, ${about(item)}`);
        mark(el, 'title', item.id);
        say(rank, item.rank === null ? '–' : String(item.rank));
        say(step, String(item.step));
        say(value, scored(item.score));
        sayOrHide(bounds, interval(item.low, item.high));
        show(best, item.best);
        sayOrHide(tie, item.best && item.tie ? `(${item.tie})` : item.tie);
        say(round, item.complete === null ? '–' : item.complete ? 'complete' : 'not complete');
        say(holds, item.holds);
      }
    };
  }
}

/** A checkpoint in words, for those who hear one row at a time. */
function about({ rank, score, low, high, best, tie }: CheckpointRow): string {
  const words = [
    rank === null ? 'not ranked' : `rank ${rank}`,
    score === null ? null : `${scored(score)} ${interval(low, high)}`.trim(),
    best ? 'best' : null,
    tie
  ];
  return words.filter(Boolean).join(', ');
}
