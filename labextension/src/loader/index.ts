/**
 * What a saved notebook keeps of a panel: the few lines that fetch its program from the kernel.
 *
 * The program comes over the panel's own channel, once for all panels of a page, and is kept by
 * its hash. Until it has come, and where there is no kernel any more, the last summary stands in
 * its place.
 */
import type { FromKernel } from '../protocol';

interface Model {
  get(name: string): unknown;
  send(content: unknown): void;
  on(name: string, callback: (...args: never[]) => void): void;
  off(name: string, callback: (...args: never[]) => void): void;
}

interface View {
  model: Model;
  el: HTMLElement;
  signal?: AbortSignal;
}

type End = () => void;

interface Program {
  render: (view: View) => End | undefined | Promise<End | undefined>;
}

/** What all panels of a page share: the programs by hash, and the asking that is under way. */
interface Shared {
  programs: Map<string, Promise<Program>>;
  newest: string | null;
  asking: Promise<unknown>;
}

const PATIENCE = 10_000; // ms until a silent kernel counts as gone
const TURN = 3_000; // ms that a panel waits for another one's answer before it asks for itself

function shared(): Shared {
  const page = globalThis as { nbtrainPanels?: Shared };
  return (page.nbtrainPanels ??= { programs: new Map(), newest: null, asking: Promise.resolve() });
}

async function load([script, style]: DataView[], hash: string): Promise<Program> {
  const url = URL.createObjectURL(new Blob([script as BlobPart], { type: 'text/javascript' }));
  try {
    const module = (await import(/* @vite-ignore */ url)) as { default: Program };
    const sheet = document.createElement('style');
    sheet.id = `nbtrain-panel-${hash}`;
    sheet.textContent = new TextDecoder().decode(style);
    document.head.append(sheet);
    return module.default;
  } finally {
    URL.revokeObjectURL(url);
  }
}

/** Asks the kernel which program is its own; it sends along what the page lacks. */
function ask(model: Model, ended: AbortSignal): Promise<Program> {
  const page = shared();
  return new Promise((resolve, reject) => {
    const answer = (message: FromKernel, buffers: DataView[]) => {
      if (message.kind !== 'code') {
        return;
      }
      const { hash } = message;
      let known = page.programs.get(hash);
      if (!known && buffers.length) {
        known = load(buffers, hash);
        page.programs.set(hash, known);
        page.newest = hash;
      }
      if (known) {
        model.off('msg:custom', answer);
        known.catch(() => {
          page.programs.delete(hash);
          page.newest = null;
        });
        resolve(known);
      }
    };
    model.on('msg:custom', answer);
    whenEnded(ended, () => {
      model.off('msg:custom', answer);
      reject(new Error('the panel was closed'));
    });
    model.send({ kind: 'code', have: page.newest });
  });
}

/** Panels that appear together ask one after the other, so that the program travels once. */
function program(model: Model, ended: AbortSignal): Promise<Program> {
  const page = shared();
  const patience = new Promise(done => setTimeout(done, TURN));
  const asked = Promise.race([page.asking, patience]).then(() => ask(model, ended));
  page.asking = asked.catch(() => undefined);
  return asked;
}

/** The last summary, and after a while how to get a panel back whose kernel is gone. */
function standIn({ model, el }: View): { say(text: string): void; remove(): void } {
  const box = document.createElement('div');
  const told = document.createElement('pre');
  const note = document.createElement('p');
  told.style.whiteSpace = 'pre-wrap';
  note.setAttribute('role', 'status');
  box.append(told, note);
  el.append(box);
  const show = () => {
    told.textContent = model.get('told') as string;
  };
  const late = setTimeout(() => {
    const name = model.get('run_name') as string;
    note.textContent =
      'The kernel behind this panel is gone or does not answer. In a new cell, import nbtrain; ' +
      `nbtrain.attach(${JSON.stringify(name)}).panel() brings the panel back.`;
  }, PATIENCE);
  show();
  model.on('change:told', show);
  return {
    say(text) {
      clearTimeout(late);
      note.textContent = text;
    },
    remove() {
      clearTimeout(late);
      model.off('change:told', show);
      box.remove();
    }
  };
}

function whenEnded(ended: AbortSignal, then: () => void): void {
  if (ended.aborted) {
    then();
  } else {
    ended.addEventListener('abort', then);
  }
}

function render(view: View): End {
  const closing = new AbortController();
  const ended = closing.signal;
  const close = () => closing.abort();
  view.signal?.addEventListener('abort', close);
  const instead = standIn(view);
  ended.addEventListener('abort', () => instead.remove());
  const draw = async ({ render }: Program) => {
    if (!ended.aborted) {
      instead.remove();
      const end = await render({ ...view, signal: ended });
      whenEnded(ended, () => end?.());
    }
  };
  program(view.model, ended)
    .then(draw)
    .catch((error: unknown) =>
      instead.say(`The panel's program could not be loaded: ${String(error)}`)
    );
  return close;
}

export default { render };
