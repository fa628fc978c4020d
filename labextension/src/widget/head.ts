import type { Progress, State } from '../protocol';
import { ActionButton } from './action';
import { button, h, mark, say, sayOrHide, show } from './dom';
import type { Link } from './link';
import { duration } from './words';

const ANNOUNCE = 5_000; // ms between two announcements to a screen reader

/** Title, status, progress and what can be done to the run as a whole. */
export class Head {
  readonly el = h('header', { class: 'nbtrain-head' });
  private readonly title = h('h3', { class: 'nbtrain-title' });
  private readonly pill = h('span', { class: 'nbtrain-pill nbtrain-headline' });
  private readonly subject = h('div', { class: 'nbtrain-muted' });
  private readonly bar = h('div', {
    class: 'nbtrain-bar',
    role: 'progressbar',
    'aria-label': 'steps'
  });
  private readonly filled = h('div', { class: 'nbtrain-filled' });
  private readonly steps = h('span', { class: 'nbtrain-steps' });
  private readonly times = h('span', { class: 'nbtrain-muted' });
  private readonly activity = h('div', { class: 'nbtrain-muted' });
  private readonly counts = h('div', { class: 'nbtrain-muted' });
  private readonly movement = h('div', { class: 'nbtrain-movement' });
  private readonly message = h('div', { class: 'nbtrain-message' });
  private readonly notes = h('div', { class: 'nbtrain-muted' });
  private readonly aloud = h('div', { class: 'nbtrain-aloud', role: 'status' });
  private readonly cancel: Cancel;
  private over = false;
  private progress: Progress | null = null;
  private announcedAt = -Infinity;
  private announceLater: ReturnType<typeof setTimeout> | undefined;

  constructor(link: Link) {
    this.cancel = new Cancel(link);
    this.bar.append(this.filled);
    this.el.append(
      h(
        'div',
        { class: 'nbtrain-line' },
        this.title,
        this.pill,
        h('span', { class: 'nbtrain-spring' }),
        this.cancel.el
      ),
      this.subject,
      this.activity,
      h('div', { class: 'nbtrain-line nbtrain-progress' }, this.bar, this.steps, this.times),
      this.message,
      this.movement,
      this.counts,
      this.notes,
      this.aloud
    );
  }

  close(): void {
    clearTimeout(this.announceLater);
  }

  update({ head, progress, actions }: Partial<State>): void {
    if (head) {
      this.over = head.over;
      say(this.title, head.title);
      // The headline names the status, as a rule
      const named = head.headline.includes(head.status);
      say(this.pill, named ? head.headline : `${head.status}, ${head.headline}`);
      mark(this.pill, 'data-status', head.doubtful ? 'doubtful' : head.status);
      sayOrHide(this.subject, head.subject);
      sayOrHide(this.activity, head.activity);
      sayOrHide(this.message, head.message);
      mark(this.message, 'data-severity', head.status === 'failed' ? 'problem' : 'hint');
      sayOrHide(this.notes, head.notes.join('\n'));
      this.announce(`${head.title}: ${this.pill.textContent}`);
    }
    if (progress) {
      const planned = progress.total - progress.start;
      const did = progress.completed - progress.start;
      const share = planned > 0 ? Math.min(1, Math.max(0, did / planned)) : 0;
      this.filled.style.width = `${(share * 100).toFixed(1)}%`;
      mark(this.bar, 'aria-valuemin', String(progress.start));
      mark(this.bar, 'aria-valuemax', String(progress.total));
      mark(this.bar, 'aria-valuenow', String(progress.completed));
      const from = progress.start ? ` (from step ${progress.start})` : '';
      say(this.steps, `step ${progress.completed} of ${progress.total}${from}`);
      this.progress = progress;
      this.moved(progress.movement);
      sayOrHide(this.counts, progress.counts);
    }
    if (this.progress) {
      this.timed(this.progress);
    }
    this.cancel.allow(actions?.cancel ?? false);
  }

  /** The end of a run may come without news of its progress. */
  private timed({ elapsed_seconds: elapsed, eta_seconds: eta }: Progress): void {
    const took = elapsed === null ? '' : duration(elapsed);
    const times = [
      took && (this.over ? `took ${took}` : `${took} so far`),
      eta === null || this.over ? '' : `about ${duration(eta)} left`
    ];
    say(this.times, times.filter(Boolean).join(' · '));
  }

  /** Every sentence on a line of its own, also where it is read or copied without styles. */
  private moved(sentences: string[]): void {
    const lines = [...this.movement.children];
    if (lines.map(line => line.textContent).join('\n') !== sentences.join('\n')) {
      this.movement.replaceChildren(...sentences.map(sentence => h('div', {}, sentence)));
    }
    show(this.movement, sentences.length > 0);
  }

  /** Says a change of status to a screen reader, the newest one only and not too often. */
  private announce(text: string): void {
    clearTimeout(this.announceLater);
    if (this.aloud.textContent === text) {
      return;
    }
    const wait = this.announcedAt + ANNOUNCE - Date.now();
    if (wait > 0) {
      this.announceLater = setTimeout(() => {
        this.announce(text);
      }, wait);
      return;
    }
    this.announcedAt = Date.now();
    say(this.aloud, text);
  }
}

/** Cancelling asks once more, in place. */
class Cancel {
  readonly el = h('span', { class: 'nbtrain-line' });
  private readonly action: ActionButton;
  private readonly ask = button('Cancel run', () => {
    this.asking(true);
  });
  private readonly not = button('Keep running', () => {
    this.asking(false);
  });
  private readonly question: HTMLElement;

  constructor(link: Link) {
    this.action = new ActionButton(link, {
      label: 'Yes, cancel',
      action: 'cancel',
      args: () => ({}),
      done: () => {
        this.asking(false);
      }
    });
    this.action.button.classList.add('nbtrain-danger');
    this.question = h(
      'span',
      { role: 'group', 'aria-label': 'Cancel this run?', hidden: true, class: 'nbtrain-line' },
      'Cancel this run?',
      this.action.button,
      this.not
    );
    this.el.append(this.ask, this.question, this.action.said);
    this.question.addEventListener('keydown', event => {
      if (event.key === 'Escape') {
        event.stopPropagation();
        this.asking(false);
      }
    });
  }

  allow(allowed: boolean): void {
    if (!allowed && !this.el.hidden) {
      show(this.question, false);
      show(this.ask, true);
      this.action.forget();
    }
    show(this.el, allowed);
  }

  private asking(asking: boolean): void {
    const focused = this.el.contains(document.activeElement);
    show(this.question, asking);
    show(this.ask, !asking);
    if (focused) {
      (asking ? this.not : this.ask).focus();
    }
  }
}
