"""``client.training``: options, plans, runs, rewards and checkpoints."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from nbtrain.client.descriptors import read_descriptor
from nbtrain.client.frames import frame
from nbtrain.client.listing import Listing, row_of
from nbtrain.client.parts import Part
from nbtrain.client.refusals import SubmittedBefore
from nbtrain.client.resolved import ResolvedView
from nbtrain.client.resolved_descriptor import DescriptorView
from nbtrain.client.run import Run
from nbtrain.client.training_parts import Checkpoints, Rewards, RunRef, Runs
from nbtrain.errors import PlanRefused, Problem
from nbtrain.plan.fields import as_python, describe, plain
from nbtrain.plan.listing import ModelOptions
from nbtrain.plan.resolved import ResolvedPlan

if TYPE_CHECKING:
    import pandas as pd

    from nbtrain.client.checking import CheckReport
    from nbtrain.client.parts import Parts
    from nbtrain.plan.preflight import Estimate
    from nbtrain.plan.supervised_estimate import SupervisedEstimate

__all__ = ["Checkpoints", "OptionsListing", "Rewards", "Runs", "Training"]


class OptionsListing(Listing[ModelOptions]):
    """The models that can be trained; ``models`` is the same list as ``items``."""

    def __init__(self, models: list[ModelOptions]) -> None:
        super().__init__(models)
        self.models = models

    def to_frame(self) -> pd.DataFrame:
        """One row per model and option."""
        rows = [
            {"base_model_slug": model.base_model_slug, **row_of(option)}
            for model in self.models
            for option in model.options
        ]
        return frame(rows)


class Training(Part):
    """Everything about training runs. Runs are named by a Run, a name, an id or a prefix."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.runs = Runs(parts)
        self.rewards = Rewards(parts)
        self.checkpoints = Checkpoints(parts)

    def list_options(
        self, bench_id: object = None, *, mode: Literal["training", "evaluation"] = "training"
    ) -> OptionsListing:
        """The base models and, for each, every option with type, bounds, default and help.

        ``bench_id`` names a workload; it is checked, and its base model comes first.
        """
        from nbtrain.plan.listing import list_options

        registry = self._parts.registry
        models = registry.base_models()
        if bench_id is not None:
            preferred = registry.workload(bench_id).base_model
            if preferred is not None and preferred not in {m.slug for m in models}:
                models.append(registry.base_model(preferred))
            models.sort(key=lambda m: m.slug != preferred)
        return OptionsListing(list_options(models, mode).models)

    def resolve(
        self,
        descriptor: object = None,
        *,
        options: Mapping[str, Any] | None = None,
        bench_id: object = None,
        base_model_slug: object = None,
        parent_checkpoint_id: object = None,
        display_name: str | None = None,
        algorithm: str | None = None,
        load_weights_only: bool | None = None,
        small: bool = False,
        smoke: bool = False,
        **also: Any,
    ) -> ResolvedView:
        """The plan that a descriptor, or these options, make; nothing is started or stored.

        ``descriptor`` is a mapping, the path of a ``.json`` or ``.yaml`` file, or JSON or YAML
        text. Beside it stand only ``parent_checkpoint_id``, ``display_name`` and
        ``load_weights_only``, and what it may state itself: workload, base model and
        ``algorithm``, its method. ``options`` with ``algorithm: sft`` are a supervised run's.

        ``small`` is a first look: what is not stated of batch, group, length and validation takes
        smaller values (origin ``small``; :mod:`nbtrain.plan.small` has them). ``smoke`` makes a
        supervised run a smoke check, as a descriptor's own ``smoke`` does; the run's ``verdict``
        has what it found.

        ``workload=`` says the same as ``bench_id=``, ``model=`` and ``base_model=`` the same as
        ``base_model_slug=``, here and in :meth:`estimate`, :meth:`create` and :meth:`start`.
        Raises :class:`PlanRefused` with every problem at once.
        """
        from nbtrain.plan.resolve import resolve

        bench_id, base_model_slug = translated(bench_id, base_model_slug, also)
        arguments = {
            "workload": bench_id, "base_model_slug": base_model_slug,
            "parent_checkpoint_id": parent_checkpoint_id, "display_name": display_name,
            "algorithm": algorithm, "load_weights_only": load_weights_only,
            "small": small or None, "smoke": smoke or None,
        }  # fmt: skip
        body = options if descriptor is None else _only(descriptor, options)
        plan = resolve(
            body,
            registry=self._parts.registry,
            workload=bench_id,
            base_model=base_model_slug,
            parent=parent_checkpoint_id,
            display_name=display_name,
            algorithm=algorithm,
            load_weights_only=load_weights_only,
            first_look=small,
            smoke=smoke,
        )
        view = ResolvedView if plan.config is None else DescriptorView
        form = "options" if descriptor is None else "descriptor"
        return view(
            plan,
            self._parent_plan(plan),
            as_given(form, body or {}, arguments),
            estimate=lambda: self._estimate(plan),
        )

    def estimate(
        self,
        descriptor: object = None,
        *,
        options: Mapping[str, Any] | None = None,
        bench_id: object = None,
        base_model_slug: object = None,
        parent_checkpoint_id: object = None,
        display_name: str | None = None,
        algorithm: str | None = None,
        load_weights_only: bool | None = None,
        small: bool = False,
        smoke: bool = False,
        **also: Any,
    ) -> Estimate | SupervisedEstimate:
        """What such a run would take: trajectories, tokens, validation, memory and time.

        Nothing is started or stored. Time is only told where earlier runs of the base model on
        this machine were measured. Raises :class:`PlanRefused` as :meth:`resolve` does.
        """
        return self.resolve(
            descriptor,
            options=options,
            bench_id=bench_id,
            base_model_slug=base_model_slug,
            parent_checkpoint_id=parent_checkpoint_id,
            display_name=display_name,
            algorithm=algorithm,
            load_weights_only=load_weights_only,
            small=small,
            smoke=smoke,
            **also,
        ).estimate

    def estimate_of(self, run: RunRef) -> Estimate | SupervisedEstimate:
        """What the plan of a run takes, going by what is measured by now."""
        return self._estimate(self._parts.run(run).plan)

    def _estimate(self, plan: ResolvedPlan) -> Estimate | SupervisedEstimate:
        from nbtrain.client.measured import estimate_here

        return estimate_here(self._parts, plan)

    def _parent_plan(self, plan: ResolvedPlan) -> ResolvedPlan | None:
        if plan.parent is None:
            return None
        row = self._parts.store.find_run(plan.parent.run_id)
        return ResolvedPlan.from_json(row.resolved)

    def create(
        self,
        descriptor: object = None,
        *,
        bench_id: object = None,
        base_model_slug: object = None,
        options: Mapping[str, Any] | None = None,
        parent_checkpoint_id: object = None,
        display_name: str | None = None,
        small: bool = False,
        smoke: bool = False,
        **also: Any,
    ) -> Run:
        """Start a new run in the background and return it at once.

        A descriptor with a ``submissionId`` that was started before gives the run of the first
        start, and warns so. With ``parent_checkpoint_id`` it goes on from that checkpoint, and
        what is not stated is inherited from the checkpoint's run. Raises :class:`PlanRefused`
        with every problem, and then nothing was started.
        """
        view = self.resolve(
            descriptor,
            options=options,
            bench_id=bench_id,
            base_model_slug=base_model_slug,
            parent_checkpoint_id=parent_checkpoint_id,
            display_name=display_name,
            small=small,
            smoke=smoke,
            **also,
        )
        return self.launch(view)

    def start(
        self,
        descriptor: object = None,
        *,
        options: Mapping[str, Any] | None = None,
        bench_id: object = None,
        base_model_slug: object = None,
        parent_checkpoint_id: object = None,
        display_name: str | None = None,
        small: bool = False,
        smoke: bool = False,
        **also: Any,
    ) -> Run:
        """The same as :meth:`create`; the run's ``config_hash`` and ``earlier_runs`` tell whether
        this recipe was trained before.
        """
        view = self.resolve(
            descriptor,
            options=options,
            bench_id=bench_id,
            base_model_slug=base_model_slug,
            parent_checkpoint_id=parent_checkpoint_id,
            display_name=display_name,
            small=small,
            smoke=smoke,
            **also,
        )
        return self.launch(view)

    def launch(self, view: ResolvedView, *, text: str | None = None) -> Run:
        """Start a resolved plan; ``text`` is the plan as it was typed, kept for the record.

        Raises :class:`PlanRefused` when the parent has lost its training state meanwhile.
        """
        from nbtrain.client.starting import start, started_before

        run, new = start(self._parts.store, view.plan, {**view.given, "text": text})
        if not new:
            warnings.warn(SubmittedBefore(started_before(view.plan, run)), stacklevel=3)
        return run

    def find_submission(self, view: ResolvedView) -> Run | None:
        """The run that the plan's ``submissionId`` made before, if any.

        Raises :class:`PlanRefused` when that run trains under another plan.
        """
        from nbtrain.client.starting import find_submission

        return find_submission(self._parts.store, view.plan)

    def check(self, view: ResolvedView, told: Callable[[str], None] | None = None) -> CheckReport:
        """Run the start checks of a plan alone; nothing is started or kept.

        It takes as long as reading the data and loading the model does. ``told`` is called with
        each line on what is being checked; an interrupt leaves nothing running.
        """
        from nbtrain.client.checking import run_checks

        return run_checks(self._parts.store, view.plan, told or (lambda _: None))

    def find_same(self, view: ResolvedView) -> Run | None:
        """The newest run of the plan's name, if it trains under the same plan, else ``None``."""
        from nbtrain.plan.identity import same_plan

        name = view.plan.display_name
        newest = self._parts.store.runs(limit=1, name=name) if name else []
        if newest and same_plan(ResolvedPlan.from_json(newest[0].resolved), view.plan):
            return Run(self._parts.store, newest[0])
        return None


