"""``client.models``: the adapters that completed runs left, registered as models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from nbtrain.client.listing import Listing
from nbtrain.client.parts import Part
from nbtrain.client.refusals import refuse
from nbtrain.errors import NotFound, Refused

if TYPE_CHECKING:
    from nbtrain.client.parts import Parts
    from nbtrain.client.run import Run
    from nbtrain.store import Row, Store

__all__ = ["Adapter", "ModelItem", "Models", "adapter"]

_LORA = ("lora_rank", "lora_alpha", "lora_target_modules")


@dataclass(frozen=True)
class Adapter:
    """A registered adapter as the plan sees it (``plan.registry.AdapterInfo``)."""

    model_id: str
    name: str | None
    base_model_slug: str
    base_fingerprint: str
    config_hash: str
    weights_digest: str
    path: str
    lora: Mapping[str, Any]


def adapter(store: Store, ref: object) -> Adapter:
    """The model that a name, an id, a prefix or a model object means. Raises :class:`NotFound`."""
    row, name = _find(store, ref)
    settings = store.run(row["run"]).resolved.get("settings", {})
    same = ("model_id", "base_model_slug", "base_fingerprint", "config_hash", "weights_digest")
    return Adapter(
        **{column: row[column] for column in same},
        name=name,
        path=row["path"],
        lora={option: settings[option]["value"] for option in _LORA if option in settings},
    )


def _find(store: Store, ref: object) -> tuple[Row, str | None]:
    """The row of a model, and the name it goes by."""
    ref = getattr(ref, "model_id", ref)
    row = store.model(ref) if isinstance(ref, str) else None
    if row is None:
        raise _unknown(store, ref)
    names = [name for name, id_ in store.aliases("model").items() if id_ == row["model_id"]]
    return row, str(ref) if ref in names else next(iter(names), None)


def _unknown(store: Store, ref: object) -> NotFound:
    from nbtrain.store import unknown

    names = list(store.aliases("model"))
    return unknown(ref, "model", names or [row["model_id"][:12] for row in store.models()])


@dataclass(frozen=True)
class ModelItem:
    """A registered adapter. ``step`` is the global step of its run at which it was saved."""

    model_id: str
    name: str | None
    run_id: str
    run_name: str | None
    base_model_slug: str
    method: str
    step: int | None
    workload: str | None
    config_hash: str
    created_at: float
    path: str
    checkpoint_id: str
    note: str | None = None
    """What happened when it was named: that the name meant another before."""

    @property
    def id(self) -> str:
        """The same as ``model_id``."""
        return self.model_id

    def to_row(self) -> dict[str, Any]:
        """The model as one row of a table."""
        names = ("model_id", "name", "run_name", "run_id", "base_model_slug", "method", "step",
                 "workload", "created_at", "config_hash")  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelItem) and other.model_id == self.model_id

    def __hash__(self) -> int:
        return hash(self.model_id)

    def __repr__(self) -> str:
        called = f"{self.name} " if self.name else ""
        step = "" if self.step is None else f", step {self.step:,}"
        return (
            f"<Model {called}{self.model_id[:12]}: {self.method} on "
            f"{self.base_model_slug}{step} of run {self.run_name or self.run_id[:12]}>"
            + (f"\n{self.note}" if self.note else "")
        )


class Models(Part):
    """``client.models``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def list(self, training_run_id: Run | str | None = None) -> Listing[ModelItem]:
        """Registered models, newest first; of one run where it is stated."""
        run = None if training_run_id is None else self._parts.run(training_run_id)._key
        names = {id_: name for name, id_ in reversed(self._parts.store.aliases("model").items())}
        rows = self._parts.store.models(run)
        columns = ("model_id", "name", "run_name", "base_model_slug", "method", "step")
        return Listing([self._item(row, names.get(row["model_id"])) for row in rows], columns)

    def get(self, ref: object) -> ModelItem:
        """The model that a name, an id or a prefix means.

        Raises :class:`NotFound`, and :class:`AmbiguousReference` for a prefix of several.
        """
        return self._item(*_find(self._parts.store, ref))

    def name(self, name: str, ref: object) -> ModelItem:
        """Let ``name`` mean this model from now on; it may have meant another.

        Raises :class:`Refused` for what cannot be a name.
        """
        from nbtrain.store import moved, name_problems

        problems = name_problems("model", name)
        if problems:
            raise Refused(problems)
        item = self.get(ref)
        before = self._parts.store.move_alias("model", name, item.model_id)
        return replace(item, name=name, note=moved(name, before, item.model_id))

    def export(self, *_: Any, **__: Any) -> NoReturn:
        """Refused by name."""
        refuse("client.models.export", "PEFT loads a model's .path as it is")

    def register(self, *_: Any, **__: Any) -> NoReturn:
        """Refused by name."""
        refuse("client.models.register", "a completed run registers its adapter by itself")

    def _item(self, row: Row, name: str | None) -> ModelItem:
        store = self._parts.store
        run = store.run(row["run"])
        saved = [c.step for c in store.checkpoints(run.key, superseded=True)
                 if c.checkpoint_id == row["checkpoint_id"]]  # fmt: skip
        return ModelItem(
            model_id=row["model_id"],
            name=name,
            run_id=run.run_id,
            run_name=run.name,
            base_model_slug=row["base_model_slug"],
            method=run.method,
            step=saved[0] if saved else None,
            workload=run.workload_name or run.workload_id[:12],
            config_hash=row["config_hash"],
            created_at=row["created_at"],
            path=row["path"],
            checkpoint_id=row["checkpoint_id"],
        )
