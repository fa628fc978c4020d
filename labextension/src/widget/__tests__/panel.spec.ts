import './stubs';

import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import type { ActionName, State } from '../../protocol';
import panel from '../index';
import { checkpoint, FakeModel, reinforced, reinforcedSteps, supervised, tell } from './fake';

let model: FakeModel;
let el: HTMLElement;
let close: () => void;

const frame = (): void => {
  vi.advanceTimersByTime(20);
};

const seconds = (count: number): void => {
  vi.advanceTimersByTime(count * 1000);
};

// eslint-disable-next-line @typescript-eslint/no-unnecessary-type-parameters -- as querySelector has it
function find<T extends HTMLElement = HTMLElement>(selector: string): T {
  const found = el.querySelector<T>(selector);
  if (!found) {
    throw new Error(`nothing is ${selector}`);
  }
  return found;
}

function text(selector: string): string {
  return find(selector).textContent;
}

function all<T extends HTMLElement = HTMLElement>(selector: string): T[] {
  return [...el.querySelectorAll<T>(selector)];
}

function seen(element: HTMLElement): boolean {
  return element.closest('[hidden]') === null;
}

/** The button of that label that is seen. */
function button(label: string): HTMLButtonElement {
  const found = all<HTMLButtonElement>('button').find(
    one => one.textContent === label && seen(one)
  );
  if (!found) {
    throw new Error(`no button ${label}`);
  }
  return found;
}

function hasButton(label: string): boolean {
  return all('button').some(one => one.textContent === label && seen(one));
}

function lastDo(): { id: number; action: ActionName; args: Record<string, unknown> } {
  return model.of('do').at(-1)!;
}

function type(input: HTMLInputElement | HTMLTextAreaElement, value: string): void {
  input.value = value;
  input.dispatchEvent(new Event('input', { bubbles: true }));
}

function show(state: Partial<State> = {}): number {
  const world = reinforced(20, 40);
  const serial = tell(model, { ...world, state: { ...world.state, ...state } });
  frame();
  return serial;
}

function change(state: Partial<State>, base: number): number {
  const serial = tell(model, { state }, { base });
  frame();
  return serial;
}

beforeEach(() => {
  vi.useFakeTimers({
    toFake: [
      ...(['setTimeout', 'clearTimeout', 'setInterval', 'clearInterval', 'Date'] as const),
      ...(['requestAnimationFrame', 'cancelAnimationFrame'] as const)
    ]
  });
  model = new FakeModel();
  el = document.createElement('div');
  document.body.append(el);
  close = panel.render({ model, el });
});

afterEach(() => {
  close();
  el.remove();
  vi.useRealTimers();
});

