"""What the parts of a client share."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from nbtrain.client.refusals import Later
from nbtrain.client.run import Run
from nbtrain.errors import NotFound
from nbtrain.plan.fields import describe

if TYPE_CHECKING:
    from nbtrain.catalog import Catalog
    from nbtrain.client.registry import ClientRegistry
    from nbtrain.client.side import SideProcess
    from nbtrain.data.datasets import DatasetRegistry
    from nbtrain.rewards.bundles import BundleRegistry
    from nbtrain.store import Store

__all__ = ["Part", "Parts"]


class Part:
    """A part of a client, or the client itself: shown, it names what it offers."""

    def __repr__(self) -> str:
        offers = [name for name in dir(self) if not name.startswith("_")]
        built = [name for name in offers if not isinstance(vars(self).get(name), Later)]
        return f"<{type(self).__name__}: {', '.join(built)}>"


class Parts:
    """What the parts of a client share; the store is opened when first needed."""

    def __init__(self, home: str | Path | None, url: str | None) -> None:
        self._home = home
        self._url = url

    @cached_property
    def store(self) -> Store:
        """The store."""
        from nbtrain.store import open_store, usable_path

        home = None if self._home is None else usable_path(self._home, "home")
        return open_store(home, self._url)

    @cached_property
    def catalog(self) -> Catalog:
        """Workloads and base models."""
        from nbtrain.catalog import CALCULATOR, SUMS, SUPPORT_TRIAGE, Catalog
        from nbtrain.client.building import calculator, sums, support_triage

        return Catalog(
            self.store,
            samples={SUMS: sums, CALCULATOR: calculator},
            offers={SUPPORT_TRIAGE: support_triage},
        )

    @cached_property
    def registry(self) -> ClientRegistry:
        """Everything a plan can name."""
        from nbtrain.client.registry import ClientRegistry

        return ClientRegistry(self)

    @cached_property
    def datasets(self) -> DatasetRegistry:
        """Registered datasets."""
        from nbtrain.catalog.support_triage import TRAIN, VALIDATION, triage_rows
        from nbtrain.data.datasets import DatasetRegistry

        samples = {TRAIN: lambda: triage_rows()[0], VALIDATION: lambda: triage_rows()[1]}
        return DatasetRegistry(self.store, samples)

    @cached_property
    def bundles(self) -> BundleRegistry:
        """Registered bundles."""
        from nbtrain.rewards.bundles import BundleRegistry

        return BundleRegistry(self.store)

    @property
    def side(self) -> SideProcess:
        """The process that answers what needs a tokenizer."""
        from nbtrain.client.side import side_process

        return side_process(self.store.home)

    def run(self, ref: object) -> Run:
        """The run that a Run, a name, an id or a prefix means."""
        ref = getattr(ref, "training_run_id", ref)
        if not isinstance(ref, str):
            msg = f"a run is named by a Run, a name, an id or a prefix, not by {describe(ref)}"
            raise NotFound(msg)
        return Run(self.store, self.store.find_run(ref))
