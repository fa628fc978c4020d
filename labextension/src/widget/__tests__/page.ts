/**
 * The panel in a page of its own, with a made-up run. In `labextension/`:
 *
 *     npx esbuild src/widget/__tests__/page.ts --bundle --format=esm --servedir=src/widget/__tests__
 *
 * `?theme=dark`, `?run=sft`, `?steps=10000` and `?gone` show other sides of it; with `?measure`,
 * `await measure(20)` in the console gives the milliseconds of the first draw and of appends.
 */
import { FakeModel, reinforced, reinforcedSteps, supervised, tell } from './fake';
import panel from '../index';

const asked = new URLSearchParams(location.search);
const steps = Number(asked.get('steps') ?? 120);
const world = asked.get('run') === 'sft' ? supervised() : reinforced(steps, Math.ceil(steps / 0.6));
const model = new FakeModel();
const el = document.getElementById('panel')!;
document.body.dataset.jpThemeLight = asked.get('theme') === 'dark' ? 'false' : 'true';

let serial = 0;
const twoFrames = (): Promise<number> =>
  new Promise(done => {
    requestAnimationFrame(() => requestAnimationFrame(done));
  });

/** First draw and appends of ten steps, each until two frames later. */
async function measure(count: number): Promise<{ first: number; appends: number[] }> {
  const started = performance.now();
  panel.render({ model, el });
  serial = tell(model, world);
  await twoFrames();
  const first = performance.now() - started;
  const appends: number[] = [];
  for (let n = 0; n < count; n++) {
    const tables = [reinforcedSteps(10, steps + 1 + 10 * n, steps / 0.6)];
    const completed = steps + 10 * (n + 1);
    const progress = { ...world.state.progress, completed };
    const from = performance.now();
    serial = tell(model, { tables, state: { progress } }, { base: serial });
    await twoFrames();
    appends.push(performance.now() - from);
  }
  return { first, appends };
}

Object.assign(window, { model, world, tell, measure });
if (!asked.has('measure')) {
  panel.render({ model, el });
  serial = tell(model, world);
  if (!asked.has('gone')) {
    setInterval(() => {
      model.hear({ kind: 'tick' });
    }, 3000);
  }
}
