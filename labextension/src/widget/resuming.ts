import type { CheckpointRow, ResumeArgs, ResumeResult } from '../protocol';
import { ActionButton } from './action';
import { h, sayOrHide, show } from './dom';
import { count, field, whole } from './fields';
import type { Link } from './link';
import type { Tab } from './tab';

/** A run that goes on from the picked checkpoint, and following it in this panel. */
export function resumeTab(link: Link, picked: () => string): Tab {
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
  follow.append(following.line());
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
      runId = (result as ResumeResult).run_id;
      show(follow, mayFollow);
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
