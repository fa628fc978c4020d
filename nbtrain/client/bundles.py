"""``client.bundles``: Python modules and data files that score."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from nbtrain.client.listing import Listing, Unreadable, readable
from nbtrain.client.parts import Part
from nbtrain.errors import NotFound

if TYPE_CHECKING:
    from nbtrain.client.parts import Parts
    from nbtrain.rewards.bundles import Bundle

__all__ = ["BundleItem", "Bundles"]


class BundleItem:
    """A registered bundle. ``id`` is the SHA-256 of its zip.

    The name is an alias that may move on to another content; the object does not.
    """

    def __init__(self, bundle: Bundle, note: str | None = None) -> None:
        self._bundle = bundle
        self.note = note
        """What happened when it was registered: that the name meant something else before."""
        self.id: str = bundle.bundle_id
        self.bundle_id: str = bundle.bundle_id
        self.name: str | None = bundle.name
        self.modules: tuple[str, ...] = bundle.modules
        """Dotted names of the modules that can be imported from it."""
        self.size: int = bundle.size
        """Bytes of the zip."""

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of its files within it. Raises :class:`NotFound` when its zip is damaged."""
        return self._bundle.files

    def to_row(self) -> dict[str, Any]:
        """The bundle as one row of a table."""
        return {
            "name": self.name,
            "bundle_id": self.id,
            "modules": ", ".join(self.modules),
            "size": self.size,
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BundleItem) and other.id == self.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return (
            f"<Bundle {self.name or ''} {self.id[:12]}: modules {', '.join(self.modules)}, "
            f"{self.size:,} bytes>" + (f"\n{self.note}" if self.note else "")
        )


class Bundles(Part):
    """``client.bundles``."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def register(self, name: str, path: str | os.PathLike[str]) -> BundleItem:
        """Keep the folder or zip at ``path`` as a bundle and let ``name`` mean it.

        A folder packs to the same bundle whenever and wherever its files are the same; a zip
        stays as it is. Modules stand at the root, such as ``reward.py`` with its
        ``compute_score``. Nothing of it is run. Raises :class:`Refused` with every problem at
        once.
        """
        from nbtrain.store import moved

        before = self._parts.store.alias("bundle", name) if isinstance(name, str) else None
        made = self._parts.bundles.register(name, path)
        return BundleItem(made, moved(name, before, made.bundle_id))

    def get(self, ref: object) -> BundleItem:
        """The bundle that a name, an id or a prefix means. Raises :class:`NotFound`."""
        return BundleItem(self._parts.bundles.get(getattr(ref, "_bundle", ref)))

    def list(self) -> Listing[BundleItem | Unreadable]:
        """Every bundle, newest first; one whose zip is gone or damaged stands there with a note."""
        columns = ("name", "bundle_id", "modules", "size")
        return Listing([_listed(bundle) for bundle in self._parts.bundles.list()], columns)


def _listed(bundle: Bundle) -> BundleItem | Unreadable:
    def read() -> BundleItem:
        # Its bytes are compared where they are needed; a list looks at their number
        path = bundle.folder / "bundle.zip"
        if not path.is_file() or path.stat().st_size != bundle.size:
            raise NotFound(path)
        return BundleItem(bundle)

    return readable("bundle", bundle.bundle_id, bundle.name, read)
