/** What charts need of a browser and jsdom does not have: a canvas that draws nothing, mainly. */
import { vi } from 'vitest';

const nothing = (): unknown =>
  new Proxy(() => undefined, {
    get: (_, name) => (name === 'measureText' ? () => ({ width: 10 }) : nothing()),
    set: () => true,
    apply: () => nothing()
  });

vi.stubGlobal(
  'ResizeObserver',
  class {
    observe(): void {
      // Nothing is laid out, so nothing changes its size
    }
    disconnect(): void {
      // See observe
    }
  }
);
vi.stubGlobal('Path2D', function () {
  return nothing();
});
vi.stubGlobal('matchMedia', () => ({
  matches: false,
  addEventListener: () => undefined,
  removeEventListener: () => undefined
}));
HTMLCanvasElement.prototype.getContext = nothing as never;
