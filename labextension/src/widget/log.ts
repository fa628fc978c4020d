import type { State } from '../protocol';
import { h, say } from './dom';

const NEAR = 24; // pixels from the end that still count as the end

/** The end of the run's log. It follows the log until somebody scrolls up. */
export class Log {
  private readonly text = h('pre', {
    class: 'nbtrain-log',
    tabindex: 0,
    role: 'region',
    'aria-label': 'end of the log'
  });
  readonly el = h(
    'details',
    {
      class: 'nbtrain-section',
      ontoggle: () => {
        this.toEnd();
      }
    },
    h('summary', {}, 'Log'),
    this.text
  );

  update({ log }: Partial<State>): void {
    if (log === undefined) {
      return;
    }
    const told = log === '' ? 'Nothing was logged.' : log;
    if (!this.el.open || this.text.textContent === told) {
      say(this.text, told); // no layout is asked for
      return;
    }
    const { scrollTop, clientHeight, scrollHeight } = this.text;
    const atEnd = scrollTop + clientHeight >= scrollHeight - NEAR;
    say(this.text, told);
    if (atEnd) {
      this.toEnd();
    }
  }

  private toEnd(): void {
    this.text.scrollTop = this.text.scrollHeight;
  }
}
