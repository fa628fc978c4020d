import { expect, it } from 'vitest';

import { duration, figure, interval, listed, pythonText, score } from '../words';

it.each([
  [null, '–'],
  [NaN, 'NaN'],
  [Infinity, 'inf'],
  [-Infinity, '-inf'],
  [0, '0'],
  [12, '12'],
  [0.00001, '1e-5'],
  [0.0123, '0.0123'],
  [1.875, '1.875'],
  [123.456, '123.5'],
  [2_500_000, '2.5e+6']
])('writes %s as %s', (value, said) => {
  expect(figure(value)).toBe(said);
});

it.each([
  [0.831, '0.83'],
  [0, '0.00'],
  [0.00123, '0.0012'],
  [null, '–'],
  [-Infinity, '-inf']
])('writes the score %s as %s', (value, said) => {
  expect(score(value)).toBe(said);
});

it('writes an interval where there is one', () => {
  expect(interval(0.78, 0.881)).toBe('[0.78, 0.88]');
  expect(interval(null, 0.5)).toBe('');
});

it.each([
  [0.2, '0 s'],
  [42, '42 s'],
  [60, '1 min'],
  [185, '3 min 5 s'],
  [7810, '2 h 10 min'],
  [273_600, '3 d 4 h']
])('writes %s seconds as %s', (seconds, said) => {
  expect(duration(seconds)).toBe(said);
});

it('lists', () => {
  expect([listed([3]), listed([3, 4]), listed([1, 2, 3, 4], 2)]).toEqual([
    '3',
    '3 and 4',
    '1, 2 and 2 more'
  ]);
});

it('quotes for Python', () => {
  expect(pythonText('first')).toBe("'first'");
  expect(pythonText("it's")).toBe('"it\'s"');
});
