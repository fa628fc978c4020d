import { describe, expect, it } from 'vitest';

import { lowerBound, Rows } from '../rows';

const NAMES = ['id', 'step', 'avg_reward'];

function filled(...rows: [number, number, number][]): Rows {
  const made = new Rows();
  made.upsert(
    NAMES,
    NAMES.map((_, n) => Float64Array.from(rows, row => row[n]!))
  );
  return made;
}

const shown = (rows: Rows, column = 'avg_reward') => {
  const sorted = rows.byStep();
  return [[...sorted.steps], [...sorted.column(column)]];
};

describe('rows', () => {
  it('keeps the newest figures of an id', () => {
    const rows = filled([1, 1, 0.1], [2, 2, 0.2]);
    rows.upsert(NAMES, [
      [2, 3],
      [2, 3],
      [0.25, 0.3]
    ]);
    expect(rows.size).toBe(3);
    expect(shown(rows)).toEqual([
      [1, 2, 3],
      [0.1, 0.25, 0.3]
    ]);
  });

  it('takes ids in any order', () => {
    const rows = filled([5, 5, 0.5], [1, 1, 0.1], [3, 3, 0.3]);
    expect(shown(rows)).toEqual([
      [1, 3, 5],
      [0.1, 0.3, 0.5]
    ]);
  });

  it('shows a step that came again once, by its newest row', () => {
    const rows = filled([1, 1, 0.1], [2, 2, 0.2], [3, 3, 0.3], [4, 2, 0.9], [5, 3, 0.8]);
    expect(rows.size).toBe(5);
    expect(shown(rows)).toEqual([
      [1, 2, 3],
      [0.1, 0.9, 0.8]
    ]);
  });

  it('has NaN where a column came later, came without a figure, or never came', () => {
    const rows = filled([1, 1, 0.1]);
    rows.upsert(['id', 'step', 'loss'], [[2], [2], [7]]);
    expect(shown(rows)[1]).toEqual([0.1, NaN]);
    expect(shown(rows, 'loss')[1]).toEqual([NaN, 7]);
    expect(shown(rows, 'unknown')[1]).toEqual([NaN, NaN]);
  });

  it('grows past its first room and keeps what it had', () => {
    const rows = new Rows();
    for (let id = 1; id <= 1000; id++) {
      rows.upsert(NAMES, [[id], [id], [id / 2]]);
    }
    expect(shown(rows)[1]!.slice(-2)).toEqual([499.5, 500]);
    expect(rows.byStep().column('avg_reward')[0]).toBe(0.5);
  });

  it('forgets', () => {
    const rows = filled([1, 1, 0.1]);
    rows.clear();
    expect(shown(rows)).toEqual([[], []]);
    rows.upsert(NAMES, [[7], [1], [0.4]]);
    expect(shown(rows)).toEqual([[1], [0.4]]);
  });

  it('refuses rows without ids', () => {
    expect(() => new Rows().upsert(['step'], [[1]])).toThrow('id in the first column');
  });
});

it.each([
  [0, 0],
  [1, 0],
  [2, 1],
  [5, 2],
  [6, 3]
])('finds where %d belongs', (wanted, place) => {
  expect(lowerBound([1, 3, 5], wanted)).toBe(place);
});
