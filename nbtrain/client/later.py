"""What a run will be able to do: refused by name, and not offered by completion."""

from __future__ import annotations

from typing import Any, NoReturn

from nbtrain.client.refusals import refuse

__all__ = ["NotYet"]

_GO_ON = (
    "A new run goes on from a checkpoint: %%train --from CHECKPOINT, in Python "
    "client.training.create(parent_checkpoint_id=…)"
)


class NotYet:
    """The methods of a run that have a name already and raise :class:`NotBuiltYet`."""

    def pause(self, *_: Any, **__: Any) -> NoReturn:
        """Refused by name."""
        refuse("Run.pause", "run.cancel() keeps the checkpoints. " + _GO_ON)

    def resume(self, *_: Any, **__: Any) -> NoReturn:
        """Refused by name."""
        refuse("Run.resume", _GO_ON)

    def branch(self, *_: Any, **__: Any) -> NoReturn:
        """Refused by name."""
        refuse("Run.branch", _GO_ON)

    def evaluate(self, *_: Any, **__: Any) -> NoReturn:
        """Refused by name."""
        refuse("Run.evaluate")

    def __dir__(self) -> list[str]:
        """What this version has."""
        return [name for name in super().__dir__() if name not in _LATER]


_LATER = frozenset(name for name in vars(NotYet) if not name.startswith("_"))