describe('the conversation', () => {
  it('says hello, and draws all of the answer', () => {
    expect(model.of('hello')).toHaveLength(1);
    show();
    expect(text('.nbtrain-title')).toBe('run first (1a2b3c4d5e6f)');
    expect(text('.nbtrain-steps')).toBe('step 20 of 40');
    expect(find('[data-chart=curve]').dataset.points).toBe('20');
    expect(all('[data-chart]').map(host => host.dataset.chart)).toEqual([
      'curve',
      'outcomes',
      'rate'
    ]);
  });

  it('appends what builds on what it has, and replaces a row that comes again', () => {
    const serial = show();
    tell(model, { tables: [reinforcedSteps(5, 18, 40)] }, { base: serial });
    frame();
    expect(find('[data-chart=curve]').dataset.points).toBe('22');
    expect(model.of('hello')).toHaveLength(1);
  });

  it.each([
    ['a gap', { base: 999_999 }],
    ['another feed', { feed: 'other', base: -1 }]
  ])('ignores an update after %s and says hello again', (_, given) => {
    const serial = show();
    seconds(2);
    const base = given.base === -1 ? serial : given.base;
    tell(model, { tables: [reinforcedSteps(5, 21, 40)] }, { ...given, base });
    frame();
    expect(find('[data-chart=curve]').dataset.points).toBe('20');
    expect(model.of('hello')).toHaveLength(2);
  });

  it('says hello at most once a second, and does not forget to', () => {
    for (let n = 0; n < 20; n++) {
      tell(model, {}, { base: 999_999 });
    }
    expect(model.of('hello')).toHaveLength(1);
    seconds(1);
    expect(model.of('hello')).toHaveLength(2);
    seconds(5);
    expect(model.of('hello')).toHaveLength(2);
  });

  it('forgets the rows before a whole update', () => {
    show();
    tell(model, { tables: [reinforcedSteps(3, 100, 200)] }, { feed: 'other' });
    frame();
    expect(find('[data-chart=curve]').dataset.points).toBe('3');
  });

  it('shows no empty chart', () => {
    const { state } = reinforced(20, 40);
    const serial = tell(model, { state });
    frame();
    const kinds = (): unknown[] =>
      all('[data-chart]')
        .filter(seen)
        .map(one => one.dataset.chart);
    expect(kinds()).toEqual(['rate']);
    expect(seen(find('.nbtrain-figures > .nbtrain-muted'))).toBe(true);
    tell(model, { tables: [reinforcedSteps(1)] }, { base: serial });
    frame();
    expect(kinds()).toEqual(['curve', 'outcomes', 'rate']);
    expect(seen(find('.nbtrain-figures > .nbtrain-muted'))).toBe(false);
  });

  it('turns to a run of the other kind', () => {
    show();
    tell(model, supervised(), { feed: 'other' });
    frame();
    expect(all('[data-chart]').map(host => host.dataset.chart)).toEqual(['curve', 'rate']);
    expect(find('[data-chart=curve]').dataset.points).toBe('400');
  });

  it('draws once for all that came before a frame', () => {
    const serial = show();
    const drawn = vi.spyOn(window, 'requestAnimationFrame');
    const next = tell(model, { state: { log: 'one' } }, { base: serial });
    tell(model, { state: { log: 'two' } }, { base: next });
    expect(drawn).toHaveBeenCalledTimes(1);
    frame();
    expect(text('.nbtrain-log')).toBe('two');
  });

  it('reads columns that do not begin on a multiple of eight bytes', () => {
    show();
    const bytes = new ArrayBuffer(8 * 3 + 4);
    const columns = [7, 7, 0.5].map((value, n) => {
      const view = new DataView(bytes, 4 + 8 * n, 8);
      view.setFloat64(0, value, true);
      return view;
    });
    model.hear(
      {
        kind: 'update',
        feed: 'odd',
        serial: 1,
        base: 0,
        tables: [{ name: 'steps', columns: ['id', 'step', 'avg_reward'], rows: 1 }],
        state: {}
      },
      columns
    );
    frame();
    expect(find('[data-chart=curve]').dataset.points).toBe('1');
  });

  it.each(['closing', 'aborting'])('leaves nothing behind on %s', how => {
    close();
    const abort = new AbortController();
    const closeOne = panel.render({ model, el, signal: abort.signal });
    show();
    if (how === 'closing') {
      closeOne();
    } else {
      abort.abort();
    }
    expect(model.listening).toBe(0);
    expect(el.children).toHaveLength(0);
    expect(vi.getTimerCount()).toBe(0);
  });
});

describe('text', () => {
  it('is text, whoever wrote it', () => {
    const nasty = '<img src=x onerror="window.hit = 1"><script>window.hit = 1</script>\u202e';
    const world = reinforced(20, 40);
    const [shown] = world.state.trajectories.best;
    show({
      head: { ...world.state.head, title: nasty, message: nasty, notes: [nasty] },
      log: nasty,
      diagnosis: [{ severity: 'problem', sentence: nasty, suggestion: nasty }],
      checkpoints: [checkpoint(10, { holds: nasty, tie: nasty })],
      trajectories: {
        step: 20,
        best: [
          {
            ...shown!,
            prompt: nasty,
            completion: nasty,
            verdict: nasty,
            terms: [{ name: nasty, score: 1 }]
          }
        ],
        worst: []
      }
    });
    expect(el.querySelector('img, script')).toBeNull();
    expect('hit' in window).toBe(false);
    expect(text('.nbtrain-title')).toBe(nasty);
    expect(text('.nbtrain-card .nbtrain-text')).toBe(nasty);
    expect(text('.nbtrain-log')).toBe(nasty);
  });

  it('says what is not finite, and goes on', () => {
    tell(model, supervised());
    frame();
    const curve = find('[data-chart=curve]');
    expect(text('.nbtrain-figures')).toContain(
      'loss was not finite (NaN or inf) at steps 102, 103 and 104'
    );
    expect(Number(curve.dataset.points)).toBe(400);
  });

  it('shows scores that are not finite as such', () => {
    show({ checkpoints: [checkpoint(10, { score: NaN }), checkpoint(20, { score: Infinity })] });
    expect(all('td.nbtrain-score > span:first-child').map(cell => cell.textContent)).toEqual([
      'NaN',
      'inf'
    ]);
  });
});

