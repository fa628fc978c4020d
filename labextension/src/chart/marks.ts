/** Strokes, points and hatches on a canvas; a legend's swatch is drawn by the same hand. */
import type { Ink, Theme } from './theme';

export type Hatch = 'solid' | 'rising' | 'falling' | 'dots' | 'level' | 'hollow';

export type Swatch =
  | { kind: 'line'; ink: Ink; dash?: number[] }
  | { kind: 'point'; ink: Ink; hollow: boolean }
  | { kind: 'area'; ink: Ink; hatch: Hatch };

type Canvas = CanvasRenderingContext2D;

export function drawPoint(
  canvas: Canvas,
  x: number,
  y: number,
  radius: number,
  colour: string,
  hollow: boolean
): void {
  canvas.beginPath();
  canvas.arc(x, y, radius, 0, 2 * Math.PI);
  canvas.strokeStyle = colour;
  canvas.fillStyle = colour;
  if (!hollow) {
    canvas.fill();
  }
  canvas.stroke();
}

/** A bar from `low` to `high` with caps of `half` width. */
export function drawInterval(
  canvas: Canvas,
  x: number,
  low: number,
  high: number,
  half: number
): void {
  canvas.beginPath();
  canvas.moveTo(x, low);
  canvas.lineTo(x, high);
  for (const y of [low, high]) {
    canvas.moveTo(x - half, y);
    canvas.lineTo(x + half, y);
  }
  canvas.stroke();
}

/** A triangle that points down to `x`, its tip at `y`. */
export function drawFlag(canvas: Canvas, x: number, y: number, size: number, fill: boolean): void {
  canvas.beginPath();
  canvas.moveTo(x, y);
  canvas.lineTo(x - size * 0.6, y - size);
  canvas.lineTo(x + size * 0.6, y - size);
  canvas.closePath();
  if (fill) {
    canvas.fill();
  }
  canvas.stroke();
}

export function drawCross(canvas: Canvas, x: number, y: number, size: number): void {
  canvas.beginPath();
  canvas.moveTo(x - size, y - size);
  canvas.lineTo(x + size, y + size);
  canvas.moveTo(x - size, y + size);
  canvas.lineTo(x + size, y - size);
  canvas.stroke();
}

/** What to fill an area with: the colour alone, or a tile of it with lines or dots left out. */
export function fillOf(
  canvas: Canvas,
  colour: string,
  hatch: Hatch,
  ratio: number
): CanvasPattern | string {
  if (hatch === 'solid') {
    return colour;
  }
  const size = Math.round(6 * ratio);
  const tile = document.createElement('canvas');
  tile.width = tile.height = size;
  const on = tile.getContext('2d');
  if (!on) {
    return colour;
  }
  on.globalAlpha = 0.3;
  on.fillStyle = colour;
  on.fillRect(0, 0, size, size);
  on.globalAlpha = 1;
  on.strokeStyle = colour;
  on.lineWidth = 1.5 * ratio;
  on.beginPath();
  HATCHES[hatch](on, size);
  on.stroke();
  return canvas.createPattern(tile, 'repeat') ?? colour;
}

/** Lines reach over the tile's edges, so that tiles join. */
const HATCHES: Record<Exclude<Hatch, 'solid'>, (on: Canvas, size: number) => void> = {
  rising(on, size) {
    for (const shift of [-size, 0, size]) {
      on.moveTo(shift - 1, size + 1);
      on.lineTo(shift + size + 1, -1);
    }
  },
  falling(on, size) {
    for (const shift of [-size, 0, size]) {
      on.moveTo(shift - 1, -1);
      on.lineTo(shift + size + 1, size + 1);
    }
  },
  dots(on, size) {
    on.arc(size / 2, size / 2, size / 6, 0, 2 * Math.PI);
  },
  level(on, size) {
    on.moveTo(0, size / 2);
    on.lineTo(size, size / 2);
  },
  hollow() {
    // the faint ground alone
  }
};

const WIDTH = 18;
const HEIGHT = 10;

/** Draws a legend's swatch onto its canvas. */
export function drawSwatch(on: HTMLCanvasElement, swatch: Swatch, theme: Theme): void {
  const ratio = window.devicePixelRatio || 1;
  on.width = WIDTH * ratio;
  on.height = HEIGHT * ratio;
  on.style.width = `${WIDTH}px`;
  on.style.height = `${HEIGHT}px`;
  const canvas = on.getContext('2d');
  if (!canvas) {
    return;
  }
  const colour = theme.ink[swatch.ink];
  canvas.clearRect(0, 0, on.width, on.height);
  canvas.strokeStyle = colour;
  if (swatch.kind === 'area') {
    canvas.fillStyle = fillOf(canvas, colour, swatch.hatch, ratio);
    canvas.fillRect(0, 0, on.width, on.height);
    canvas.lineWidth = ratio;
    canvas.strokeRect(ratio / 2, ratio / 2, on.width - ratio, on.height - ratio);
    return;
  }
  canvas.lineWidth = 2 * ratio;
  if (swatch.kind === 'point') {
    drawPoint(canvas, on.width / 2, on.height / 2, 3 * ratio, colour, swatch.hollow);
    return;
  }
  canvas.setLineDash((swatch.dash ?? []).map(length => length * ratio));
  canvas.beginPath();
  canvas.moveTo(0, on.height / 2);
  canvas.lineTo(on.width, on.height / 2);
  canvas.stroke();
}
