/** What jsdom lacks of a browser, as far as a chart needs it. */
import { vi } from 'vitest';

/** A canvas that takes everything and keeps which texts and points were drawn. */
export function standInForCanvas(): { drawn: string[] } {
  const drawn: string[] = [];
  const context: unknown = new Proxy<Record<string, unknown>>(
    {},
    {
      get(kept, name: string) {
        if (name === 'measureText') {
          return () => ({ width: 10 });
        }
        return kept[name] ?? (() => void drawn.push(name));
      },
      set(kept, name: string, value: unknown) {
        kept[name] = value;
        return true;
      }
    }
  );
  HTMLCanvasElement.prototype.getContext = (() => context) as never;
  vi.stubGlobal(
    'Path2D',
    class {
      moveTo() {}
      lineTo() {}
      rect() {}
      arc() {}
      addPath() {}
      closePath() {}
    }
  );
  vi.stubGlobal(
    'ResizeObserver',
    class {
      observe() {}
      disconnect() {}
    }
  );
  vi.stubGlobal('matchMedia', () => ({ addEventListener() {}, removeEventListener() {} }));
  return { drawn };
}
