/** One chart in a page: canvas, legend, readout, and the ways to reach it without a mouse. */
import uPlot from 'uplot';

import { drawCross, drawFlag, drawSwatch } from './marks';
import type { Kind, Legend, NotFinite, Prepared, Source } from './source';
import { nearest } from './series';
import { readTheme, type Theme } from './theme';
import { figure, named } from './words';

/** How near, in pixels, a click must be to a checkpoint. */
const REACH = 14;

/** Milliseconds between two fillings of the table that only screen readers see. */
const TABLE_EVERY = 1000;

export interface PlotOptions {
  source: Source;
  /** Charts of one key share their cursor. */
  syncKey: string;
  kind: (theme: () => Theme) => Kind;
  pick: (step: number) => void;
}

export class Plot {
  private readonly title = element('div', 'nbtrain-chart-title');
  private readonly legend = element('ul', 'nbtrain-chart-legend');
  private readonly stage = element('div', 'nbtrain-chart-stage');
  private readonly readout = element('p', 'nbtrain-chart-readout');
  private readonly table = element('table', 'nbtrain-chart-hidden');
  private readonly kind: Kind;
  private readonly plot: uPlot;
  private readonly resizing: ResizeObserver;
  private theme: Theme;
  private prepared: Prepared;
  private width: number;
  private tabling: ReturnType<typeof setTimeout> | undefined;
  private drawnLegend = '';
  /** The step that the keyboard's cursor holds on to. */
  private held: number | null = null;

  constructor(
    private readonly host: HTMLElement,
    private readonly options: PlotOptions
  ) {
    host.classList.add('nbtrain-chart');
    this.theme = readTheme(host);
    this.kind = options.kind(() => this.theme);
    this.title.textContent = this.kind.title;
    const head = element('div', 'nbtrain-chart-head');
    head.append(this.title, this.legend);
    this.stage.tabIndex = 0;
    this.stage.setAttribute('role', 'img');
    this.readout.setAttribute('aria-live', 'off');
    host.replaceChildren(head, this.stage, this.readout, this.table);
    this.width = this.measure();
    this.prepared = this.kind.prepare(this.width);
    this.plot = new uPlot(this.uplotOptions(), data(this.prepared), this.stage);
    this.listen();
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(this.stage);
    this.tell();
  }

  /** Rows or marks changed. */
  refresh(): void {
    this.prepared = this.kind.prepare(this.width);
    this.plot.batch(() => this.plot.setData(data(this.prepared)));
    if (this.held !== null) {
      this.moveTo(nearest(this.prepared.xs, this.held));
    }
    this.tell();
  }

  /** The page's colours changed. */
  recolour(): void {
    this.theme = readTheme(this.host);
    this.drawnLegend = '';
    this.drawLegend();
    this.plot.redraw(false, true);
  }

  destroy(): void {
    this.resizing.disconnect();
    clearTimeout(this.tabling);
    this.plot.destroy();
    this.host.replaceChildren();
  }

  /** Asked only where the size may have changed: the page lays itself out for the answer. */
  private measure(): number {
    return Math.max(160, this.stage.clientWidth || this.host.clientWidth || 600);
  }

  private uplotOptions(): uPlot.Options {
    const axis = (size: number): uPlot.Axis => ({
      size,
      font: FONT,
      stroke: () => this.theme.muted,
      grid: { stroke: () => this.theme.grid, width: 1 },
      ticks: { stroke: () => this.theme.grid, width: 1, size: 4 }
    });
    return {
      width: this.width,
      height: this.kind.height,
      padding: [this.kind.marked ? 12 : 6, 20, 0, 0],
      legend: { show: false },
      select: { show: false, left: 0, top: 0, width: 0, height: 0 },
      cursor: {
        y: false,
        drag: { x: false, y: false, setScale: false },
        sync: { key: this.options.syncKey, scales: ['x', null] },
        points: { size: 7 }
      },
      scales: {
        x: { time: false, range: () => this.prepared.xRange },
        y: { range: () => this.prepared.yRange }
      },
      axes: [
        { ...axis(26), incrs: STEPS, space: 60 },
        {
          ...axis(58),
          space: 28,
          ...(this.kind.whole && { incrs: STEPS }),
          values: (_, splits) => splits.map(value => figure(value))
        }
      ],
      series: [{}, ...this.kind.series],
      hooks: {
        draw: [plot => this.draw(plot)],
        setCursor: [() => this.say()]
      }
    };
  }

