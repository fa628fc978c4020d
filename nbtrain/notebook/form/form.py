"""The configuration form: what it states, what that comes to, and what its buttons do."""

from __future__ import annotations

import html
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from nbtrain.errors import NbtrainError, Problem, first_line
from nbtrain.notebook.form import page
from nbtrain.notebook.form.checks import Checking
from nbtrain.notebook.form.draft import SWITCHES, Draft
from nbtrain.notebook.form.fields import Group, Groups
from nbtrain.notebook.form.head import Head
from nbtrain.notebook.form.inputs import Inputs, answered, close_all
from nbtrain.notebook.form.lists import read_lists
from nbtrain.notebook.form.outcome import Outcome, come_to, method_of
from nbtrain.notebook.form.output import Output
from nbtrain.notebook.launching import start
from nbtrain.plan.identity import same_plan

if TYPE_CHECKING:
    from nbtrain.client import Client, Run
    from nbtrain.client.resolved import ResolvedView
    from nbtrain.plan.registry import BaseModelInfo

__all__ = ["Form"]

logger = logging.getLogger(__name__)

SAMPLE = "nbtrain/tiny"
"""The base model of a form whose workload names none."""
_PAUSE = 0.3  # seconds without a further change before a change is looked at


class Form:
    """A plan in the making, as fields; nothing is started before :meth:`launch`.

    Without a notebook it is the same plan by :meth:`set`, :attr:`plan` and :meth:`launch`.
    ``widget`` is what is shown, ``run`` the run that was launched or attached to last.

    What a person types is taken over from whatever thread the front end's messages arrive in, and
    looked at in a thread of its own, so that a form answers while a cell runs.
    """

    def __init__(self, client: Client, draft: Draft) -> None:
        self.run: Run | None = None
        self._client = client
        self._draft = draft
        self._lock = threading.RLock()
        self._looking, self._launching = threading.Lock(), threading.Lock()
        self._launched: tuple[ResolvedView, bool] | None = None
        self._launch_count = 0
        self._version, self._seen = 0, -1
        self._outcome: Outcome | None = None
        self._timer: threading.Timer | None = None
        self._quiet = self._closed = False
        self._checking: Checking | None = None
        self._models: dict[str, BaseModelInfo | None] = {}
        self._touched = False
        self._filled: str | None = None
        self._fill_model(draft)
        self._inputs = Inputs(self._changed)
        self._head = Head(self._inputs, draft, read_lists(client))
        self._state, self._expected = self._inputs.html(), self._inputs.html()
        self._groups: Groups | None = None
        self._buttons = self._make_buttons()
        self._output = Output(self._inputs)
        self.widget = widgets.VBox()
        self.widget.add_class("nbtrain-form")
        self._style = self._inputs.html(page.STYLE)
        self._look()

    # What a script uses

    @property
    def options(self) -> dict[str, Any]:
        """The options that are stated, by name."""
        with self._lock:
            return self._draft.options(self.method)

    @property
    def method(self) -> str:
        """The method whose options the form has: stated, the checkpoint's, or the default."""
        return self._current().method

    def set(self, **options: Any) -> Form:
        """State options, and ``workload``, ``model``, ``method``, ``dataset``, ``parent``,
        ``name``, ``weights_only``, ``small`` and ``smoke``; of these ``None`` clears one.

        Any value is taken that a field can hold, and refused as a plan is; see :attr:`problems`.
        Raises :class:`~nbtrain.errors.Refused` for a name that the form has no field for.
        """
        with self._lock:
            self._draft = self._draft.stating(options, lambda d: method_of(self._client, d))
            if {"workload", "parent", "bench_id", "parent_checkpoint_id"} & options.keys():
                self._fill_model(self._draft)
            self._version += 1
        self._look()
        self._show_stated()
        return self

    def clear(self, *names: str) -> Form:
        """Take back what is stated under these names; without names, all options."""
        with self._lock:
            for name in names or tuple(self._draft.texts):
                self._draft.switches.pop(name, None)
                self._draft.typed(name, "")
            self._version += 1
        self._look()
        self._show_stated()
        return self

    @property
    def plan(self) -> ResolvedView:
        """The resolved plan. Raises :class:`~nbtrain.errors.PlanRefused` with every problem."""
        outcome = self._current()
        if outcome.refusal is not None:
            raise outcome.refusal
        assert outcome.view is not None
        return outcome.view

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Everything that is refused."""
        return self._current().problems

    @property
    def cell(self) -> str:
        """The ``%%train`` cell that states the same."""
        outcome = self._current()
        with self._lock:
            return self._draft.cell(outcome.method)

    def launch(self, *, new: bool = False) -> Run:
        """Start the run and return it; ``new`` trains again where there is one of the same plan.

        Else the newest run of the name is attached to where it trains under the same plan. Called
        twice at the same moment for one plan, it starts one run. Raises
        :class:`~nbtrain.errors.PlanRefused` with every problem, and then nothing was started.
        """
        before = self._launch_count
        view, text = self.plan, self.cell
        with self._launching:
            meanwhile = self._launched if before != self._launch_count else None
            if self.run is not None and meanwhile is not None and _is_same(meanwhile, view, new):
                return self.run
            how = 'tick "train again" to train anew'
            run, notes = start(self._client, view, text, again=new, how=how)
            with self._lock:
                self.run, self._launched = run, (view, new)
                self._launch_count += 1
            self._output.follow(run, notes)
            return run

    def close(self) -> None:
        """Take the form away from every page and free its widgets; start checks are ended.

        What was launched goes on, and so does its panel. The form can be used from a cell or a
        script as before; it is displayed no more.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._timer is not None:
                self._timer.cancel()
            checking = self._checking
        if checking is not None:
            checking.stop()
        with self._looking, self._lock:  # what is being looked at is shown first
            self._output.close()
            self._head.close()
            self.widget.children = ()
            if self._groups is not None:
                self._groups.close()
            rest = (self.widget, self._style, self._state, self._expected, self._buttons)
            close_all([*rest, *self._inputs.shared])

    # What happens in the page

    def _changed(self, name: str, text: str) -> None:
        """A field was changed: take it over, and look at it once no more changes come."""
        with self._lock:
            if self._quiet or self._closed:
                return
            if name in SWITCHES:
                self._draft.switches[name] = text == "true"
            else:
                self._draft.typed(name, text)
            if name in ("workload", "parent"):
                self._fill_model(self._draft)
                self._put_model()
            self._touched = True
            self._version += 1
            if self._timer is not None:
                self._timer.cancel()
            self._timer = threading.Timer(_PAUSE, self._look_quietly)
            self._timer.daemon = True
            self._timer.start()

    def _look_quietly(self) -> None:
        try:
            self._look()
        except Exception as error:  # a thread has nobody to raise it to
            logger.debug("the form could not be brought up to date", exc_info=True)
            self._state.value = page.lines([first_line(error)], "nbtrain-refused")

    def _current(self) -> Outcome:
        """What the form comes to as it is now."""
        with self._lock:
            found = self._outcome if self._seen == self._version else None
        return self._look() if found is None else found

    def _look(self) -> Outcome:
        """Resolve what is stated and show what it comes to; returns that."""
        with self._looking:
            while True:
                with self._lock:
                    draft, version = self._draft.copy(), self._version
                outcome = come_to(self._client, draft)
                model = self._model(outcome, draft)
                with self._lock:
                    if version == self._version:
                        self._outcome, self._seen = outcome, version
                        self._show(outcome, draft, model)
                        return outcome

    def _fill_model(self, draft: Draft) -> None:
        """State the base model that goes with the workload, where nobody stated another."""
        if draft.head.get("model") not in (None, self._filled):
            return
        found: str | None = None
        if "parent" not in draft.head:  # whose own it is
            found = SAMPLE
            with suppress(NbtrainError):
                if workload := draft.head.get("workload"):
                    found = self._client.workloads.get(workload).base_model or found
        self._filled = found
        draft.typed("model", found or "")

    def _put_model(self) -> None:
        self._quiet = True
        try:
            self._head.put(self._draft)
        finally:
            self._quiet = False

    def _model(self, outcome: Outcome, draft: Draft) -> BaseModelInfo | None:
        """The base model whose bounds and choices hold, where it can be told."""
        slug = outcome.view.plan.base_model.slug if outcome.view else draft.head.get("model")
        if slug is None:
            return None
        if slug not in self._models:
            try:
                self._models[slug] = self._client.base_models.get(slug)._model
            except NbtrainError:
                return None
        return self._models[slug]

    def _told(self, outcome: Outcome, draft: Draft) -> Outcome:
        """The outcome as it is told: what is merely missing is no fault before a first change."""
        return outcome if self._touched else outcome.gently(draft)

    def _show(self, outcome: Outcome, draft: Draft, model: BaseModelInfo | None) -> None:
        outcome = self._told(outcome, draft)
        if self._closed:
            return
        if self._groups is None or self._groups.method != outcome.method:
            before, self._groups = self._groups, Groups(outcome.method, self._inputs, self._opened)
            self._groups.open_first()
            self.widget.children = (
                self._style, self._head.grid, self._buttons, self._state, *self._output.widgets,
                *self._groups.widgets, self._expected,
            )  # fmt: skip
            if before is not None:
                before.close()  # else they would stay in the saved notebook
        self._head.tell(outcome, draft)
        self._state.value = page.state(outcome)
        for group in self._groups:
            group.tell(outcome, draft.texts, model)
        self._expected.value = page.expected(outcome)
        self._copy.value = page.cell_box(
            self._text(draft, outcome.method), refused=outcome.refusal is not None
        )
        for name in ("dry run", "start checks", "launch"):
            self._button[name].disabled = bool(outcome.refused) and not (
                name == "start checks" and self._checking is not None
            )

    def _opened(self, group: Group) -> None:
        with self._lock:
            outcome = self._outcome
            if outcome is None:
                return
            model = self._model(outcome, self._draft)
            group.build(self._draft.texts, model)
            group.tell(outcome, self._draft.texts, model)

    def _show_stated(self) -> None:
        """Put what is stated into the fields, without taking it for a change."""
        with self._lock:
            self._quiet = True
            try:
                self._head.put(self._draft)
                for group in self._groups or ():
                    group.put(self._draft.texts)
            finally:
                self._quiet = False

    # Buttons

    def _make_buttons(self) -> widgets.HBox:
        told: dict[str, tuple[str, str, Callable[[], None]]] = {
            "dry run": ("", "the resolved plan and what it takes", self._dry_run),
            "start checks": ("", "load data and model and check them; nothing is started",
                             self._check),
            "launch": ("primary", "train in the background", self._launch),
            "refresh lists": ("", "read again what can be picked at the top", self._refresh),
        }  # fmt: skip
        self._button: dict[str, widgets.Button] = {}
        for name, (style, tip, act) in told.items():
            button = widgets.Button(
                description=name, button_style=style, tooltip=tip,
                layout=widgets.Layout(width="auto"),
            )  # fmt: skip
            button.on_click(lambda _, act=act: self._do(act))
            answered(button)
            self._button[name] = button
        self._again = widgets.Checkbox(
            value=False, description="train again", indent=False,
            tooltip="also where the newest run of this name has the same plan",
            layout=widgets.Layout(width="auto"),
        )  # fmt: skip
        answered(self._again)
        self._copy = self._inputs.html()
        order = ("dry run", "start checks", "launch", self._again, self._copy, "refresh lists")
        row = [self._button[one] if isinstance(one, str) else one for one in order]
        return widgets.HBox(children=row, layout=widgets.Layout(flex_flow="row wrap"))

    def _do(self, act: Callable[[], None]) -> None:
        """Do what a button says; what is refused is shown, never printed into some cell."""
        if not self._touched and act != self._refresh:
            self._touched = True
            self._look()
        try:
            act()
        except (NbtrainError, OSError, TypeError, ValueError) as error:
            told = str(error).splitlines() or [type(error).__name__]
            self._output.show(page.lines(told, "nbtrain-refused"))

    def _dry_run(self) -> None:
        view = self.plan
        self._output.show(view._repr_html_() + view.estimate._repr_html_())

    def _check(self) -> None:
        with self._lock:
            if self._checking is not None:
                self._checking.stop()
                return
        view = self.plan
        with self._lock:
            self._button["start checks"].description = "stop checks"
            self._checking = Checking(self._client, view, self._output.show, self._checked)

    def _checked(self) -> None:
        with self._lock:
            self._checking = None
            self._button["start checks"].description = "start checks"
            self._button["start checks"].disabled = bool(self._outcome and self._outcome.problems)

    def _launch(self) -> None:
        button = self._button["launch"]
        button.disabled = True  # a second click meanwhile starts no second run
        try:
            self.launch(new=self._again.value)
        finally:
            button.disabled = False
        self._again.value = False
        self._refresh()

    def _refresh(self) -> None:
        lists = read_lists(self._client)
        with self._lock:
            self._quiet = True
            try:
                self._head.offer(lists)
            finally:
                self._quiet = False
        self._look()

    # Display

    def __repr__(self) -> str:
        outcome = self._current()
        with self._lock:
            draft = self._draft.copy()
        outcome = self._told(outcome, draft)
        text = self._text(draft, outcome.method)
        state = "refused" if outcome.refused else "nothing is refused"
        if outcome.missing:
            state = f"not stated yet: {', '.join(outcome.missing)}"
        told = [f"  {problem}" for problem in outcome.refused]
        head = f"training form ({outcome.method}): {state}"
        return "\n".join([head, *told, *(f"  {line}" for line in text.splitlines())])

    def _text(self, draft: Draft, method: str) -> str:
        try:
            return draft.cell(method)
        except ValueError as error:
            return str(error)

    def _ipython_display_(self) -> None:
        text = repr(self)
        if self._closed:
            print(text)
            return
        data = {
            "text/plain": text,
            "text/html": f'<pre style="white-space:pre-wrap">{html.escape(text)}</pre>',
            **_view(self.widget),
        }
        self._output.display(data, self.run)


def _is_same(launched: tuple[ResolvedView, bool], view: ResolvedView, new: bool) -> bool:
    """Whether what was just launched is what is asked for."""
    before, trained_anew = launched
    named = before.plan.display_name == view.plan.display_name
    return named and trained_anew == new and same_plan(before.plan, view.plan)


def _view(widget: widgets.DOMWidget) -> Mapping[str, Any]:
    """The widget's own part of a display, which a front end prefers while the kernel lives."""
    made = widget._repr_mimebundle_() or {}
    data = made[0] if isinstance(made, tuple) else made
    return {kind: value for kind, value in data.items() if kind.startswith("application/")}