describe('how far a run is', () => {
  it('says sentence by sentence what moved, and what it took once it is over', () => {
    const { progress, head } = reinforced(20, 40).state;
    const movement = ['start checks: 8 of 8 passed', 'reward 0.365 → 0.946'];
    const serial = show({ progress: { ...progress, elapsed_seconds: 97, movement } });
    const lines = all('.nbtrain-movement > div').map(line => line.textContent);
    expect(lines).toEqual(movement);
    expect(text('.nbtrain-progress')).toMatch(/1 min 37 s so far/);
    change({ head: { ...head, status: 'succeeded', over: true } }, serial);
    expect(text('.nbtrain-progress')).toMatch(/took 1 min 37 s$/);
  });
});

describe('checkpoints', () => {
  const many = Array.from({ length: 12 }, (_, n) => checkpoint(n + 1, { rank: n + 1 }));

  it('shows score, interval, tie and whether the round was complete', () => {
    show({
      checkpoints: [
        checkpoint(40, {
          rank: 1,
          score: 0.831,
          low: 0.78,
          high: 0.881,
          complete: true,
          tie: 'highest'
        }),
        checkpoint(20, {
          rank: 2,
          score: 0.82,
          complete: true,
          best: true,
          tie: 'ties with step 40'
        }),
        checkpoint(60, { score: 0.5, complete: false })
      ]
    });
    const words = (cell: HTMLElement): string => {
      const parts = [...cell.querySelectorAll('span')].filter(seen);
      return parts.map(part => part.textContent).join(' ') || cell.textContent;
    };
    const rows = all('tbody tr').map(row => [...row.querySelectorAll('td')].map(words));
    expect(rows[0]!.slice(1, 5)).toEqual(['1', '40', '0.83 [0.78, 0.88] highest', 'complete']);
    expect(rows[1]!.slice(1, 4)).toEqual(['2', '20', '0.82 ★ best (ties with step 40)']);
    expect(rows[2]!.slice(1, 5)).toEqual(['–', '60', '0.50', 'not complete']);
    expect(el.textContent).toContain('whose difference to the highest may be nothing');
  });

  it('shows eight, and all on demand', () => {
    const serial = show({ checkpoints: many });
    expect(all('tbody tr')).toHaveLength(8);
    button('show all 12').click();
    expect(all('tbody tr')).toHaveLength(12);
    change({ checkpoints: [...many, checkpoint(13)] }, serial);
    expect(all('tbody tr')).toHaveLength(13);
  });

  it('keeps its keys from the notebook, which in command mode asks the focused element', () => {
    show();
    for (const element of [find('input[type=radio]'), find('[data-chart=curve] [tabindex]')]) {
      element.focus();
      expect(element.getAttribute('data-lm-suppress-shortcuts')).toBe('true');
    }
  });

  it('tells Python which one is picked, by the row or its radio', () => {
    show({ checkpoints: many });
    find('tbody tr:nth-child(2)').click();
    expect(model.get('selected_id')).toBe('ckpt2');
    expect(model.saved).toBe(1);
    find<HTMLInputElement>('tbody tr:nth-child(3) input').click();
    expect(model.get('selected_id')).toBe('ckpt3');
    expect(model.saved).toBe(2);
    expect(all('tr[aria-selected=true]')).toHaveLength(1);
    expect(text('.nbtrain-picked h4')).toBe('Checkpoint of step 3');
  });

  it('follows Python, also to a row that is not among the first', () => {
    show({ checkpoints: many });
    model.fromPython('selected_id', 'ckpt11');
    expect(find<HTMLInputElement>('tr[aria-selected=true] input').value).toBe('ckpt11');
    expect(model.saved).toBe(0);
    model.fromPython('selected_id', null);
    expect(all('tr[aria-selected=true]')).toHaveLength(0);
    expect(seen(find('.nbtrain-picked'))).toBe(false);
  });

  it('keeps pick and focus when rows are ranked anew', () => {
    const serial = show({ checkpoints: many });
    const radio = find<HTMLInputElement>('tbody tr:nth-child(2) input');
    radio.focus();
    radio.click();
    change({ checkpoints: [...many].reverse() }, serial);
    expect(document.activeElement).toBe(radio);
    expect(radio.checked).toBe(true);
  });

  it('says why nothing ranks them', () => {
    const { about } = reinforced(20, 40).state;
    show({ about: { ...about, unranked: 'No round of validation was complete.' } });
    expect(el.textContent).toContain('No round of validation was complete.');
  });
});

