import { afterEach, beforeEach, expect, it, vi } from 'vitest';

import loader from '../index';

type Listener = (...args: unknown[]) => void;

/** A panel's model whose kernel answers when the test says so. */
class Kernel {
  sent: { kind: string; have: string | null }[] = [];
  listeners = new Set<[string, Listener]>();
  traits: Record<string, string> = { told: 'step 3 of 8 <b>', run_name: 'first' };

  get = (name: string) => this.traits[name];
  send = (content: unknown) => this.sent.push(content as never);
  on = (name: string, callback: Listener) => void this.listeners.add([name, callback]);
  off = (name: string, callback: Listener) => {
    for (const one of this.listeners) {
      if (one[0] === name && one[1] === callback) {
        this.listeners.delete(one);
      }
    }
  };
  fire(name: string, ...args: unknown[]) {
    [...this.listeners].filter(one => one[0] === name).forEach(one => one[1](...args));
  }
  answer(hash: string, script?: string) {
    const bytes = (text: string) => new DataView(new TextEncoder().encode(text).buffer);
    const buffers = script === undefined ? [] : [bytes(script), bytes('.of-the-panel {}')];
    this.fire('msg:custom', { kind: 'code', hash }, buffers);
  }
}

/** What the panel's program says is in the page's global; node imports only `data:` addresses. */
const PROGRAM = `export default { render({ model, el, signal }) {
  globalThis.drawn.push([model.get('run_name'), signal.aborted]);
  el.append('drawn');
  return () => globalThis.drawn.push('closed');
} }`;

const page = globalThis as unknown as { drawn: unknown[]; nbtrainPanels?: unknown };

const show = (kernel: Kernel, signal?: AbortSignal) => {
  const el = document.createElement('div');
  const close = loader.render({ model: kernel as never, el, ...(signal && { signal }) });
  return { el, close };
};
const settle = () => vi.advanceTimersByTimeAsync(50);

beforeEach(() => {
  vi.useFakeTimers();
  page.drawn = [];
  delete page.nbtrainPanels;
  vi.stubGlobal(
    'Blob',
    class {
      text: string;
      constructor([part]: [DataView]) {
        this.text = new TextDecoder().decode(part);
      }
    }
  );
  URL.createObjectURL = blob =>
    `data:text/javascript,${encodeURIComponent((blob as unknown as { text: string }).text)}`;
  URL.revokeObjectURL = () => undefined;
});

afterEach(() => {
  vi.useRealTimers();
  vi.unstubAllGlobals();
  document.head.replaceChildren();
});

it('shows what was told last, as text, until the program comes', async () => {
  const kernel = new Kernel();
  const { el } = show(kernel);
  expect(el.textContent).toBe('step 3 of 8 <b>');
  kernel.traits.told = 'step 4 of 8';
  kernel.fire('change:told');
  expect(el.textContent).toBe('step 4 of 8');
  await settle();
  expect(kernel.sent).toEqual([{ kind: 'code', have: null }]);
  kernel.fire('msg:custom', { kind: 'tick' }, []);
  kernel.answer('a1', PROGRAM);
  await vi.waitFor(() => expect(el.textContent).toBe('drawn'));
  expect(page.drawn).toEqual([['first', false]]);
  expect(document.getElementById('nbtrain-panel-a1')!.textContent).toBe('.of-the-panel {}');
});

it('says after ten seconds how to get the panel back, and still takes a late answer', async () => {
  const kernel = new Kernel();
  const { el } = show(kernel);
  await vi.advanceTimersByTimeAsync(9_900);
  expect(el.textContent).not.toContain('nbtrain.attach');
  await vi.advanceTimersByTimeAsync(200);
  expect(el.textContent).toContain('nbtrain.attach("first").panel() brings');
  kernel.answer('a1', PROGRAM);
  await vi.waitFor(() => expect(el.textContent).toBe('drawn'));
});

it('fetches the program once for panels that appear together', async () => {
  const [one, two] = [new Kernel(), new Kernel()];
  show(one);
  show(two);
  await settle();
  expect([one.sent.length, two.sent.length]).toEqual([1, 0]);
  one.answer('a1', PROGRAM);
  await vi.waitFor(() => expect(two.sent).toEqual([{ kind: 'code', have: 'a1' }]));
  two.answer('a1');
  await vi.waitFor(() => expect(page.drawn).toHaveLength(2));
  expect(document.head.querySelectorAll('style')).toHaveLength(1);
});

it('does not wait for a kernel that is gone to ask another one', async () => {
  const [gone, alive] = [new Kernel(), new Kernel()];
  show(gone);
  const { el } = show(alive);
  await vi.advanceTimersByTimeAsync(3_100);
  expect(alive.sent).toEqual([{ kind: 'code', have: null }]);
  alive.answer('a1', PROGRAM);
  await vi.waitFor(() => expect(el.textContent).toBe('drawn'));
});

it('takes another program from a kernel that has another', async () => {
  const [old, fresh] = [new Kernel(), new Kernel()];
  show(old);
  await settle();
  old.answer('a1', PROGRAM);
  await vi.waitFor(() => expect(page.drawn).toHaveLength(1));
  const { el } = show(fresh);
  await vi.waitFor(() => expect(fresh.sent).toEqual([{ kind: 'code', have: 'a1' }]));
  fresh.answer('b2', PROGRAM.replace("'drawn'", "'drawn anew'"));
  await vi.waitFor(() => expect(el.textContent).toBe('drawn anew'));
});

it('says why a program cannot be loaded, and the next panel asks for it again', async () => {
  const [one, two] = [new Kernel(), new Kernel()];
  const { el } = show(one);
  await settle();
  one.answer('bad', 'export default {');
  await vi.waitFor(() => expect(el.textContent).toContain('could not be loaded: SyntaxError'));
  show(two);
  await vi.waitFor(() => expect(two.sent).toEqual([{ kind: 'code', have: null }]));
});

it.each(['before', 'after'])('ends with its view, %s the program came', async when => {
  const kernel = new Kernel();
  const ending = new AbortController();
  const { el } = show(kernel, ending.signal);
  await settle();
  if (when === 'after') {
    kernel.answer('a1', PROGRAM);
    await vi.waitFor(() => expect(el.textContent).toBe('drawn'));
  }
  ending.abort();
  expect(kernel.listeners.size).toBe(0);
  kernel.answer('a1', PROGRAM);
  await settle();
  expect(page.drawn).toEqual(when === 'after' ? [['first', false], 'closed'] : []);
});
