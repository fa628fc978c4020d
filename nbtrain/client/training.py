"""``client.training``: options, plans, runs, rewards and checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from nbtrain.client import tables
from nbtrain.client.frames import frame
from nbtrain.client.listing import Listing, row_of
from nbtrain.client.records import Checkpoint, HeldOutPoint, Progress, RewardPoint, StepSummary
from nbtrain.client.refusals import refuse
from nbtrain.client.resolved import ResolvedView
from nbtrain.client.run import RUN_COLUMNS, Run, RunListing
from nbtrain.errors import PlanRefused, Problem, Refused
from nbtrain.plan.fields import as_python, describe, plain
from nbtrain.plan.listing import ModelOptions
from nbtrain.plan.resolved import ResolvedPlan

if TYPE_CHECKING:
    import pandas as pd

    from nbtrain.client.parts import Parts
    from nbtrain.plan.preflight import Estimate

__all__ = ["Checkpoints", "OptionsListing", "Rewards", "Runs", "Training"]

RunRef = Run | str


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


class Training:
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
        **also: Any,
    ) -> ResolvedView:
        """The plan that these options make; nothing is started or stored.

        ``workload=`` says the same as ``bench_id=``, ``model=`` and ``base_model=`` the same as
        ``base_model_slug=``, here and in :meth:`estimate`, :meth:`create` and :meth:`start`.
        Raises :class:`PlanRefused` with every problem at once.
        """
        from nbtrain.plan.resolve import resolve

        bench_id, base_model_slug = translated(bench_id, base_model_slug, also)
        if descriptor is not None:
            refuse("a descriptor", "state options=… and bench_id=… instead")
        plan = resolve(
            options,
            registry=self._parts.registry,
            workload=bench_id,
            base_model=base_model_slug,
            parent=parent_checkpoint_id,
            display_name=display_name,
            algorithm=algorithm,
            load_weights_only=load_weights_only,
        )
        arguments = {
            "workload": bench_id, "base_model_slug": base_model_slug,
            "parent_checkpoint_id": parent_checkpoint_id, "display_name": display_name,
            "algorithm": algorithm, "load_weights_only": load_weights_only,
        }  # fmt: skip
        return ResolvedView(
            plan,
            self._parent_plan(plan),
            as_given(options or {}, arguments),
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
        **also: Any,
    ) -> Estimate:
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
            **also,
        ).estimate

    def estimate_of(self, run: RunRef) -> Estimate:
        """What the plan of a run takes, going by what is measured by now."""
        return self._estimate(self._parts.run(run).plan)

    def _estimate(self, plan: ResolvedPlan) -> Estimate:
        from nbtrain.client.measured import estimate_here

        return estimate_here(self._parts, plan)

    def _parent_plan(self, plan: ResolvedPlan) -> ResolvedPlan | None:
        if plan.parent is None:
            return None
        row = self._parts.store.find_run(plan.parent.run_id)
        return ResolvedPlan.from_json(row.resolved)

    def create(
        self,
        *,
        bench_id: object = None,
        base_model_slug: object = None,
        options: Mapping[str, Any] | None = None,
        parent_checkpoint_id: object = None,
        display_name: str | None = None,
        **also: Any,
    ) -> Run:
        """Start a new run in the background and return it at once.

        With ``parent_checkpoint_id`` it goes on from that checkpoint, and what is not stated is
        inherited from the checkpoint's run. Raises :class:`PlanRefused` with every problem, and
        then nothing was started.
        """
        view = self.resolve(
            options=options,
            bench_id=bench_id,
            base_model_slug=base_model_slug,
            parent_checkpoint_id=parent_checkpoint_id,
            display_name=display_name,
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
        **also: Any,
    ) -> Run:
        """The same as :meth:`create`; the run's ``config_hash`` and ``earlier_runs`` tell whether
        this recipe was trained before.
        """
        if descriptor is not None:
            refuse("a descriptor", "state options=… and bench_id=… instead")
        return self.create(
            bench_id=bench_id,
            base_model_slug=base_model_slug,
            options=options,
            parent_checkpoint_id=parent_checkpoint_id,
            display_name=display_name,
            **also,
        )

    def launch(self, view: ResolvedView, *, text: str | None = None) -> Run:
        """Start a resolved plan; ``text`` is the plan as it was typed, kept for the record.

        Raises :class:`PlanRefused` when the parent has lost its training state meanwhile.
        """
        from nbtrain.jobs.launch import launch
        from nbtrain.store import new_id, write_json

        store = self._parts.store
        given = {**view.given, "text": text}
        run_id = new_id()
        # First what can fail without leaving a run behind: a full disk, a home that is read-only
        folder = store.run_folder(run_id)
        write_json(folder / "plan.json", given)
        write_json(folder / "resolved.json", view.plan.to_json())
        try:
            row = store.create_run(run_id, plan=given, resolved=view.plan)
        except Refused:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        launch(store, row)
        return Run(store, row)

    def find_same(self, view: ResolvedView) -> Run | None:
        """The newest run of the plan's name, if it trains under the same plan, else ``None``."""
        from nbtrain.plan.identity import same_plan

        name = view.plan.display_name
        newest = self._parts.store.runs(limit=1, name=name) if name else []
        if newest and same_plan(ResolvedPlan.from_json(newest[0].resolved), view.plan):
            return Run(self._parts.store, newest[0])
        return None


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