describe('actions', () => {
  beforeEach(() => {
    show({
      checkpoints: [
        checkpoint(40),
        checkpoint(20, { can_resume: false }),
        checkpoint(10, { can_resume: false, has_weights: false })
      ]
    });
    find('tbody tr').click();
  });

  it('generates, says how far it is, and shows the replies as text', () => {
    const prompt = find<HTMLTextAreaElement>('textarea');
    type(prompt, 'Hello?');
    type(find('.nbtrain-pane input[type=number]'), '2');
    button('Generate').click();
    const { id, action, args } = lastDo();
    expect(action).toBe('generate');
    expect(args).toEqual({ checkpoint: 'ckpt40', prompts: ['Hello?'], n: 2 });
    const busy = button('Generate');
    expect(busy.getAttribute('aria-busy')).toBe('true');
    busy.click();
    expect(model.of('do')).toHaveLength(1);
    model.hear({ kind: 'doing', id, said: 'loading the model …' });
    expect(text('.nbtrain-pane .nbtrain-said')).toBe('loading the model …');
    const samples = ['<b>hi</b>', ''].map(completion => ({
      prompt: 'Hello?',
      completion,
      ended: 'stop'
    }));
    model.hear({ kind: 'done', id, ok: true, said: '2 replies', result: { samples } });
    expect(busy.getAttribute('aria-busy')).toBeNull();
    expect(all('.nbtrain-reply pre').map(one => one.textContent)).toEqual([
      '<b>hi</b>',
      '(nothing)'
    ]);
    expect(prompt.value).toBe('Hello?');
  });

  it.each([
    ['', '1', 'Write a prompt first.'],
    ['Hello?', '9', 'The number of replies is a whole number, from 1 to 8.'],
    ['Hello?', '1.5', 'The number of replies is a whole number, from 1 to 8.']
  ])('refuses prompt “%s” with %s replies beside the button', (prompt, n, said) => {
    type(find<HTMLTextAreaElement>('textarea'), prompt);
    type(find('.nbtrain-pane input[type=number]'), n);
    button('Generate').click();
    expect(model.of('do')).toHaveLength(0);
    expect(text('.nbtrain-pane .nbtrain-said')).toContain(said);
  });

  it('resumes, and follows what it started', () => {
    button('Resume').click(); // the tab
    const pane = find('.nbtrain-pane:not([hidden])');
    type(pane.querySelector<HTMLInputElement>('input[type=number]')!, '50');
    type(pane.querySelector<HTMLInputElement>('input[type=text]')!, ' second ');
    pane.querySelector<HTMLButtonElement>('.nbtrain-button')!.click();
    const { id, action, args } = lastDo();
    expect(action).toBe('resume');
    expect(args).toEqual({
      checkpoint: 'ckpt40',
      steps: 50,
      name: 'second',
      weights_only: false
    });
    const result = { run_id: 'abc', title: 'run second (abc)' };
    model.hear({ kind: 'done', id, ok: true, said: 'started run second', result });
    expect(pane.textContent).toContain('started run second');
    button('Follow it here').click();
    expect(lastDo()).toMatchObject({ action: 'follow', args: { run_id: 'abc' } });
  });

  it('resumes with weights only where there is no training state', () => {
    find('tbody tr:nth-child(2)').click();
    button('Resume').click();
    const pane = find('.nbtrain-pane:not([hidden])');
    expect(pane.textContent).toContain('It holds no training state');
    const go = pane.querySelector<HTMLButtonElement>('.nbtrain-button')!;
    go.click();
    expect(model.of('do')).toHaveLength(0);
    pane.querySelector<HTMLInputElement>('input[type=checkbox]')!.click();
    go.click();
    expect(lastDo().args).toMatchObject({ checkpoint: 'ckpt20', weights_only: true });
  });

  it('offers nothing on a checkpoint that holds nothing, and says so', () => {
    find('tbody tr:nth-child(3)').click();
    expect(text('.nbtrain-pane:not([hidden])')).toContain('It holds no weights any more.');
    expect(hasButton('Generate')).toBe(false);
  });

  it('exports, and shows an error beside the button', () => {
    button('Export').click();
    const pane = find('.nbtrain-pane:not([hidden])');
    type(pane.querySelector('input')!, 'here');
    pane.querySelector<HTMLButtonElement>('.nbtrain-button')!.click();
    expect(lastDo()).toMatchObject({ args: { checkpoint: 'ckpt40', folder: 'here' } });
    model.hear({ kind: 'done', id: lastDo().id, ok: false, said: 'here is a file' });
    const said = pane.querySelector<HTMLElement>('.nbtrain-said')!;
    expect(said.textContent).toBe('✕ here is a file');
    expect(said.dataset.severity).toBe('problem');
  });

  it('offers as many further steps as the run had, until somebody chooses', () => {
    button('Resume').click();
    const steps = find<HTMLInputElement>('.nbtrain-pane:not([hidden]) input[type=number]');
    expect(steps.value).toBe('40');
    type(steps, '7');
    show({ checkpoints: [checkpoint(40)] });
    expect(steps.value).toBe('7');
  });

  it('asks before it cancels', () => {
    button('Cancel run').focus();
    button('Cancel run').click();
    expect(document.activeElement?.textContent).toBe('Keep running');
    button('Keep running').click();
    expect(document.activeElement?.textContent).toBe('Cancel run');
    expect(model.of('do')).toHaveLength(0);
    button('Cancel run').click();
    button('Yes, cancel').click();
    expect(lastDo().action).toBe('cancel');
    model.hear({ kind: 'done', id: lastDo().id, ok: true, said: 'asked to stop' });
    expect(hasButton('Yes, cancel')).toBe(false);
    expect(find('.nbtrain-head').textContent).toContain('asked to stop');
  });

  it('turns the tabs by keys', () => {
    const tab = find('[role=tab]');
    tab.focus();
    tab.dispatchEvent(new KeyboardEvent('keydown', { key: 'ArrowLeft', bubbles: true }));
    expect(document.activeElement?.textContent).toBe('Export');
    expect(all('[role=tab][aria-selected=true]').map(one => one.textContent)).toEqual(['Export']);
  });

  it('leaves out what the kernel does not offer', () => {
    const { actions } = reinforced(20, 40).state;
    show({
      checkpoints: [checkpoint(40)],
      actions: { ...actions, cancel: false, resume: false, export: false }
    });
    expect(hasButton('Cancel run')).toBe(false);
    expect(
      all('[role=tab]')
        .filter(seen)
        .map(one => one.textContent)
    ).toEqual(['Try']);
  });

  it('forgets replies when it turns to another run, and not what was typed', () => {
    type(find<HTMLTextAreaElement>('textarea'), 'Hello?');
    button('Generate').click();
    const { head } = reinforced(20, 40).state;
    const before = lastDo().id;
    show({ head: { ...head, run_id: 'another' }, checkpoints: [checkpoint(40)] });
    expect(button('Generate').getAttribute('aria-busy')).toBeNull();
    const samples = [{ prompt: 'Hello?', completion: 'late', ended: 'stop' }];
    model.hear({ kind: 'done', id: before, ok: true, said: '', result: { samples } });
    expect(el.textContent).not.toContain('late');
    expect(find<HTMLTextAreaElement>('textarea').value).toBe('Hello?');
  });
});

