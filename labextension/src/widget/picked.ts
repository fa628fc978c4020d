import type {
  CheckpointRow,
  ExportArgs,
  GenerateArgs,
  GenerateResult,
  ResumeArgs,
  ResumeResult,
  State
} from '../protocol';
import { ActionButton } from './action';
import type { Does } from './action';
import { h, mark, say, sayOrHide, show, uniqueId } from './dom';
import type { Link } from './link';
import { counted, interval, score } from './words';

const MOST_REPLIES = 8;

/** One of the things that can be done with a checkpoint. */
interface Tab {
  action: 'generate' | 'resume' | 'export';
  label: string;
  el: HTMLElement;
  update(row: CheckpointRow, state: Partial<State>): void;
  /** Another run is shown: what became of the last one is of no interest any more. */
  forget(): void;
}

/** What can be done with the picked checkpoint. */
export class Picked {
  readonly el = h('section', { class: 'nbtrain-section nbtrain-picked', hidden: true });
  private readonly title = h('h4');
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
    this.el.append(this.title, this.list, ...all.map(tab => tab.el));
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

/** A label above its field. */
function field(label: string, input: HTMLElement, look = ''): HTMLElement {
  return h('label', { class: `nbtrain-field ${look}`.trim() }, h('span', {}, label), input);
}

function count(value: number, max: number | null): HTMLInputElement {
  return h('input', { type: 'number', min: 1, max, step: 1, value });
}

/** The whole number in a field, or in words what is wrong with it. */
function whole(input: HTMLInputElement, what: string, most = Infinity): number | string {
  const value = Number(input.value);
  if (input.value.trim() === '' || !Number.isInteger(value) || value < 1 || value > most) {
    const bound = most === Infinity ? 'at least 1' : `from 1 to ${most}`;
    return `${what} is a whole number, ${bound}.`;
  }
  return value;
}

function tryTab(link: Link, picked: () => CheckpointRow | null): Tab {
  const prompt = h('textarea', { rows: 3, placeholder: 'A prompt …' });
  const n = count(1, MOST_REPLIES);
  const replies = h('div', { class: 'nbtrain-replies' });
  const lacking = h('div', { class: 'nbtrain-muted' });
  let askedOf = 0;
  const does: Does = {
    label: 'Generate',
    action: 'generate',
    args: () => {
      const row = picked();
      const many = whole(n, 'The number of replies', MOST_REPLIES);
      if (!row) {
        return 'Pick a checkpoint first.';
      }
      if (prompt.value.trim() === '') {
        return 'Write a prompt first.';
      }
      if (typeof many === 'string') {
        return many;
      }
      askedOf = row.step;
      return { checkpoint: row.id, prompts: [prompt.value], n: many } satisfies GenerateArgs;
    },
    done: result => {
      const { samples } = result as GenerateResult;
      replies.replaceChildren(
        h(
          'div',
          { class: 'nbtrain-muted' },
          `${counted(samples.length, 'reply', 'replies')} of step ${askedOf} to “${brief(samples[0]?.prompt ?? '')}”`
        ),
        ...samples.map((sample, at) =>
          h(
            'figure',
            { class: 'nbtrain-reply' },
            h('figcaption', {}, `${at + 1} · ${sample.ended}`),
            h('pre', { class: 'nbtrain-text', dir: 'auto' }, sample.completion || '(nothing)')
          )
        )
      );
    }
  };
  const button = new ActionButton(link, does);
  prompt.addEventListener('keydown', event => {
    if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      button.go();
    }
  });
  const controls = h(
    'div',
    {},
    field('Prompt', prompt, 'nbtrain-broad'),
    h('div', { class: 'nbtrain-line' }, field('Replies', n, 'nbtrain-beside'), button.line())
  );
  return {
    action: 'generate',
    label: 'Try',
    el: h('div', { class: 'nbtrain-pane' }, lacking, controls, replies),
    update: row => {
      show(controls, row.has_weights);
      sayOrHide(lacking, row.has_weights ? null : 'It holds no weights any more.');
    },
    forget: () => {
      button.forget();
      replies.replaceChildren();
    }
  };
}

