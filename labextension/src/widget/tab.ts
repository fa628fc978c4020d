import type { CheckpointRow, State } from '../protocol';

/** One of the things that can be done with a checkpoint. */
export interface Tab {
  action: 'generate' | 'resume' | 'export';
  label: string;
  el: HTMLElement;
  update(row: CheckpointRow, state: Partial<State>): void;
  /** Another run is shown: what became of the last one is of no interest any more. */
  forget(): void;
}
