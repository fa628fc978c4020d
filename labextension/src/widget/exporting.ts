import type { ExportArgs } from '../protocol';
import { ActionButton } from './action';
import { h, sayOrHide, show } from './dom';
import { field } from './fields';
import type { Link } from './link';
import type { Tab } from './tab';

/** The picked checkpoint's adapter, copied into a folder. */
export function exportTab(link: Link, picked: () => string): Tab {
  const folder = h('input', {
    type: 'text',
    placeholder: 'for example exported/adapter',
    spellcheck: 'false'
  });
  const lacking = h('div', { class: 'nbtrain-muted' });
  const button = new ActionButton(link, {
    label: 'Export',
    action: 'export',
    args: () =>
      folder.value.trim() === ''
        ? 'Name a folder first.'
        : ({ checkpoint: picked(), folder: folder.value.trim() } satisfies ExportArgs)
  });
  const controls = h(
    'div',
    {},
    field('Folder, on the machine of the kernel', folder, 'nbtrain-broad'),
    button.line()
  );
  return {
    action: 'export',
    label: 'Export',
    el: h('div', { class: 'nbtrain-pane' }, lacking, controls),
    update: row => {
      show(controls, row.has_weights);
      sayOrHide(lacking, row.has_weights ? null : 'It holds no weights any more.');
    },
    forget: () => {
      button.forget();
    }
  };
}
