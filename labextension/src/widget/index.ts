/** The panel's program: what the loader imports and hands model and element to. */
export default {
  render({ el }: { el: HTMLElement }): void {
    el.classList.add('nbtrain-panel');
  }
};
