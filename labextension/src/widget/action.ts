import type { ActionName } from '../protocol';
import { h, mark, sayOrHide, show } from './dom';
import type { Link } from './link';

type Args = Record<string, unknown>;

/** What a button does: its arguments, or in words why it cannot; and what follows its end. */
export interface Does {
  label: string;
  action: ActionName;
  args(): Args | string;
  done?(result: unknown, args: Args): void;
}

/** A button that asks the kernel for something and says beside itself how that goes. */
export class ActionButton {
  readonly button: HTMLButtonElement;
  readonly said = h('span', { class: 'nbtrain-said', role: 'status', hidden: true });
  private readonly spinner = h('span', { class: 'nbtrain-spinner', hidden: true });
  private running = false;
  private run = 0;

  constructor(
    private readonly link: Link,
    private readonly does: Does
  ) {
    this.button = h(
      'button',
      { type: 'button', class: 'nbtrain-button', onclick: this.go },
      this.spinner,
      does.label
    );
  }

  /** Button and words in a line. */
  line(): HTMLElement {
    return h('div', { class: 'nbtrain-line' }, this.button, this.said);
  }

  /** Takes back what was said: it belongs to something that is not shown any more. */
  forget(): void {
    this.run++;
    this.busy(false);
    this.say(null, false);
  }

  readonly go = (): void => {
    if (this.running) {
      return;
    }
    const args = this.does.args();
    if (typeof args === 'string') {
      this.say(args, true);
      return;
    }
    const run = ++this.run;
    this.busy(true);
    this.say('asking the kernel …', false);
    this.link.do(this.does.action, args, {
      said: text => {
        if (run === this.run) {
          this.say(text, false);
        }
      },
      done: (ok, text, result) => {
        if (run !== this.run) {
          return;
        }
        this.busy(false);
        this.say(text, !ok);
        if (ok) {
          this.does.done?.(result, args);
        }
      }
    });
  };

  private say(text: string | null, failed: boolean): void {
    mark(this.said, 'data-severity', failed ? 'problem' : null);
    sayOrHide(this.said, text && failed ? `✕ ${text}` : text);
  }

  /** Not `disabled`, which would take the focus away. */
  private busy(busy: boolean): void {
    this.running = busy;
    show(this.spinner, busy);
    mark(this.button, 'aria-disabled', busy ? 'true' : null);
    mark(this.button, 'aria-busy', busy ? 'true' : null);
  }
}