/** The beginning of a text, in a line. */
function brief(text: string): string {
  const line = text.replace(/\s+/g, ' ').trim();
  return line.length > 60 ? `${line.slice(0, 60)}…` : line;
}

function resumeTab(link: Link, picked: () => string): Tab {
  const steps = count(100, null);
  let chosen = false;
  steps.addEventListener('input', () => {
    chosen = true;
  });
  const name = h('input', { type: 'text', placeholder: 'optional', spellcheck: 'false' });
  const weightsOnly = h('input', { type: 'checkbox' });
  const lacking = h('div', { class: 'nbtrain-muted' });
  const follow = h('div', { class: 'nbtrain-line', hidden: true });
  let runId: string | null = null;
  let row: CheckpointRow | null = null;
  let mayFollow = false;
  const following = new ActionButton(link, {
    label: 'Follow it here',
    action: 'follow',
    args: () => ({ run_id: runId })
  });
  const startedSaid = h('span');
  follow.append(startedSaid, following.line());
  const button = new ActionButton(link, {
    label: 'Resume',
    action: 'resume',
    args: () => {
      const many = whole(steps, 'Further steps');
      if (typeof many === 'string') {
        return many;
      }
      if (row && !row.can_resume && !weightsOnly.checked) {
        return 'Without training state it resumes with weights only.';
      }
      follow.hidden = true;
      return {
        checkpoint: picked(),
        steps: many,
        name: name.value.trim() || null,
        weights_only: weightsOnly.checked
      } satisfies ResumeArgs;
    },
    done: result => {
      const run = result as ResumeResult;
      runId = run.run_id;
      say(startedSaid, `Started ${run.title}.`);
      follow.hidden = false;
      show(following.button, mayFollow);
    }
  });
  const controls = h(
    'div',
    {},
    h(
      'div',
      { class: 'nbtrain-line' },
      field('Further steps', steps),
      field('Name', name),
      h('label', { class: 'nbtrain-check' }, weightsOnly, 'weights only')
    ),
    button.line()
  );
  return {
    action: 'resume',
    label: 'Resume',
    el: h('div', { class: 'nbtrain-pane' }, lacking, controls, follow),
    update: (item, state) => {
      row = item;
      // As many again as this run was to do, until somebody says otherwise
      const again = state.progress ? state.progress.total - state.progress.start : 0;
      if (!chosen && again > 0) {
        steps.value = String(again);
      }
      mayFollow = state.actions?.follow ?? false;
      show(controls, item.can_resume || item.has_weights);
      sayOrHide(lacking, lackingWords(item));
    },
    forget: () => {
      runId = null;
      follow.hidden = true;
      button.forget();
      following.forget();
    }
  };
}

function lackingWords(row: CheckpointRow): string | null {
  if (row.can_resume) {
    return null;
  }
  return row.has_weights
    ? 'It holds no training state: it can be resumed with weights only, with a fresh optimizer.'
    : 'It holds neither training state nor weights any more.';
}

function exportTab(link: Link, picked: () => string): Tab {
  const folder = h('input', {
    type: 'text',
    placeholder: 'exported/adapter',
    spellcheck: 'false'
  });
  const lacking = h('div', { class: 'nbtrain-muted' });
  const button = new ActionButton(link, {
    label: 'Export',
    action: 'export',
    args: () =>
      folder.value.trim() === ''
        ? 'Name a folder first.'
        : ({ checkpoint: picked(), folder: folder.value.trim() } satisfies ExportArgs)
  });
  const controls = h(
    'div',
    {},
    field('Folder, on the machine of the kernel', folder, 'nbtrain-broad'),
    button.line()
  );
  return {
    action: 'export',
    label: 'Export',
    el: h('div', { class: 'nbtrain-pane' }, lacking, controls),
    update: row => {
      show(controls, row.has_weights);
      sayOrHide(lacking, row.has_weights ? null : 'It holds no weights any more.');
    },
    forget: () => {
      button.forget();
    }
  };
}
