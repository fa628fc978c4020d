import { describe, expect, it } from 'vitest';

import {
  airy,
  align,
  bin,
  extent,
  interpolate,
  nearest,
  smooth,
  present,
  smoothingWindow,
  thin,
  union
} from '../series';

it('leaves out what is no finite number, and interrupts the line where it is told to', () => {
  expect(present([1, NaN, Infinity, 2, -Infinity], [4])).toEqual([
    1,
    undefined,
    undefined,
    2,
    null
  ]);
});

it('smooths over the last figures and leaves gaps out of the mean', () => {
  expect(smooth([1, 2, null, 3, undefined, 6], 2)).toEqual([1, 1.5, null, 2.5, undefined, 4.5]);
});

it.each([
  [12, 0],
  [13, 5],
  [100, 5],
  [1000, 50]
])('smooths %d figures over %d', (count, window) => {
  expect(smoothingWindow(count)).toBe(window);
});

it('finds lowest and highest of what is finite', () => {
  expect(extent([3, null, undefined], new Float64Array([NaN, -1, Infinity]))).toEqual([-1, 3]);
  expect(extent([null], [])).toBeNull();
});

it('gives room around one value, and to nothing', () => {
  expect(airy([2, 2])).toEqual([1.8, 2.2]);
  expect(airy([0, 0])).toEqual([-0.5, 0.5]);
  expect(airy(null)).toEqual([0, 1]);
});

it.each([
  [-3, 0],
  [14, 0],
  [15, 0],
  [16, 1],
  [99, 2]
])('nearest to %d', (wanted, place) => {
  expect(nearest([10, 20, 30], wanted)).toBe(place);
});

it('is nearest to nothing in an empty list', () => {
  expect(nearest([], 3)).toBe(-1);
});

it('thins evenly and keeps both ends', () => {
  expect(thin(3, 20)).toEqual([0, 1, 2]);
  expect(thin(101, 5)).toEqual([0, 25, 50, 75, 100]);
});

it('unites and aligns', () => {
  const all = union([1, 2, 4], [0, 2, 5]);
  expect(all).toEqual([0, 1, 2, 4, 5]);
  expect(align(all, [1, 2, 4], [0.1, null, 0.4])).toEqual([undefined, 0.1, null, 0.4, undefined]);
});

it('interpolates a line and has nothing outside of it', () => {
  expect(interpolate([1, 11], [0, 100], 6)).toBe(50);
  expect(interpolate([1, 11], [0, 100], 11)).toBe(100);
  expect(interpolate([1, 11], [0, 100], 12)).toBeNull();
  expect(interpolate([], [], 1)).toBeNull();
});

describe('bins', () => {
  it('are steps while there is room', () => {
    const bins = bin([3, 4, 6], [[1, 2, NaN]], 10);
    expect(bins).toEqual({
      width: 1,
      first: [3, 4, 6],
      last: [3, 4, 6],
      steps: [1, 1, 1],
      sums: [[1, 2, 0]]
    });
  });

  it('hold round numbers of steps, and every group once', () => {
    const steps = Array.from({ length: 1000 }, (_, n) => n + 1);
    const part = steps.map(step => step % 3);
    const bins = bin(steps, [part], 60);
    expect(bins.width).toBe(20);
    expect(bins.first.slice(0, 2)).toEqual([1, 21]);
    expect(bins.last.at(-1)).toBe(1000);
    expect(bins.steps.every(count => count === 20)).toBe(true);
    const sum = (values: number[]) => values.reduce((total, value) => total + value, 0);
    expect(sum(bins.sums[0]!)).toBe(sum(part));
  });

  it('of nothing are none', () => {
    expect(bin([], [[]], 10).first).toEqual([]);
  });
});
