import { expect, it, vi } from 'vitest';

import { Rows } from '../rows';
import type { Source } from '../source';
import type { Theme } from '../theme';

function source(total: number): Source {
  const steps = new Rows();
  const rounds = new Rows();
  steps.upsert(
    ['id', 'step', 'avg_reward', 'used', 'learning_rate'],
    [
      [1, 2, 3],
      [1, 2, 3],
      [0.1, 0.2, 0.3],
      [2, 2, 2],
      [1e-5, 1e-5, 0]
    ]
  );
  rounds.upsert(
    ['id', 'step', 'value'],
    [
      [1, 2],
      [0, 3],
      [0.1, 0.4]
    ]
  );
  const schedule = { steps: [1, 2, total], rates: [1e-5, 1e-5, 0] };
  const beside = { checkpoints: [], picked: null, notFinite: [], schedule, total, completed: 3 };
  return { ...beside, supervised: false, steps, rounds };
}

it('lets all charts begin at the round before the first step; the plan may go on', async () => {
  vi.stubGlobal('matchMedia', () => ({ matches: false, addEventListener: () => undefined }));
  const { Curve } = await import('../curve');
  const { Outcomes } = await import('../outcomes');
  const { Rate } = await import('../rate');
  const theme = (): Theme => {
    throw new Error('nothing is drawn');
  };
  const ranges = (total: number) => {
    const given = source(total);
    const kinds = [new Curve(given, theme), new Outcomes(given), new Rate(given, theme)];
    return kinds.map(kind => kind.prepare(600).xRange);
  };
  expect(ranges(3)).toEqual([
    [-0.5, 3.5],
    [-0.5, 3.5],
    [-0.5, 3.5]
  ]);
  expect(ranges(10)[2]).toEqual([-0.5, 10.5]);
});
