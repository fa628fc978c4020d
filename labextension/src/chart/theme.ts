/** Colours on a canvas, which follows no style sheet: read from the page, again when it changes. */

/** Okabe and Ito's palette, which colour-blind people can tell apart. */
export type Ink = 'line' | 'second' | 'rounds' | 'good' | 'bad' | 'sky' | 'violet' | 'grey';

const LIGHT: Record<Ink, string> = {
  line: '#0072b2',
  second: '#b35c9a',
  rounds: '#c25400',
  good: '#009e73',
  bad: '#d0342c',
  sky: '#56b4e9',
  violet: '#cc79a7',
  grey: '#8a8f98'
};

const DARK: Record<Ink, string> = {
  line: '#56b4e9',
  second: '#e3a6c9',
  rounds: '#f0a030',
  good: '#2fc79b',
  bad: '#ff7a70',
  sky: '#2a86c4',
  violet: '#cc79a7',
  grey: '#9aa0aa'
};

export interface Theme {
  dark: boolean;
  ink: Record<Ink, string>;
  text: string;
  muted: string;
  grid: string;
}

/** The colours that an element's surroundings give. */
export function readTheme(element: HTMLElement): Theme {
  const style = getComputedStyle(element);
  const text = style.color || '#222';
  const dark = isLightColour(text);
  const own = (name: string, otherwise: string) => style.getPropertyValue(name).trim() || otherwise;
  return {
    dark,
    ink: dark ? DARK : LIGHT,
    text,
    muted: own('--nbtrain-chart-muted', text),
    grid: own('--nbtrain-chart-grid', dark ? '#4a4a4a' : '#dcdcdc')
  };
}

/** Whether text of this colour (`rgb(…)`, as computed styles have it) asks for a dark ground. */
export function isLightColour(colour: string): boolean {
  const parts = /^rgba?\(([\d.]+)[, ]+([\d.]+)[, ]+([\d.]+)/.exec(colour);
  if (!parts) {
    return false;
  }
  const [red, green, blue] = parts.slice(1).map(Number);
  return 0.299 * red! + 0.587 * green! + 0.114 * blue! > 140;
}

/** Calls back when the page changes its colours; returns how to stop. */
export function watchTheme(changed: () => void): () => void {
  let late: ReturnType<typeof setTimeout> | undefined;
  const tell = () => {
    changed();
    // JupyterLab's new style sheet may be in force only after its attribute is.
    clearTimeout(late);
    late = setTimeout(changed, 300);
  };
  const observer = new MutationObserver(tell);
  const attributes = ['class', 'data-jp-theme-light', 'data-jp-theme-name', 'data-theme'];
  for (const element of [document.body, document.documentElement]) {
    observer.observe(element, { attributes: true, attributeFilter: attributes });
  }
  const scheme = window.matchMedia('(prefers-color-scheme: dark)');
  scheme.addEventListener('change', tell);
  return () => {
    clearTimeout(late);
    observer.disconnect();
    scheme.removeEventListener('change', tell);
  };
}
