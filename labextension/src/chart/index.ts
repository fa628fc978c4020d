/**
 * The charts of a run: curve with held-out rounds, groups by outcome, learning rate.
 *
 * They know nothing of Jupyter, so that every page can share them. One `Charts` is what one panel
 * shows: its charts share their rows, their cursor and the picked checkpoint.
 *
 *     const charts = new Charts({ supervised: false, onPick: step => … });
 *     charts.mount(host, 'curve');
 *     charts.mount(otherHost, 'outcomes');
 *     charts.update('steps', ['id', 'step', 'avg_reward'], columns);
 *     charts.show({ checkpoints: [{ step: 20, best: true }], picked: 20 });
 */
import 'uplot/dist/uPlot.min.css';
import './chart.css';

export { Charts } from './charts';
export type { ChartKind, ChartsOptions } from './charts';
export type { Checkpoint, NotFinite, Shown } from './source';
