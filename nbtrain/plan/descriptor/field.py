"""One field of the run descriptor: where it stands, its option, and what it is called elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from nbtrain.plan.fields import Group, Option, Type

Part = Literal["reference", "config", "execution", "smoke", "annotation"]
SUPERVISED: tuple[str, ...] = ("sft",)
REINFORCEMENT: tuple[str, ...] = ("grpo", "gspo")
METHODS = (*SUPERVISED, *REINFORCEMENT)


@dataclass(frozen=True, slots=True)
class Field:
    """A field: its full dotted camelCase ``path`` and the ``option`` that checks its value.

    ``option.name`` is what refusals call it, by its group: ``optimizer.weightDecay``. ``setting``
    is its name in the flat form and among a supervised run's settings, ``rl_setting`` the option
    of a reinforcement run that it becomes; ``None`` where there is none. Zero means the default,
    unless ``keeps_zero``. ``by_verl`` marks what only that engine can honour.

    Only ``part`` "config" is hashed; "execution" is recorded, a "reference" names something, an
    "annotation" can be changed later.
    """

    path: str
    option: Option
    part: Part
    setting: str | None = None
    rl_setting: str | None = None
    methods: tuple[str, ...] = METHODS
    keeps_zero: bool = False
    by_verl: bool = False
    looked_up: bool = False
    """It names something registered; its value is checked by the lookup."""
    owner: str = field(init=False)
    """The dotted path of the group that it stands in; empty at the top."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "owner", self.path.rpartition(".")[0])

    @property
    def name(self) -> str:
        """What refusals call it."""
        return self.option.name

    @property
    def key(self) -> str:
        """Its own key, the end of the path."""
        return self.path.rpartition(".")[2]


def short(path: str) -> str:
    """What refusals call a path: without ``config`` and, in a group of it, ``hyperparams``."""
    path = path.removeprefix("config.").removeprefix("hyperparams.")
    inner = path.removeprefix("rlHyperparams.")
    return inner if inner.split(".")[0] in ("lora", "optimizer", "scheduler") else path


def make(
    path: str,
    kind: Type,
    text: str,
    group: Group,
    default: Any = None,
    *,
    part: Part = "config",
    setting: str | None = None,
    rl_setting: str | None = None,
    methods: tuple[str, ...] = METHODS,
    keeps_zero: bool = False,
    by_verl: bool = False,
    looked_up: bool = False,
    **more: Any,
) -> Field:
    """A field with its option; ``more`` are further fields of the option."""
    option = Option(
        short(path), kind, text, group, default,
        zero_default=kind in ("integer", "number") and not keeps_zero,
        hashed="always" if part == "config" else "never",
        inherited=part in ("config", "execution"), **more,
    )  # fmt: skip
    return Field(path, option, part, setting, rl_setting, methods, keeps_zero, by_verl, looked_up)