  private draw(plot: uPlot): void {
    const canvas = plot.ctx;
    const { left, top, width, height } = plot.bbox;
    canvas.save();
    if (this.prepared.points || this.prepared.xs.length) {
      // Marks at the very edge of the plot may stand out of it a little.
      canvas.beginPath();
      canvas.rect(left - 6, top - 12 * ratio(), width + 12, height + 12 * ratio() + 6);
      canvas.clip();
      this.kind.draw(plot, this.theme);
      this.drawMarks(plot);
    }
    canvas.restore();
  }

  private drawMarks(plot: uPlot): void {
    const canvas = plot.ctx;
    const theme = this.theme;
    const { top, height } = plot.bbox;
    const { checkpoints, picked } = this.options.source;
    const x = (step: number) => plot.valToPos(step, 'x', true);
    canvas.setLineDash([]);
    canvas.lineWidth = 1.2 * ratio();
    for (const { step, best } of this.kind.marked ? checkpoints : []) {
      canvas.strokeStyle = canvas.fillStyle = best ? theme.ink.good : theme.muted;
      drawFlag(canvas, x(step), top, (best ? 9 : 7) * ratio(), best);
    }
    if (picked !== null) {
      canvas.strokeStyle = canvas.fillStyle = theme.text;
      canvas.beginPath();
      canvas.moveTo(x(picked), top);
      canvas.lineTo(x(picked), top + height);
      canvas.stroke();
      if (this.kind.marked) {
        drawFlag(canvas, x(picked), top, 11 * ratio(), true);
      }
    }
    canvas.strokeStyle = theme.ink.bad;
    canvas.lineWidth = 2 * ratio();
    for (const { step } of this.broken) {
      drawCross(canvas, x(step), top + height, 4 * ratio());
    }
  }

  private listen(): void {
    const over = this.plot.over;
    over.addEventListener('click', event => {
      const near = this.checkpointNear(event.clientX - over.getBoundingClientRect().left);
      if (near !== null) {
        this.options.pick(near);
      }
    });
    over.addEventListener('mousemove', event => {
      this.held = null;
      const near = this.checkpointNear(event.clientX - over.getBoundingClientRect().left);
      over.style.cursor = near === null ? '' : 'pointer';
    });
    this.stage.addEventListener('keydown', event => this.onKey(event));
    // Every chart of a panel moves with the cursor; only the one in use is read out.
    this.stage.addEventListener('focus', () => this.readout.setAttribute('aria-live', 'polite'));
    this.stage.addEventListener('blur', () => {
      this.readout.setAttribute('aria-live', 'off');
      this.leave();
    });
  }

  private onKey(event: KeyboardEvent): void {
    const last = this.prepared.xs.length - 1;
    if (last < 0 || event.ctrlKey || event.altKey || event.metaKey) {
      return;
    }
    const at = this.plot.cursor.idx ?? this.prepared.rest;
    const far = Math.max(1, Math.round(last / 10));
    const to: Record<string, number> = {
      ArrowLeft: at - 1,
      ArrowRight: this.plot.cursor.idx == null ? at : at + 1,
      PageUp: at - far,
      PageDown: at + far,
      Home: 0,
      End: last
    };
    if (event.key in to) {
      this.moveTo(Math.min(last, Math.max(0, to[event.key]!)));
    } else if (event.key === 'Enter' || event.key === ' ') {
      this.pickNearest(this.prepared.xs[at]!);
    } else if (event.key === 'Escape') {
      this.leave();
    } else {
      return;
    }
    // Neither the page nor the notebook takes these keys from a chart in use.
    event.preventDefault();
    event.stopPropagation();
  }

  private moveTo(at: number): void {
    const step = this.prepared.xs[at];
    if (step === undefined) {
      return;
    }
    this.held = step;
    this.setCursor(this.plot.valToPos(step, 'x'), this.plot.over.clientHeight / 2);
  }

  private leave(): void {
    this.held = null;
    this.setCursor(-10, -10);
  }