describe('the kernel', () => {
  it('is gone after ten silent seconds, and back with the first word', () => {
    const serial = show();
    find('tbody tr').click();
    type(find<HTMLTextAreaElement>('textarea'), 'Hello?');
    button('Generate').click();
    seconds(9);
    expect(find('.nbtrain-panel').classList).not.toContain('nbtrain-gone');
    seconds(2);
    expect(find('.nbtrain-panel').classList).toContain('nbtrain-gone');
    expect(text('[role=alert]')).toBe(
      'The kernel is gone or does not answer. In a new cell, import nbtrain; ' +
        "nbtrain.attach('first').panel() brings the panel back."
    );
    expect(button('Generate').matches(':disabled')).toBe(true);
    expect(button('Generate').getAttribute('aria-busy')).toBeNull();
    expect(text('.nbtrain-pane .nbtrain-said')).toContain('what became of this is not known');
    find('tbody tr:nth-child(2)').click();
    expect(model.saved).toBe(1);
    const hellos = model.of('hello').length;
    change({ log: 'back' }, serial);
    expect(find('.nbtrain-panel').classList).not.toContain('nbtrain-gone');
    expect(seen(find('[role=alert]'))).toBe(false);
    expect(button('Generate').matches(':disabled')).toBe(false);
    expect(model.of('hello')).toHaveLength(hellos + 1);
  });

  it('lives as long as it ticks', () => {
    show();
    for (let n = 0; n < 10; n++) {
      seconds(3);
      model.hear({ kind: 'tick' });
    }
    expect(find('.nbtrain-panel').classList).not.toContain('nbtrain-gone');
  });

  it('is not gone because the page slept', () => {
    show();
    vi.setSystemTime(Date.now() + 3_600_000);
    seconds(3);
    expect(find('.nbtrain-panel').classList).not.toContain('nbtrain-gone');
  });

  it('may be gone before it said anything', () => {
    model.set('run_name', "it's");
    seconds(11);
    expect(text('[role=alert]')).toContain('nbtrain.attach("it\'s").panel()');
  });
});

