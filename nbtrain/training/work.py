"""What a reinforcement run works on: a workload's tasks, or a dataset's rows with reward terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nbtrain.catalog import Catalog
from nbtrain.catalog.splitting import Task
from nbtrain.errors import NotFound, Problem, Refused, Where
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.store import Store

__all__ = ["Place", "Sides", "Tasks", "Work", "row", "work_of"]

Place = Callable[[int], Where]
"""Where the task of an index, from 0, was written."""


class Sides(Protocol):
    """Tasks as they divide."""

    @property
    def train_tasks(self) -> Sequence[Task]:
        """Those that train."""
        ...

    @property
    def held_out_tasks(self) -> Sequence[Task]:
        """Those that validate."""
        ...

    @property
    def train_digest(self) -> str:
        """What the plan knows the training side by."""
        ...


class Tasks(Protocol):
    """Tasks with what grades them, as a job takes them."""

    @property
    def raw(self) -> bool:
        """Whether prompts are plain text that no chat template wraps."""
        ...

    @property
    def rewards_path(self) -> Path:
        """The packed rewards."""
        ...

    @property
    def environment_path(self) -> Path | None:
        """The packed environment, if there is one."""
        ...

    def split(self, *, validation: bool) -> Sides:
        """How the tasks divide."""
        ...


def row(index: int) -> Where:
    """The place of a workload's task."""
    return Where(row=index + 1)


@dataclass(frozen=True, slots=True)
class Work:
    """``field`` is what complaints about the tasks name, ``place`` where one of them stands.

    A prompt must leave ``least_reply`` tokens for a reply.
    """

    tasks: Tasks
    field: str = "tasks"
    place: Place = row
    least_reply: int = 1


def work_of(store: Store, plan: ResolvedPlan, folder: Path, *, rank: int = 0) -> Work:
    """What ``plan`` trains on. Reward terms are packed into ``folder``, a file for each rank.

    Raises ``NotFound`` when a workload is gone, ``Refused`` when a dataset or bundle is, or is not
    what was registered.
    """
    if plan.door == "options":
        return Work(Catalog(store).workload(plan.workload.workload_id))
    from nbtrain.data.datasets import DatasetRegistry
    from nbtrain.data.tasks import DatasetTasks
    from nbtrain.rewards.terms import pack_terms

    assert plan.dataset is not None, "a descriptor names its dataset"
    assert plan.reward is not None, "a descriptor of this method has a reward"
    try:
        dataset = DatasetRegistry(store).get(plan.dataset.dataset_id).verify()
    except NotFound as error:
        raise Refused([Problem("dataset", str(error))]) from error
    name = plan.dataset.name or dataset.name or plan.dataset.dataset_id[:12]
    packed = folder / f"rewards{rank or ''}.pkl"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    packed.write_bytes(pack_terms(plan.reward["terms"], store))
    packed.chmod(0o600)
    return Work(
        DatasetTasks(dataset, rewards_path=packed),
        field="dataset",
        place=lambda index: Where(line=dataset.line_of(index), source=name),
        least_reply=plan["max_output_tokens_per_turn"],
    )
