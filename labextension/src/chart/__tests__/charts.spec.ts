import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';

import { standInForCanvas } from './page';

let charts: import('../index').Charts;
const picked: number[] = [];
const hosts: Record<string, HTMLElement> = {};

const STEPS = ['id', 'step', 'avg_reward', 'used', 'no_signal', 'learning_rate'];

async function open(supervised: boolean, ...kinds: import('../index').ChartKind[]) {
  // uPlot looks for matchMedia as it is loaded
  const { Charts } = await import('../index');
  charts = new Charts({ supervised, onPick: step => picked.push(step) });
  for (const kind of kinds) {
    hosts[kind] = document.createElement('div');
    document.body.append(hosts[kind]);
    charts.mount(hosts[kind], kind);
  }
}

const readout = (kind: string) => hosts[kind]!.querySelector('.nbtrain-chart-readout')!.textContent;
const stage = (kind: string) => hosts[kind]!.querySelector<HTMLElement>('[role=img]')!;
const label = (kind: string) => stage(kind).getAttribute('aria-label');
const press = (kind: string, key: string) => {
  const event = new KeyboardEvent('keydown', { key, bubbles: true, cancelable: true });
  stage(kind).dispatchEvent(event);
  return event.defaultPrevented;
};

beforeEach(() => {
  vi.useFakeTimers();
  standInForCanvas();
  picked.length = 0;
});

afterEach(() => {
  charts.destroy();
  document.body.replaceChildren();
  vi.useRealTimers();
  vi.unstubAllGlobals();
});

describe('a run with rewards', () => {
  beforeEach(async () => {
    await open(false, 'curve', 'outcomes', 'rate');
    charts.update('steps', STEPS, [
      [1, 2, 3],
      [1, 2, 3],
      [0.25, NaN, 0.5],
      [3, 2, 4],
      [1, 2, 0],
      [1e-5, 2e-5, 1e-5]
    ]);
    charts.update(
      'rounds',
      ['id', 'step', 'value', 'low', 'high', 'complete'],
      [
        [1, 2],
        [0, 3],
        [0.3, 0.9],
        [0.2, 0.8],
        [0.4, 1],
        [1, 0]
      ]
    );
    charts.show({
      checkpoints: [
        { step: 1, best: false },
        { step: 3, best: true }
      ],
      notFinite: [{ step: 2, name: 'avg_reward' }],
      schedule: { steps: [1, 10], rates: [1e-5, 0] },
      total: 10,
      completed: 3
    });
    charts.flush();
  });

  it('says what it holds', () => {
    expect(hosts.curve!.dataset).toMatchObject({ chart: 'curve', points: '3', lastStep: '3' });
  });

  it('is read to who cannot see it; an incomplete round is never the best', () => {
    expect(label('curve')).toBe(
      'Reward by step: 0.25 at step 1, 0.5 at step 3; best held-out reward 0.3 (0.2 to 0.4) at step 0.' +
        ' NaN or infinite at 1 step.'
    );
    expect(label('outcomes')).toContain('9 used, 3 no signal');
    expect(label('rate')).toContain('planned over 10 steps: 1e-5 at step 1');
    vi.advanceTimersByTime(1000);
    const rows = [...hosts.curve!.querySelectorAll('tr')].map(row =>
      [...row.children].map(cell => cell.textContent)
    );
    expect(rows).toEqual([
      ['step', 'reward', 'held-out reward'],
      ['0', '–', '0.3 (0.2 to 0.4)'],
      ['1', '0.25', '–'],
      ['2', '–', '–'],
      ['3', '0.5', '0.9 (0.8 to 1), incomplete']
    ]);
  });

  it('rests on the newest step', () => {
    expect(readout('curve')).toBe(
      'step 3 · reward 0.5 · held-out reward 0.9 (0.8 to 1), incomplete'
    );
    expect(readout('outcomes')).toBe('step 3 · used 4');
    expect(readout('rate')).toMatch(/^step 3 · rate 1e-5 · planned 7.78e-6$/);
  });

  it('follows a row that changes and one that comes', () => {
    charts.update(
      'steps',
      ['id', 'step', 'avg_reward'],
      [
        [3, 4],
        [3, 4],
        [0.5, 0.75]
      ]
    );
    charts.flush();
    expect(hosts.curve!.dataset.lastStep).toBe('4');
    expect(readout('curve')).toBe('step 4 · reward 0.75');
  });

  it('draws by itself at the next frame', () => {
    charts.update('steps', ['id', 'step', 'avg_reward'], [[9], [9], [1]]);
    expect(hosts.curve!.dataset.lastStep).toBe('3');
    vi.advanceTimersByTime(20);
    expect(hosts.curve!.dataset.lastStep).toBe('9');
  });

  it('forgets another feed', () => {
    charts.clear();
    charts.flush();
    expect(hosts.curve!.dataset).toMatchObject({ chart: 'curve', points: '0', lastStep: '' });
    expect(label('curve')).toBe('No reward yet.');
    expect(readout('curve')).toBe('');
  });

  it('is picked from by keyboard, and keeps its keys from the notebook', () => {
    const reached = vi.fn();
    document.body.addEventListener('keydown', reached);
    expect(press('curve', 'Enter')).toBe(true);
    expect(picked).toEqual([3]);
    expect(press('curve', 'a')).toBe(false);
    expect(reached).toHaveBeenCalledTimes(1);
    document.body.removeEventListener('keydown', reached);
  });

  it('is read out only where the keyboard is', () => {
    const live = (kind: string) =>
      hosts[kind]!.querySelector('.nbtrain-chart-readout')!.getAttribute('aria-live');
    stage('curve').focus();
    expect([live('curve'), live('outcomes')]).toEqual(['polite', 'off']);
    stage('curve').blur();
    expect(live('curve')).toBe('off');
  });

  it('names in its legend what is drawn', () => {
    const legend = [...hosts.curve!.querySelectorAll('li')].map(item => item.textContent);
    expect(legend).toEqual([
      'reward',
      'held-out reward, 95 % interval',
      'held-out reward, round not complete'
    ]);
  });
});

it('shows losses of a supervised run, the lowest round as the best', async () => {
  await open(true, 'curve');
  charts.update(
    'steps',
    ['id', 'step', 'loss'],
    [
      [1, 2],
      [1, 2],
      [2, 1]
    ]
  );
  charts.update(
    'rounds',
    ['id', 'step', 'value', 'low', 'high', 'complete'],
    [
      [1, 2],
      [1, 2],
      [3, 1.5],
      [NaN, NaN],
      [NaN, NaN],
      [1, 1]
    ]
  );
  charts.flush();
  expect(label('curve')).toBe(
    'Loss by step: 2 at step 1, 1 at step 2; best validation loss 1.5 at step 2.'
  );
});
