"""What completion can name: words of tables, registered names and ids, the user's variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nbtrain.plan.fields import Option, as_python
from nbtrain.plan.graders import DEFAULT_GRADER

if TYPE_CHECKING:
    from nbtrain.client.known import Known

__all__ = ["LONGEST", "MOST", "NAMED", "Offer", "Words", "World", "matching", "type_of"]

MOST = 100
"""Offers at one place."""
LONGEST = 16
"""Characters of an offer's type: a front end prints it in a narrow column beside the offer."""

Words = Iterable[tuple[str, str]]
"""Words with their types."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A text that replaces what is typed, and its type in a word or two."""

    text: str
    type: str


@dataclass(frozen=True, slots=True)
class World:
    """What names come from: the client's cheap lists and the user's variables."""

    known: Callable[[], Known]
    names: Mapping[str, object]
    typed: str = ""
    """What is typed of the word, without its quote: lists are searched by it before they are cut
    short."""

    def of(self, kind: str) -> Iterator[tuple[str, str]]:
        """What can be named as a thing of this kind."""
        if kind == "run":
            yield from self.known().runs(self.typed)
        elif kind == "checkpoint":
            yield from self.known().checkpoints(self.typed)
        elif kind == "run or checkpoint":
            yield from self.known().runs(self.typed)
            yield from self.known().checkpoints(self.typed)
        elif kind == "grader":
            yield DEFAULT_GRADER, "grader"
            for name, _ in self.known().names("bundle", self.typed.removeprefix("bundle:")):
                yield f"bundle:{name}#", "grader"
        elif kind in _CLASSES:
            yield from self.known().names(kind, self.typed)  # type: ignore[arg-type]

    def variables(self, kind: str) -> Iterator[tuple[str, str]]:
        """The user's variables that hold a thing of this kind, as ``$name``."""
        for name in self.names:
            value = self.names[name]
            if _fits(value, kind):
                yield f"${name}", type(value).__name__


_CLASSES = {
    "run": ("Run",), "checkpoint": ("Checkpoint",), "run or checkpoint": ("Run", "Checkpoint"),
    "workload": ("WorkloadItem",), "dataset": ("DatasetItem",), "base model": ("BaseModelItem",),
    "model": ("ModelItem",), "bundle": ("BundleItem",),
}  # fmt: skip
"""The client's classes by kind; not imported, since a variable's own class tells its name."""

NAMED = {
    "workload": "workload", "base_model_slug": "base model", "parent_checkpoint_id": "checkpoint",
    "dataset": "dataset", "validation_dataset": "dataset", "display_name": "run name",
    "baseModel": "base model", "config.dataset": "dataset", "warmStartModelId": "model",
    "config.data.validationDataset": "dataset", "grader": "grader", "bundle": "bundle",
}  # fmt: skip
"""Keys of a body, and fields of a descriptor, whose value names something."""


def _fits(value: object, kind: str) -> bool:
    if kind in _CLASSES:
        whose = type(value)
        return whose.__module__.startswith("nbtrain.") and whose.__name__ in _CLASSES[kind]
    value = as_python(value)
    if kind == "boolean" or isinstance(value, bool):
        return kind == "boolean" and isinstance(value, bool)
    if kind in ("integer", "number"):
        return isinstance(value, int | float)
    return kind in ("text", "run name") and isinstance(value, str)


def type_of(option: Option) -> str:
    """The type of an option's key."""
    return "choice" if option.choices else option.type


def _short(told: str) -> str:
    """What is told of an offer as its type: one line of at most :data:`LONGEST` characters.

    The first letter of it is what a front end makes a badge of.
    """
    text = " ".join(told.split())
    return text if len(text) <= LONGEST else text[: LONGEST - 1].rstrip() + "…"


def matching(typed: str, words: Words) -> list[tuple[str, str]]:
    """Words that begin with what is typed, else those that contain it; each once."""
    known = dict(reversed([*words]))
    known = dict(reversed(known.items()))
    found = [item for item in known.items() if item[0].startswith(typed)]
    if not found and len(typed) > 1:
        low = typed.lower()
        found = [item for item in known.items() if low in item[0].lower()]
    return [(word, _short(told)) for word, told in found[:MOST]]
