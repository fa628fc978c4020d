"""What ``client.training.list_options`` returns: each model's options, bounds and defaults."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from nbtrain.plan.fields import Mode, Option, Type
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.registry import BaseModelInfo


@dataclass(frozen=True, slots=True)
class OptionInfo:
    """One option as a model offers it in one mode.

    ``default`` is null where ``default_kind`` is ``computed``: left out, the option is computed.
    ``min`` and ``max`` are null where there is no bound; with ``exclusive_min`` the value must lie
    above ``min``. ``choices`` are those of the model. ``group`` is the heading that the option
    stands under.
    """

    name: str
    type: Type
    min: int | float | None
    max: int | float | None
    default: Any
    default_kind: Literal["fixed", "computed"]
    choices: tuple[str, ...] | None
    description: str
    origin: Literal["seed", "extension"]
    group: str
    exclusive_min: bool = False


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """A base model and the options that it offers in one mode, in the order of the table."""

    base_model_slug: str
    options: tuple[OptionInfo, ...]


@dataclass(frozen=True, slots=True)
class OptionCatalog:
    """The models of a listing: iterable, ``len``, ``.models`` and ``.items`` (the same list)."""

    models: list[ModelOptions]
    mode: Mode

    @property
    def items(self) -> list[ModelOptions]:
        """The models, as every listing has them."""
        return self.models

    def __iter__(self) -> Iterator[ModelOptions]:
        return iter(self.models)

    def __len__(self) -> int:
        return len(self.models)

    def rows(self) -> list[dict[str, Any]]:
        """One flat row per model and option, for a frame."""
        return [
            {"base_model_slug": model.base_model_slug, **asdict(option)}
            for model in self.models
            for option in model.options
        ]


def list_options(models: Iterable[BaseModelInfo], mode: Mode = "training") -> OptionCatalog:
    """The catalog of ``models`` for ``training`` or for a standalone ``evaluation``.

    Raises ``ValueError`` for another mode.
    """
    listed = [ModelOptions(model.slug, tuple(model_options(model, mode))) for model in models]
    return OptionCatalog(listed, mode)


def model_options(model: BaseModelInfo | None, mode: Mode = "training") -> list[OptionInfo]:
    """The options of one model (``None``: with the general bounds), in the order of the table."""
    if mode not in ("training", "evaluation"):
        msg = f"mode is training or evaluation, found {mode!r}"
        raise ValueError(msg)
    return [_info(option, model, mode) for option in OPTIONS.values() if mode in option.modes]


def _info(option: Option, model: BaseModelInfo | None, mode: Mode) -> OptionInfo:
    computed = option.computed
    if mode == "evaluation" and option.evaluation_default:
        computed = option.evaluation_default
    description = option.help
    if computed:
        description += f" Left out: {computed}."
    return OptionInfo(
        name=option.name,
        type=option.type,
        min=option.min,
        max=option.upper(model),
        default=None if computed else option.default,
        default_kind="computed" if computed else "fixed",
        choices=option.offered(model),
        description=description,
        origin=option.origin,
        group=option.group,
        exclusive_min=option.above_min,
    )
