import type { CheckpointRow, State } from '../protocol';
import { h, mark, say, show, uniqueId } from './dom';
import { exportTab } from './exporting';
import type { Link } from './link';
import { resumeTab } from './resuming';
import type { Tab } from './tab';
import { tryTab } from './trying';
import { interval, pythonText, score } from './words';

/** What can be done with the picked checkpoint. */
export class Picked {
  readonly el = h('section', { class: 'nbtrain-section nbtrain-picked', hidden: true });
  private readonly title = h('h4');
  private readonly inPython = h('code', { class: 'nbtrain-muted nbtrain-python' });
  private readonly list = h('div', { role: 'tablist', class: 'nbtrain-tabs' });
  private readonly tabs: { tab: Tab; button: HTMLButtonElement }[];
  private row: CheckpointRow | null = null;
  private open: Tab['action'] | null = null;

  constructor(link: Link) {
    const picked = (): string => this.row?.id ?? '';
    const all: Tab[] = [
      tryTab(link, () => this.row),
      resumeTab(link, picked),
      exportTab(link, picked)
    ];
    this.tabs = all.map(tab => {
      const button = h(
        'button',
        {
          type: 'button',
          role: 'tab',
          id: uniqueId('tab'),
          onclick: () => {
            this.turn(tab.action);
          }
        },
        tab.label
      );
      tab.el.id = uniqueId('pane');
      mark(tab.el, 'role', 'tabpanel');
      mark(tab.el, 'aria-labelledby', button.id);
      mark(button, 'aria-controls', tab.el.id);
      return { tab, button };
    });
    this.list.append(...this.tabs.map(({ button }) => button));
    this.list.addEventListener('keydown', event => {
      this.byKey(event);
    });
    mark(this.list, 'aria-label', 'With this checkpoint');
    const line = h(
      'div',
      { class: 'nbtrain-line' },
      this.title,
      h('span', { class: 'nbtrain-spring' }),
      this.inPython
    );
    this.el.append(line, this.list, ...all.map(tab => tab.el));
  }

  update(row: CheckpointRow | null, state: Partial<State>): void {
    this.row = row;
    const allowed = this.tabs.filter(({ tab }) => state.actions?.[tab.action]);
    show(this.el, row !== null && allowed.length > 0);
    if (!row) {
      return;
    }
    const scored =
      row.score === null ? '' : ` · ${score(row.score)} ${interval(row.low, row.high)}`;
    say(this.title, `Checkpoint of step ${row.step}${scored}`);
    const run = state.head?.name ?? state.head?.run_id ?? '';
    say(this.inPython, `nbtrain.attach(${pythonText(run)}).panel().selected`);
    if (!allowed.some(({ tab }) => tab.action === this.open)) {
      this.open = allowed[0]?.tab.action ?? null;
    }
    for (const { tab, button } of this.tabs) {
      const open = tab.action === this.open;
      show(button, Boolean(state.actions?.[tab.action]));
      show(tab.el, open);
      mark(button, 'aria-selected', String(open));
      mark(button, 'tabindex', open ? '0' : '-1');
      tab.update(row, state);
    }
  }

  forget(): void {
    this.tabs.forEach(({ tab }) => {
      tab.forget();
    });
  }

  private turn(action: Tab['action']): void {
    this.open = action;
    for (const { tab, button } of this.tabs) {
      const open = tab.action === action;
      show(tab.el, open);
      mark(button, 'aria-selected', String(open));
      mark(button, 'tabindex', open ? '0' : '-1');
    }
  }

  private byKey(event: KeyboardEvent): void {
    const there = this.tabs.filter(({ button }) => !button.hidden);
    const at = there.findIndex(({ tab }) => tab.action === this.open);
    const to = {
      ArrowRight: at + 1,
      ArrowLeft: at - 1 + there.length,
      Home: 0,
      End: there.length - 1
    }[event.key];
    const next = to === undefined ? undefined : there[to % there.length];
    if (next) {
      event.preventDefault();
      this.turn(next.tab.action);
      next.button.focus();
    }
  }
}
