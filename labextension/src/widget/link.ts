import type { ActionName, FromKernel, FromPage } from '../protocol';

/** What anywidget hands to a view, as far as the panel uses it. */
export interface Model {
  get(name: string): unknown;
  set(name: string, value: unknown): void;
  save_changes(): void;
  send(content: unknown): void;
  on(name: string, callback: (...args: never[]) => void): void;
  off(name: string, callback: (...args: never[]) => void): void;
}

/** How an action goes: what it says while it runs, and its end. */
export interface Doing {
  said(text: string): void;
  done(ok: boolean, said: string, result: unknown): void;
}

export interface Heard {
  message(message: FromKernel, buffers: readonly DataView[]): void;
  /** The kernel went silent, or is back. */
  gone(gone: boolean): void;
}

const SILENCE = 10_000; // ms until the kernel counts as gone: three ticks and a bit
const LOOK = 1_000; // ms between two looks at the clock
const HELLO = 1_000; // ms between two hellos at the least
const SLEPT = 5_000; // ms: a timer this late means that the page slept, not the kernel

const LOST = 'The kernel is gone or does not answer: what became of this is not known.';

/** One panel's side of the conversation with its kernel. */
export class Link {
  private heardAt = Date.now();
  private lookedAt = Date.now();
  private helloAt = -Infinity;
  private helloLater: ReturnType<typeof setTimeout> | undefined;
  private readonly looking: ReturnType<typeof setInterval>;
  private isGone = false;
  private readonly running = new Map<number, Doing>();
  // Several pages may show one model, and all of them hear every `done`
  private nextId = Math.floor(Math.random() * 2 ** 40) * 1024;

  constructor(
    private readonly model: Model,
    private readonly heard: Heard
  ) {
    model.on('msg:custom', this.take);
    this.looking = setInterval(this.look, LOOK);
  }

  close(): void {
    this.model.off('msg:custom', this.take);
    clearInterval(this.looking);
    clearTimeout(this.helloLater);
    this.running.clear();
  }

  /** Asks for everything; however often it is called, at most once a second. */
  hello(): void {
    if (this.helloLater !== undefined) {
      return;
    }
    const wait = this.helloAt + HELLO - Date.now();
    if (wait > 0) {
      this.helloLater = setTimeout(() => {
        this.helloLater = undefined;
        this.hello();
      }, wait);
      return;
    }
    this.helloAt = Date.now();
    this.send({ kind: 'hello' });
  }

  do(action: ActionName, args: Record<string, unknown>, doing: Doing): void {
    const id = this.nextId++;
    this.running.set(id, doing);
    this.send({ kind: 'do', id, action, args });
  }

  private send(message: FromPage): void {
    this.model.send(message);
  }

  private readonly take = (message: FromKernel, buffers: readonly DataView[]): void => {
    // The loader's own part of the conversation
    if (message.kind === 'code') {
      return;
    }
    this.heardAt = Date.now();
    if (this.isGone) {
      this.isGone = false;
      this.heard.gone(false);
      this.hello();
    }
    if (message.kind === 'doing') {
      this.running.get(message.id)?.said(message.said);
    } else if (message.kind === 'done') {
      const doing = this.running.get(message.id);
      this.running.delete(message.id);
      doing?.done(message.ok, message.said, message.ok ? message.result : undefined);
    } else {
      this.heard.message(message, buffers);
    }
  };

  private readonly look = (): void => {
    const now = Date.now();
    if (now - this.lookedAt > SLEPT) {
      this.heardAt = now;
    }
    this.lookedAt = now;
    if (this.isGone || now - this.heardAt < SILENCE) {
      return;
    }
    this.isGone = true;
    this.heard.gone(true);
    const lost = [...this.running.values()];
    this.running.clear();
    lost.forEach(doing => {
      doing.done(false, LOST, undefined);
    });
  };
}