def as_given(options: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What was stated, nulls included, as JSON; arguments that say nothing are left out."""
    stated = {name: _as_json(value) for name, value in options.items()}
    beside = {name: _as_json(value) for name, value in arguments.items() if value is not None}
    return {"options": stated, "arguments": beside}


def _as_json(value: Any) -> Any:
    """A plain value as it is; an object (a run's checkpoint, a workload) by its id or name."""
    value = as_python(value)
    for name in ("checkpoint_id", "workload_id", "slug"):
        if isinstance(found := getattr(value, name, None), str):
            return found
    return plain(value)


class Runs:
    """``client.training.runs``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def get(self, run: RunRef) -> Run:
        """The run a name (its newest run), an id or a prefix means.

        Raises :class:`NotFound`, and :class:`AmbiguousReference` for a prefix of several.
        """
        return self._parts.run(run)

    def retrieve(self, training_run_id: RunRef) -> Run:
        """The same as :meth:`get`."""
        return self.get(training_run_id)

    def list(self, limit: int | None = None) -> Listing[Run]:
        """Runs, newest first."""
        store = self._parts.store
        runs = [Run(store, row) for row in store.runs(limit, texts=False)]
        return RunListing(runs, RUN_COLUMNS)

    def still_running(self, name: str | None, *, besides: Run | None = None) -> Listing[Run]:
        """Runs of this name that are not over, newest first; none for ``None``."""
        store = self._parts.store
        rows = store.runs(name=name, open_only=True) if name else []
        found = [Run(store, row) for row in rows]
        open_ones = [run for run in found if run != besides and not run.is_over]
        return Listing(open_ones, RUN_COLUMNS)

    def progress(self, training_run_id: RunRef) -> Progress:
        """Steps and trajectories so far."""
        return self.get(training_run_id).progress

    def list_step_summaries(self, training_run_id: RunRef) -> Listing[StepSummary]:
        """The ledger of every step."""
        run = self.get(training_run_id)
        return Listing(tables.step_summaries(run._rows("steps")), StepSummary.columns())

    def cancel(self, training_run_id: RunRef) -> Run:
        """Ask the run to stop; its checkpoints stay."""
        return self.get(training_run_id).cancel()

    def wait(self, training_run_id: RunRef, timeout: float | None = None) -> Run:
        """Wait for the end; see :meth:`Run.wait`."""
        return self.get(training_run_id).wait(timeout)


class Rewards:
    """``client.training.rewards``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def list_history(self, training_run_id: RunRef) -> Listing[RewardPoint]:
        """The mean reward of every step."""
        rows = self._parts.run(training_run_id)._rows("rewards")
        points = [RewardPoint(r["step"], r["avg_reward"], r["used_reward"]) for r in rows]
        return Listing(points, RewardPoint.columns())

    def list_held_out_rewards(self, training_run_id: RunRef) -> Listing[HeldOutPoint]:
        """Every validation round; compare only those with ``round_completed``."""
        rows = self._parts.run(training_run_id)._rows("validation_rounds")
        return Listing(tables.held_out_points(rows), HeldOutPoint.columns())


class Checkpoints:
    """``client.training.checkpoints``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def list(self, training_run_id: RunRef) -> Listing[Checkpoint]:
        """The committed checkpoints of a run, by step."""
        found = self._parts.run(training_run_id).checkpoint_list()
        return Listing(found, Checkpoint.columns())

    def get(self, checkpoint_id: Checkpoint | str) -> Checkpoint:
        """The checkpoint that an id or a prefix means.

        Raises :class:`NotFound`, and :class:`AmbiguousReference` for a prefix of several.
        """
        if isinstance(checkpoint_id, Checkpoint):
            checkpoint_id = checkpoint_id.checkpoint_id
        row = self._parts.store.find_checkpoint(checkpoint_id)
        found = self._parts.run(row.run_id).checkpoint_list()
        return next(c for c in found if c.checkpoint_id == row.checkpoint_id)
