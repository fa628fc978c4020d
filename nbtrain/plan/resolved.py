"""The resolved plan: everything a run trains under, each value with its origin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from nbtrain.plan.descriptor.table import setting_names

Origin = Literal["stated", "default", "computed", "inherited", "small"]


@dataclass(frozen=True, slots=True)
class Setting:
    """One option's value, where it came from, and a note where the value needs explaining."""

    name: str
    value: Any
    origin: Origin
    note: str | None = None


@dataclass(frozen=True, slots=True)
class WorkloadRef:
    """The workload a plan trains on: content hash, name, and how its tasks are split.

    ``train_digest`` is the SHA-256 over the ids of the tasks that will train; it is hashed,
    so moving a task between the sides makes another recipe.
    """

    workload_id: str
    name: str | None
    train_tasks: int
    held_out_tasks: int
    split: str
    train_digest: str


@dataclass(frozen=True, slots=True)
class BaseModelRef:
    """The base model: its slug, its source, and the fingerprint that checkpoints must match."""

    slug: str
    kind: Literal["embedded", "folder", "repository", "gguf"]
    location: str
    fingerprint: str
    max_context: int


@dataclass(frozen=True, slots=True)
class ParentRef:
    """The checkpoint a run goes on from. ``step`` is the global step it was saved at."""

    checkpoint_id: str
    run_id: str
    step: int
    path: str


@dataclass(frozen=True, slots=True)
class DatasetRef:
    """A registered dataset: content hash, the name it was asked for by, number of rows."""

    dataset_id: str
    name: str | None
    rows: int


@dataclass(frozen=True, slots=True)
class ModelRef:
    """A registered adapter that a reinforcement run starts from; ``path`` is its folder."""

    model_id: str
    name: str | None
    config_hash: str
    weights_digest: str
    path: str


@dataclass(frozen=True, slots=True)
class SmokeRef:
    """A smoke check: rows from the start, a cap on updates, the score a working run reaches."""

    slice_size: int
    max_steps: int
    threshold: float


@dataclass(frozen=True, slots=True)
class ResolvedPlan:
    """What the run will really train under.

    ``start_step`` is the restored global step (0 for a fresh run or ``load_weights_only``) and
    ``total_steps`` the global step at which the run ends: ``start_step + num_steps``.

    ``door`` tells how it was stated. A descriptor's plan also has its ``dataset``, ``reward`` (the
    terms with their bundles' hashes) and ``grader`` (for evaluations); ``settings`` has the
    options of a reinforcement run under their own names whatever the door, and those of a
    supervised run under the snake_case names of the descriptor's fields.
    """

    settings: Mapping[str, Setting]
    workload: WorkloadRef
    base_model: BaseModelRef
    parent: ParentRef | None
    display_name: str | None
    start_step: int
    total_steps: int
    config_hash: str
    admission: Literal["filtered", "as_graded"] = "filtered"
    hints: tuple[str, ...] = field(default=())
    door: Literal["options", "descriptor"] = "options"
    dataset: DatasetRef | None = None
    validation_dataset: DatasetRef | None = None
    reward: Mapping[str, Any] | None = None
    grader: str | None = None
    warm_start: ModelRef | None = None
    smoke: SmokeRef | None = None
    config: Mapping[str, Any] | None = None
    """The descriptor's ``config`` as resolved and hashed, nested and camelCase."""
    execution: Mapping[str, Any] | None = None
    """The descriptor's ``execution`` as resolved; recorded, not hashed."""
    field_origins: Mapping[str, Origin] | None = None
    """Origin of every field of a descriptor, by its full dotted path."""
    description: str | None = None
    config_name: str | None = None
    submission_id: str | None = None
    flat: bool = False
    """Stated as a supervised run's options, which are called by their settings' names."""

    def called(self, setting: str) -> str:
        """What a setting is called where the plan was stated."""
        if self.flat or self.door == "options":
            return setting
        return setting_names(self.method).get(setting, setting)

    @property
    def method(self) -> str:
        """``gspo``, ``grpo`` or ``sft``."""
        return str(self["algorithm"])

    def __getitem__(self, name: str) -> Any:
        """The value of the option ``name``. Raises ``KeyError`` for a name that is no option."""
        return self.settings[name].value

    @property
    def origins(self) -> dict[str, Origin]:
        """Origin of each option by name."""
        return {name: setting.origin for name, setting in self.settings.items()}

    @property
    def options(self) -> dict[str, Any]:
        """Value of each option by name."""
        return {name: setting.value for name, setting in self.settings.items()}

    def to_json(self) -> dict[str, Any]:
        """A strict-JSON mapping from which :meth:`from_json` rebuilds an equal plan."""
        return {
            "settings": {
                s.name: {"value": s.value, "origin": s.origin}
                | ({"note": s.note} if s.note else {})
                for s in self.settings.values()
            },
            "workload": _fields(self.workload),
            "base_model": _fields(self.base_model),
            "parent": _fields(self.parent) if self.parent else None,
            "display_name": self.display_name,
            "start_step": self.start_step,
            "total_steps": self.total_steps,
            "config_hash": self.config_hash,
            "admission": self.admission,
            "hints": list(self.hints),
            "door": self.door,
            **({"flat": True} if self.flat else {}),
            **{name: _fields(ref) for name in _REFS if (ref := getattr(self, name)) is not None},
            **{name: v for name in _OWN if (v := getattr(self, name)) is not None},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ResolvedPlan:
        """The plan that :meth:`to_json` wrote."""
        return cls(
            settings={
                name: Setting(name, s["value"], s["origin"], s.get("note"))
                for name, s in data["settings"].items()
            },
            workload=WorkloadRef(**data["workload"]),
            base_model=BaseModelRef(**data["base_model"]),
            parent=ParentRef(**data["parent"]) if data["parent"] else None,
            display_name=data["display_name"],
            start_step=data["start_step"],
            total_steps=data["total_steps"],
            config_hash=data["config_hash"],
            admission=data["admission"],
            hints=tuple(data["hints"]),
            door=data.get("door", "options"),
            flat=data.get("flat", False),
            **{name: kind(**data[name]) for name, kind in _REFS.items() if data.get(name)},
            **{name: data[name] for name in _OWN if name in data},
        )


_REFS: dict[str, Any] = {
    "dataset": DatasetRef,
    "validation_dataset": DatasetRef,
    "warm_start": ModelRef,
    "smoke": SmokeRef,
}
_OWN = (
    "reward", "grader", "config", "execution", "field_origins", "description", "config_name",
    "submission_id",
)  # fmt: skip


def _fields(ref: Any) -> dict[str, Any]:
    return {name: getattr(ref, name) for name in ref.__slots__}
