"""``client.workloads`` and :func:`workload`: what can be trained on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from nbtrain.client.building import HELD_OUT, build
from nbtrain.client.listing import Listing, Unreadable, readable
from nbtrain.client.parts import Part
from nbtrain.errors import NotFound, Problem, Refused
from nbtrain.plan.fields import plain

if TYPE_CHECKING:
    from nbtrain.catalog import DatasetName, Workload
    from nbtrain.client.parts import Parts

__all__ = ["WorkloadItem", "Workloads"]


class WorkloadItem:
    """A registered workload. ``id`` is its content hash and serves as ``bench_id``.

    The name is an alias that may move on to another content; the object does not.
    """

    def __init__(self, workload: Workload, note: str | None = None) -> None:
        self._workload = workload
        self.note = note
        """What happened when it was registered: that the name meant something else before."""
        self.id: str = workload.workload_id
        self.workload_id: str = workload.workload_id
        self.name: str | None = workload.name
        self.base_model: str | None = workload.base_model
        self.raw: bool = workload.raw
        self.reward_names: list[str] = workload.reward_names
        environment = workload.environment_identity
        self.environment: str | None = None if environment is None else environment["name"]
        """The environment's name; ``None`` where replies are answered by nothing."""
        self.has_tasks: bool = workload.has_tasks
        """Whether it has tasks of its own; without them descriptors train it on datasets."""
        found = workload.dataset
        self.dataset: str | None = None if found is None else found.name or found.dataset_id
        """Name, else id, of the dataset that belongs to it."""
        self.grader: str | None = workload.grader
        """The grader of its evaluations."""

    def tasks(self) -> list[Any]:
        """Every task that may train or be split off."""
        return list(self._workload.tasks())

    def held_out_tasks(self) -> list[Any]:
        """The stated held-out tasks."""
        return list(self._workload.held_out_tasks())

    def to_row(self) -> dict[str, Any]:
        """The workload as one row of a table."""
        split = self._workload.split_info(validation=True) if self.has_tasks else None
        return {
            "name": self.name,
            "workload_id": self.id,
            "train": split.train if split else 0,
            "held_out": split.held_out if split else 0,
            "split": split.description if split else "no tasks of its own",
            "rewards": ", ".join(self.reward_names),
            "environment": self.environment,
            "base_model": self.base_model,
            "raw": self.raw,
            "dataset": self.dataset,
            "grader": self.grader,
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WorkloadItem) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        told = ["no tasks of its own"]
        if self.has_tasks:
            row = self.to_row()
            told = [f"{row['train']:,} tasks train, {row['held_out']:,} held out"]
            told.append(f"rewards {row['rewards']}")
        beside = {
            "environment": self.environment,
            "base model": self.base_model,
            "dataset": self.dataset,
            "grader": self.grader,
        }
        told += [f"{word} {value}" for word, value in beside.items() if value]
        note = f"\n{self.note}" if self.note else ""
        called = f"{self.name} " if self.name else ""
        return f"<Workload {called}{self.id[:12]}: {', '.join(told)}>{note}"


class Workloads(Part):
    """``client.workloads``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def create(
        self,
        name: str,
        *,
        tasks: object = None,
        rewards: object = None,
        environment: object = None,
        base_model: Any = None,
        held_out: object = HELD_OUT,
        raw: bool = False,
        dataset: object = None,
        grader: object = None,
    ) -> WorkloadItem:
        """Register a workload and let ``name`` mean it.

        ``tasks`` is a DataFrame or a list of dicts with a ``prompt`` column (chat messages, or
        text) and the columns that the rewards read. ``rewards`` is a reward, or a list of
        rewards and ``(reward, weight)``. ``environment`` is a class, or a factory without
        arguments, that answers the model between its turns
        (:mod:`nbtrain.environments.contract` says what it may look like); with one, ``rewards``
        may be left out, and the environment's own reward counts. ``held_out`` is the fraction of
        prompts that never trains, or those tasks themselves. With ``raw`` no chat template is
        applied. ``dataset`` is a registered dataset that belongs to it, ``grader`` what its
        evaluations grade with (``json-label-match``, ``model:ID``, ``http:URL`` or
        ``bundle:REF#MODULE[:FUNCTION]``). Without ``tasks`` it is a bare workload, for
        descriptors, which bring their own dataset. Raises :class:`Refused` with every problem at
        once.
        """
        from nbtrain.store import moved

        problems: list[Problem] = []
        known = self._dataset(dataset, problems)
        problems += _grader_problems(grader)
        spec = self._build(
            problems,
            name=name,
            tasks=tasks,
            rewards=rewards,
            environment=environment,
            base_model=base_model,
            held_out=held_out,
            raw=raw,
            dataset=known,
            grader=None if grader is None else str(grader),
        )
        before = self._parts.store.alias("workload", name)
        made = self._parts.catalog.register_workload(spec)
        return WorkloadItem(made, moved(name, before, made.workload_id))

    @staticmethod
    def _build(problems: list[Problem], **parts: Any) -> Any:
        """The checked workload; what is wrong with its parts joins ``problems``."""
        try:
            spec = build(**parts)
        except Refused as error:
            raise Refused([*error.problems, *problems]) from None
        if problems:
            raise Refused(problems)
        return spec

    def _dataset(self, ref: object, problems: list[Problem]) -> DatasetName | None:
        from nbtrain.catalog import DatasetName

        if ref is None:
            return None
        try:
            found = self._parts.registry.dataset(ref)
        except Refused as error:
            problems += error.problems
        except NotFound as error:
            problems.append(Problem("dataset", f"dataset: {error}", plain(ref)))
        else:
            return DatasetName(found.dataset_id, found.name)
        return None

    def get(self, ref: object) -> WorkloadItem:
        """The workload that a name, an id or a prefix means. Raises :class:`NotFound`."""
        return WorkloadItem(self._parts.registry.workload(ref))

    def sample(self, name: str = "sums") -> WorkloadItem:
        """The sample workload of this name. Raises ``KeyError`` for a name that is no sample."""
        return WorkloadItem(self._parts.catalog.sample(name))

    def list(self) -> Listing[WorkloadItem | Unreadable]:
        """Every named workload, the one named last first, then the samples.

        One that cannot be read, as another version wrote it, stands there with a note.
        """
        ids = self._parts.store.aliases("workload")
        return Listing(
            [
                readable("workload", ids.get(name, ""), name, partial(self.get, name))
                for name in self._parts.catalog.workload_names()
            ],
            ("name", "workload_id", "train", "held_out", "base_model"),
        )


def _grader_problems(grader: object) -> Sequence[Problem]:
    from nbtrain.plan.graders import parse_grader

    try:
        if grader is not None:
            parse_grader(grader)
    except Refused as error:
        return error.problems
    return ()