  private setCursor(left: number, top: number): void {
    // The third argument, which hands the cursor to the other charts, is not in uPlot's types.
    type Set = (at: { left: number; top: number }, fire: boolean, publish: boolean) => void;
    (this.plot.setCursor as Set)({ left, top }, true, true);
  }

  private checkpointNear(left: number): number | null {
    if (!this.kind.marked) {
      return null;
    }
    const sorted = this.options.source.checkpoints.map(one => one.step).sort((a, b) => a - b);
    const step = sorted[nearest(sorted, this.plot.posToVal(left, 'x'))];
    const near = step !== undefined && Math.abs(this.plot.valToPos(step, 'x') - left) <= REACH;
    return near ? step : null;
  }

  private pickNearest(to: number): void {
    const sorted = this.options.source.checkpoints.map(one => one.step).sort((a, b) => a - b);
    const step = sorted[nearest(sorted, to)];
    if (step !== undefined) {
      this.options.pick(step);
    }
  }

  private resize(): void {
    const width = this.measure();
    if (this.stage.clientWidth > 0 && width !== this.width) {
      this.width = width;
      this.plot.setSize({ width, height: this.kind.height });
      this.refresh();
      // A chart that was made outside of the page had no colours to read.
      this.recolour();
    }
  }

  /** Everything about the chart that is text. */
  private tell(): void {
    this.host.dataset.points = String(this.prepared.points);
    this.host.dataset.lastStep = this.prepared.lastStep?.toString() ?? '';
    const broken = new Set(this.broken.map(one => one.step)).size;
    const also = broken
      ? ` NaN or infinite at ${broken === 1 ? '1 step' : `${broken} steps`}.`
      : '';
    this.stage.setAttribute('aria-label', this.kind.describe() + also);
    this.drawLegend();
    this.say();
    this.tabling ??= setTimeout(() => {
      this.tabling = undefined;
      this.fillTable();
    }, TABLE_EVERY);
  }

  /** The step under the cursor, or the newest one where there is no cursor. */
  private say(): void {
    const last = this.prepared.xs.length - 1;
    const at = Math.min(this.plot.cursor.idx ?? this.prepared.rest, last);
    const text = at < 0 ? '' : this.kind.readout(at) + this.brokenAt(this.prepared.xs[at]!);
    if (this.readout.textContent !== text) {
      this.readout.textContent = text;
    }
  }

  private get broken(): readonly NotFinite[] {
    return this.options.source.notFinite.filter(one => this.kind.tells(one.name));
  }

  private brokenAt(step: number): string {
    return this.broken
      .filter(one => one.step === step)
      .map(one => ` · ${named(one.name)} is NaN or infinite`)
      .join('');
  }

  private drawLegend(): void {
    const legend: Legend[] = this.prepared.xs.length ? this.kind.legend() : [];
    const key = JSON.stringify(legend);
    if (key === this.drawnLegend) {
      return;
    }
    this.drawnLegend = key;
    this.legend.replaceChildren(
      ...legend.map(({ label, swatch }) => {
        const item = element('li');
        const on = element('canvas');
        drawSwatch(on, swatch, this.theme);
        item.append(on, label);
        return item;
      })
    );
  }

  private fillTable(): void {
    const { head, rows } = this.kind.table();
    const row = (cells: string[], of: 'td' | 'th') => {
      const line = element('tr');
      for (const text of cells) {
        const cell = element(of);
        cell.textContent = text;
        line.append(cell);
      }
      return line;
    };
    const caption = element('caption');
    caption.textContent = this.kind.title;
    this.table.replaceChildren(caption, row(head, 'th'), ...rows.map(cells => row(cells, 'td')));
  }
}

const FONT = '11px system-ui, sans-serif';

/** Steps are whole numbers, and so are the marks on their axis. */
const STEPS = [1, 10, 100, 1e3, 1e4, 1e5, 1e6].flatMap(ten => [ten, 2 * ten, 5 * ten]);

function ratio(): number {
  return window.devicePixelRatio || 1;
}

function data(prepared: Prepared): uPlot.AlignedData {
  return [prepared.xs, ...prepared.ys];
}

function element<K extends keyof HTMLElementTagNameMap>(
  name: K,
  className = ''
): HTMLElementTagNameMap[K] {
  const made = document.createElement(name);
  made.className = className;
  return made;
}
