import type { FromKernel, State } from '../protocol';
import { Checkpoints } from './checkpoints';
import { Diagnosis } from './diagnosis';
import { h, say, sayOrHide, show } from './dom';
import { Feed } from './feed';
import type { Brought } from './feed';
import { Figures } from './figures';
import { Head } from './head';
import { Link } from './link';
import type { Model } from './link';
import { Log } from './log';
import { Picked } from './picked';
import { Trajectories } from './trajectories';
import { pythonText } from './words';

/** The trait that holds the id of the picked checkpoint, shared with Python. */
const SELECTED = 'selected_id';

/**
 * Keeps an element's keys from the notebook around it. In command mode Lab's shortcuts (Enter, the
 * arrow keys) are for whatever has the focus, so that it is the focused element which needs it.
 */
const OWN_KEYS = 'data-lm-suppress-shortcuts';

/** The whole panel in one element of a page. */
export class Panel {
  private readonly link: Link;
  private readonly feed = new Feed();
  private readonly root = h('div', { class: 'nbtrain-panel', [OWN_KEYS]: 'true' });
  private readonly alert = h('div', { class: 'nbtrain-alert', role: 'alert', hidden: true });
  private readonly waiting = h(
    'div',
    { class: 'nbtrain-muted' },
    'Asking the kernel for the run …'
  );
  // One attribute of it disables everything that asks something of the kernel
  private readonly controls = h('fieldset', { class: 'nbtrain-controls' });
  private readonly all = h('div', { class: 'nbtrain-all', hidden: true }, this.controls);
  private readonly head: Head;
  private readonly figures = new Figures(step => {
    this.pickStep(step);
  });
  private readonly checkpoints = new Checkpoints(id => {
    this.pick(id);
  });
  private readonly picked: Picked;
  private readonly sections = [new Trajectories(), new Diagnosis(), new Log()];
  private runId: string | null = null;
  /** What waits to be drawn: updates that came since the last frame. */
  private pending: Brought[] = [];
  private frame = 0;
  /** What had the focus when the kernel went silent. */
  private focused: Element | null = null;

  constructor(
    private readonly model: Model,
    el: HTMLElement
  ) {
    this.link = new Link(model, {
      message: (message, buffers) => {
        this.take(message, buffers);
      },
      gone: gone => {
        this.gone(gone);
      }
    });
    this.head = new Head(this.link);
    this.picked = new Picked(this.link);
    this.controls.append(this.head.el, this.figures.el, this.checkpoints.el, this.picked.el);
    this.all.append(...this.sections.map(section => section.el));
    this.root.append(this.alert, this.waiting, this.all);
    this.root.addEventListener('focusin', event => {
      (event.target as Element).setAttribute(OWN_KEYS, 'true');
    });
    el.append(this.root);
    model.on(`change:${SELECTED}`, this.selectedChanged);
    this.link.hello();
  }

  close(): void {
    this.link.close();
    this.model.off(`change:${SELECTED}`, this.selectedChanged);
    cancelAnimationFrame(this.frame);
    this.head.close();
    this.figures.close();
    this.root.remove();
  }

  private take(message: FromKernel, buffers: readonly DataView[]): void {
    if (message.kind !== 'update') {
      return;
    }
    const brought = this.feed.take(message, buffers);
    if (!brought) {
      this.link.hello();
      return;
    }
    this.pending = brought.everything ? [brought] : [...this.pending, brought];
    // No frame comes while the page is hidden: what was missed is drawn when it is seen again
    this.frame ||= requestAnimationFrame(() => {
      this.draw();
    });
  }

  private draw(): void {
    const { pending } = this;
    this.frame = 0;
    this.pending = [];
    show(this.waiting, false);
    show(this.all, true);
    const changed: Partial<State> = {};
    for (const brought of pending) {
      this.figures.update(brought);
      Object.assign(changed, brought.changed);
    }
    const runId = changed.head?.run_id ?? this.runId;
    if (runId !== this.runId) {
      this.runId = runId;
      this.picked.forget();
    }
    this.head.update({ ...changed, ...actionsOf(this.feed.state) });
    this.checkpoints.update(changed);
    if (changed.checkpoints || changed.actions) {
      this.showPicked();
    }
    this.figures.draw();
    this.sections.forEach(section => {
      section.update(changed);
    });
  }

  private selectedId(): string | null {
    const id = this.model.get(SELECTED);
    return typeof id === 'string' && id !== '' ? id : null;
  }

  private readonly selectedChanged = (): void => {
    this.showPicked();
  };

  private pick(id: string): void {
    this.model.set(SELECTED, id);
    this.model.save_changes();
    this.showPicked();
  }

  private pickStep(step: number): void {
    const at = this.feed.state.checkpoints?.find(checkpoint => checkpoint.step === step);
    if (at && !this.controls.disabled) {
      this.pick(at.id);
    }
  }

  private showPicked(): void {
    const id = this.selectedId();
    const row = this.feed.state.checkpoints?.find(checkpoint => checkpoint.id === id) ?? null;
    this.checkpoints.show(row?.id ?? null);
    this.figures.pick(row?.step ?? null);
    this.picked.update(row, this.feed.state);
  }

  private gone(gone: boolean): void {
    this.root.classList.toggle('nbtrain-gone', gone);
    if (gone) {
      this.focused = document.activeElement;
    }
    this.controls.disabled = gone;
    // What is disabled loses the focus
    if (!gone && document.activeElement === document.body) {
      if (this.focused instanceof HTMLElement && this.controls.contains(this.focused)) {
        this.focused.focus({ preventScroll: true });
      }
    }
    const { head } = this.feed.state;
    const known = this.model.get('run_name');
    const run = head?.name ?? head?.run_id ?? (typeof known === 'string' && known ? known : 'NAME');
    sayOrHide(
      this.alert,
      gone
        ? 'The kernel is gone or does not answer. In a new cell, import nbtrain; ' +
            `nbtrain.attach(${pythonText(run)}).panel() brings the panel back.`
        : null
    );
    say(this.waiting, gone ? '' : 'Asking the kernel for the run …');
  }
}

function actionsOf({ actions }: Partial<State>): Partial<State> {
  return actions ? { actions } : {};
}