describe('an update', () => {
  it('takes neither focus nor words nor what is unfolded', () => {
    const serial = show();
    find('tbody tr').click();
    const prompt = find<HTMLTextAreaElement>('textarea');
    type(prompt, 'Hello?');
    prompt.focus();
    prompt.setSelectionRange(1, 3);
    const details = all<HTMLDetailsElement>('details.nbtrain-section');
    details.forEach(one => {
      one.open = !one.open;
    });
    const open = details.map(one => one.open);
    const pre = find('.nbtrain-card .nbtrain-text').firstChild;
    const next = reinforced(25, 40);
    tell(model, next, { feed: 'next' });
    frame();
    expect(document.activeElement).toBe(prompt);
    expect([prompt.value, prompt.selectionStart, prompt.selectionEnd]).toEqual(['Hello?', 1, 3]);
    expect(all<HTMLDetailsElement>('details.nbtrain-section').map(one => one.open)).toEqual(open);
    expect(find('.nbtrain-card .nbtrain-text').firstChild).toBe(pre);
    change({ log: 'more' }, serial);
    expect(document.activeElement).toBe(prompt);
  });

  it('is said aloud when the status changes, and not more often than every five seconds', () => {
    const { head } = reinforced(20, 40).state;
    let serial = show();
    const aloud = find('.nbtrain-head [role=status].nbtrain-aloud');
    expect(aloud.textContent).toContain('running');
    serial = change({ head: { ...head, headline: 'validating' } }, serial);
    change({ head: { ...head, status: 'succeeded', headline: 'done' } }, serial);
    expect(aloud.textContent).toContain('running');
    seconds(5);
    expect(aloud.textContent).toContain('succeeded');
  });
});
