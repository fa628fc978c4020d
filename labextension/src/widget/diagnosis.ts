import type { Finding, State } from '../protocol';
import { h, Keyed, mark, say, sayOrHide, show } from './dom';
import type { Drawn } from './dom';
import { counted } from './words';

const MARKS = { problem: '✕ problem', hint: '! hint', fine: '✓ fine' };

/** Why it goes as it goes: what is wrong in the open, what is fine folded away. */
export class Diagnosis {
  readonly el = h('details', { class: 'nbtrain-section', open: true });
  private readonly title = h('summary', {}, 'Diagnosis');
  private readonly fineTitle = h('summary');
  private readonly fine: HTMLElement;
  private readonly wrongs: Keyed<Finding>;
  private readonly fines: Keyed<Finding>;

  constructor() {
    const wrongs = h('ul', { class: 'nbtrain-findings' });
    const fines = h('ul', { class: 'nbtrain-findings' });
    this.wrongs = new Keyed(wrongs, finding => finding.sentence, drawn);
    this.fines = new Keyed(fines, finding => finding.sentence, drawn);
    this.fine = h('details', {}, this.fineTitle, fines);
    this.el.append(this.title, wrongs, this.fine);
  }

  update({ diagnosis }: Partial<State>): void {
    if (!diagnosis) {
      return;
    }
    const of = (severity: Finding['severity']): Finding[] =>
      diagnosis.filter(finding => finding.severity === severity);
    const [problems, hints, fine] = [of('problem'), of('hint'), of('fine')];
    const told = [
      problems.length ? counted(problems.length, 'problem') : null,
      hints.length ? counted(hints.length, 'hint') : null
    ].filter(Boolean);
    say(this.title, `Diagnosis: ${told.join(', ') || 'nothing to worry about'}`);
    this.wrongs.update([...problems, ...hints]);
    this.fines.update(fine);
    say(this.fineTitle, `${fine.length} fine`);
    show(this.fine, fine.length > 0);
    show(this.el, diagnosis.length > 0);
  }
}

function drawn(): Drawn<Finding> {
  const what = h('span', { class: 'nbtrain-severity' });
  const sentence = h('span');
  const suggestion = h('div', { class: 'nbtrain-muted' });
  return {
    el: h('li', {}, what, h('div', {}, sentence, suggestion)),
    update: finding => {
      mark(what, 'data-severity', finding.severity);
      say(what, MARKS[finding.severity]);
      say(sentence, finding.sentence);
      sayOrHide(suggestion, finding.suggestion);
    }
  };
}
