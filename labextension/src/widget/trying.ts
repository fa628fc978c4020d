import type { CheckpointRow, GenerateArgs, GenerateResult } from '../protocol';
import { ActionButton } from './action';
import type { Does } from './action';
import { h, show, sayOrHide } from './dom';
import { count, field, whole } from './fields';
import type { Link } from './link';
import type { Tab } from './tab';
import { counted } from './words';

const MOST_REPLIES = 8;

/** Replies of the picked checkpoint to a typed prompt. */
export function tryTab(link: Link, picked: () => CheckpointRow | null): Tab {
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
