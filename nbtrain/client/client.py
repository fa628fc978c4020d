"""The front door for programs: ``Client``."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.client.listing import Listing, Pages
from nbtrain.client.parts import Part, Parts
from nbtrain.client.records import TrajectoryItem
from nbtrain.client.refusals import Later
from nbtrain.client.run import Run

if TYPE_CHECKING:
    from nbtrain.client.bundles import Bundles
    from nbtrain.client.datasets import Datasets
    from nbtrain.client.known import Known
    from nbtrain.client.models import Models
    from nbtrain.client.training import Training
    from nbtrain.client.workloads import Workloads

__all__ = ["BaseModels", "Client", "Trajectories"]


class Client(Part):
    """Everything nbtrain can do, for programs and notebooks.

    ``home`` is the folder for data (default: ``$NBTRAIN_HOME``, else the platform's user data
    folder), ``store_url`` another database (default: ``$NBTRAIN_STORE_URL``). Nothing is opened
    before it is needed.
    """

    def __init__(self, home: str | Path | None = None, store_url: str | None = None) -> None:
        self._parts = Parts(home, store_url)
        self.evaluations = Later("client.evaluations")

    @cached_property
    def training(self) -> Training:
        """Options, plans, runs, rewards and checkpoints."""
        from nbtrain.client.training import Training

        return Training(self._parts)

    @cached_property
    def trajectories(self) -> Trajectories:
        """Single attempts and their texts."""
        return Trajectories(self._parts)

    @cached_property
    def workloads(self) -> Workloads:
        """What can be trained on."""
        from nbtrain.client.workloads import Workloads

        return Workloads(self._parts)

    @cached_property
    def datasets(self) -> Datasets:
        """Chat rows that descriptors name."""
        from nbtrain.client.datasets import Datasets

        return Datasets(self._parts)

    @cached_property
    def bundles(self) -> Bundles:
        """Python modules that score."""
        from nbtrain.client.bundles import Bundles

        return Bundles(self._parts)

    @cached_property
    def models(self) -> Models:
        """The adapters that completed runs left."""
        from nbtrain.client.models import Models

        return Models(self._parts)

    @cached_property
    def known(self) -> Known:
        """What can be named, for completion."""
        from nbtrain.client.known import Known

        return Known(self._parts)

    @cached_property
    def base_models(self) -> BaseModels:
        """What can be trained."""
        return BaseModels(self._parts)


class Trajectories(Part):
    """``client.trajectories``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def list(
        self,
        training_run_id: Run | str,
        step: int | None = None,
        limit: int | None = None,
        after: str | None = None,
        *,
        split: str | None = None,
    ) -> Pages[TrajectoryItem]:
        """Trajectories of a run, oldest first, read page by page; their texts when asked for.

        ``step`` narrows to one step, ``split`` to ``train`` or ``held_out``; ``after`` is the
        ``trajectory_id`` to go on after, ``limit`` the largest number of items.
        Raises :class:`~nbtrain.errors.Refused` for a step or a limit that is no whole number from
        0 on.
        """
        from nbtrain.client.pages import trajectory_pages
        from nbtrain.client.whole import whole_numbers

        step, limit = whole_numbers(step=step, limit=limit)
        run = self._parts.run(training_run_id)
        return trajectory_pages(
            self._parts.store, run._key, run.id, step=step, split=split, limit=limit, after=after
        )


class BaseModels(Part):
    """``client.base_models``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def list(self) -> Listing[BaseModelItem]:
        """The embedded model and those that were selected."""
        return Listing([BaseModelItem(m) for m in self._parts.registry.base_models()])

    def get(self, base_model_slug: str) -> BaseModelItem:
        """The base model of this slug. Raises :class:`NotFound`."""
        return BaseModelItem(self._parts.registry.base_model(base_model_slug))

    def select(self, path: str | Path, name: str | None = None) -> BaseModelItem:
        """Make a local folder, a GGUF file or a repository trainable under ``name``.

        The name defaults to the path's last part.

        Raises :class:`Refused` with every reason it cannot be trained.
        """
        path = str(path)
        name = name or Path(path).name.removesuffix(".gguf")
        return BaseModelItem(self._parts.catalog.select_base_model(path, name))


class BaseModelItem:
    """A base model; its attributes are the catalog's, ``base_model_slug`` and ``slug`` its name."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.base_model_slug: str = model.slug
        self.slug: str = model.slug

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._model, name)

    def to_row(self) -> dict[str, Any]:
        """The model as one row of a table."""
        names = ("kind", "max_context", "precision", "parameters", "fingerprint", "location")
        return {"base_model_slug": self.slug, **{n: getattr(self._model, n, None) for n in names}}

    def __repr__(self) -> str:
        return f"<base model {self.slug}, context {self._model.max_context:,}>"
