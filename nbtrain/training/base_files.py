"""The base model's files: whether they are still those of the plan, and can be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nbtrain.catalog import Catalog
from nbtrain.errors import NbtrainError, NotFound, Problem, Refused, StartChecksFailed, first_line
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.store import Store
from nbtrain.training.exhausted import is_exhausted
from nbtrain.training.prepare_model import weights_folder

__all__ = ["base_folder", "loading"]


def base_folder(store: Store, plan: ResolvedPlan) -> tuple[Path | None, list[Problem]]:
    """The folder that the base model is loaded from, and what is wrong with its files.

    ``None`` where there is nothing to load from. A model that was converted or downloaded stands
    under its fingerprint; one of the user's own may have changed since the plan was made.
    """
    base = plan.base_model
    own = base.kind in ("embedded", "folder")
    try:
        folder = weights_folder(plan, store.home)
    except NotFound as error:
        said = f"the base model's folder is gone: {base.location}" if own else str(error)
        return None, [_problem(plan, said)]
    if not own:
        return folder, []
    changed = f"the base model's files have changed since the plan was checked: {folder}"
    allowed = f"fingerprint {base.fingerprint[:12]}"
    try:
        found = Catalog(store).base_model(base.location).fingerprint
    except Refused as error:
        wrong = "; ".join(problem.message for problem in error.problems)
        return folder, [_problem(plan, f"{changed}: {wrong}", None, allowed)]
    except (NbtrainError, OSError) as error:
        return folder, [_problem(plan, f"{changed}: {error}", None, allowed)]
    if found == base.fingerprint:
        return folder, []
    return folder, [_problem(plan, changed, found[:12], allowed)]


@contextmanager
def loading(plan: ResolvedPlan, what: str) -> Iterator[None]:
    """Raise :class:`StartChecksFailed` for whatever a library raises over damaged files.

    ``what`` of the base model is loaded. Memory that runs out, and what has a sentence of its own,
    goes through as it is.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, NbtrainError) or is_exhausted(error):
            raise
        said = f"{what} of {plan.base_model.slug} cannot be loaded: {type(error).__name__}: "
        raise StartChecksFailed([_problem(plan, said + first_line(error))]) from error


def _problem(
    plan: ResolvedPlan, message: str, found: str | None = None, allowed: str | None = None
) -> Problem:
    field = "base_model_slug" if plan.door == "options" else "baseModel"
    return Problem(field, message, found=found, allowed=allowed)
