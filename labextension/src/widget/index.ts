/**
 * The live panel of a run: the program that the loader in a notebook fetches from its kernel, in
 * the shape of an anywidget.
 */
import './panel.css';
import type { Model } from './link';
import { Panel } from './panel';

interface View {
  model: Model;
  el: HTMLElement;
  signal?: AbortSignal;
}

/** Shows the panel in `el` until `signal` aborts or the function that comes back is called. */
function render({ model, el, signal }: View): () => void {
  const panel = new Panel(model, el);
  let closed = false;
  const close = (): void => {
    if (!closed) {
      closed = true;
      panel.close();
    }
  };
  signal?.addEventListener('abort', close, { once: true });
  return close;
}

export default { render };