def _only(descriptor: object, options: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The descriptor's mapping; options cannot be stated besides."""
    if options is not None:
        message = "options and a descriptor are stated: a run is stated by one of them"
        raise PlanRefused([Problem("options", message, hint="State everything in one")])
    return read_descriptor(descriptor)


_ALIASES = {"workload": "bench_id", "model": "base_model_slug", "base_model": "base_model_slug"}


def translated(
    bench_id: object, base_model_slug: object, also: Mapping[str, Any]
) -> tuple[object, object]:
    """Workload and base model, of which either may be stated under another name in ``also``.

    Raises :class:`PlanRefused` for one that is stated twice, and for options among the arguments;
    ``TypeError`` for any other argument.
    """
    from nbtrain.plan.options import OPTIONS
    from nbtrain.plan.statements import nearest

    said = {"bench_id": bench_id, "base_model_slug": base_model_slug}
    problems: list[Problem] = []
    for name, value in also.items():
        meant = _ALIASES.get(name)
        if meant is not None:
            if said[meant] is not None and value is not None:
                message = f"{name} is another name of {meant}, and both are stated"
                problems.append(Problem(name, message, describe(value), hint="State it once"))
            said[meant] = value if said[meant] is None else said[meant]
        elif name in OPTIONS:
            message = f"{name} is an option: options are stated together"
            hint = f'Write options={{"{name}": {as_python(value)!r}, …}}'
            problems.append(Problem(name, message, plain(value), hint=hint))
        else:
            near = nearest(name)
            msg = f"unexpected argument {name!r}" + (f", did you mean {near!r}?" if near else "")
            raise TypeError(msg)
    if problems:
        raise PlanRefused(problems)
    return said["bench_id"], said["base_model_slug"]


def as_given(form: str, body: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What was stated, nulls included, as JSON; arguments that say nothing are left out.

    ``form`` is ``options`` or ``descriptor``, what the body is.
    """
    beside = {name: _as_json(value) for name, value in arguments.items() if value is not None}
    return {form: _as_json(body), "arguments": beside}


def _as_json(value: Any) -> Any:
    """A plain value as it is; an object (a run's checkpoint, a workload) by its id or name."""
    value = as_python(value)
    if isinstance(value, Mapping):
        return {str(key): _as_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(each) for each in value]
    for name in ("checkpoint_id", "workload_id", "dataset_id", "model_id", "bundle_id", "slug"):
        if isinstance(found := getattr(value, name, None), str):
            return found
    return plain(value)
