"""The catalog: what a plan can name, by name, id, id prefix or object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from nbtrain.catalog.base_models import (
    EMBEDDED,
    BaseModel,
    check_model_name,
    is_path,
    read_base_model,
    unknown_model,
)
from nbtrain.catalog.digests import FileDigests
from nbtrain.catalog.repositories import is_repository
from nbtrain.catalog.workload_files import write_workload
from nbtrain.catalog.workloads import VERSION, Workload, WorkloadSpec, load_workload
from nbtrain.errors import NotFound, Problem, Refused
from nbtrain.plan.fields import describe
from nbtrain.store import Store, private_folder, unknown, usable_path

__all__ = ["Catalog"]

Samples = Mapping[str, Callable[[], WorkloadSpec]]


class Catalog:
    """Workloads and base models of one store.

    ``samples`` maps the names of sample workloads to functions that build them: such a name is
    registered when it is first asked for, and again when another version registered it; nothing
    else can be registered under it. ``offers`` are samples whose names are free: what somebody
    registers under one takes its place.
    """

    def __init__(
        self, store: Store, samples: Samples | None = None, offers: Samples | None = None
    ) -> None:
        self._store = store
        self._samples = dict(samples or {})
        self._offers = dict(offers or {})
        self._digests = FileDigests(store.home / "base_models" / "digests.json")

    # --- workloads

    def register_workload(self, spec: WorkloadSpec) -> Workload:
        """Keep a workload and point its name at it. The same content twice is the same workload.

        Raises ``Refused`` when the name is a sample's and the content is another.
        """
        sample = self._samples.get(spec.name)
        if sample is not None and sample().workload_id != spec.workload_id:
            message = f"name {spec.name!r} belongs to a sample workload"
            hint = "Choose another name: everybody's sample stays the same"
            raise Refused([Problem("name", message, found=spec.name, hint=hint)])
        return self._keep(spec)

    def _keep(self, spec: WorkloadSpec) -> Workload:
        folder = self._folder(spec.workload_id)
        about = write_workload(spec, folder)
        self._store.put_workload(
            spec.workload_id,
            spec=about,
            path=str(folder.relative_to(self._store.home)),
            name=spec.name,
        )
        return load_workload(folder, spec.name)

    def workload(self, ref: object) -> Workload:
        """The workload of a name, an id, an id prefix of at least 4 digits, or itself.

        Raises ``NotFound`` naming what there is, ``AmbiguousReference`` when a prefix fits
        several.
        """
        if isinstance(ref, Workload):
            return ref
        if not isinstance(ref, str) or not ref:
            msg = f"{describe(ref)} is no workload: a name, an id or a workload is expected"
            raise NotFound(msg)
        target = self._store.alias("workload", ref)
        if ref in self._samples and (target is None or self._is_outdated(target)):
            return self._keep(self._samples[ref]())
        row = self._store.workload(ref)
        if row is None and ref in self._offers:
            return self._keep(self._offers[ref]())
        if row is None:
            raise unknown(ref, "workload", self.workload_names())
        return load_workload(self._folder(row["workload_id"]), ref if target else None)

    def sample(self, name: str) -> Workload:
        """The sample workload of this name, whatever an older version let the name mean."""
        return self._keep((self._samples | self._offers)[name]())

    def _is_outdated(self, workload_id: str) -> bool:
        row = self._store.workload(workload_id)
        return row is not None and row["spec"].get("version") != VERSION

    def workload_names(self) -> list[str]:
        """Every name that :meth:`workload` knows, the one moved last first, samples last."""
        return list(
            dict.fromkeys([*self._store.aliases("workload"), *self._samples, *self._offers])
        )

    def _folder(self, workload_id: str) -> Path:
        return private_folder(self._store.home / "workloads") / workload_id

    # --- base models

    def base_model(self, ref: object) -> BaseModel:
        """The base model of a selected name, ``nbtrain/tiny``, a path, a repository, or itself.

        Raises ``NotFound`` naming what there is, ``Refused`` when it cannot be trained.
        """
        if isinstance(ref, BaseModel):
            return ref
        if not isinstance(ref, str) or not ref:
            what = "a name, path, repository or base model is expected"
            msg = f"{describe(ref)} is no base model: {what}"
            raise NotFound(msg)
        row = self._store.base_model(ref)
        if row is not None:
            return read_base_model(row["location"], self._digests, slug=ref)
        if ref == EMBEDDED or is_path(ref):
            return read_base_model(ref, self._digests)
        if not is_repository(ref) or ref.startswith("nbtrain/"):
            raise unknown_model(ref, [model.slug for model in self.base_models()])
        return read_base_model(ref, self._digests)

    def base_models(self) -> list[BaseModel]:
        """The embedded model and every selected one, as it was when it was selected."""
        selected = [BaseModel(**row["spec"]) for row in self._store.base_models()]
        return [read_base_model(EMBEDDED, self._digests), *selected]

    def select_base_model(self, path: str | Path, name: str) -> BaseModel:
        """Let ``name`` mean a folder, a GGUF file or a repository from now on.

        ``~`` and relative paths are made absolute; a repository is pinned to its commit. Raises
        ``NotFound`` and ``Refused`` as :meth:`base_model` does.
        """
        check_model_name(name)
        source = self._source(path)
        if source == EMBEDDED:
            message = f"{EMBEDDED} is always there under its own name"
            raise Refused([Problem("path", message, found=source)])
        model = read_base_model(source, self._digests, slug=name)
        self._store.put_base_model(
            name,
            kind=model.kind,
            location=model.location,
            fingerprint=model.fingerprint,
            spec=model.to_json(),
        )
        return model

    @staticmethod
    def _source(path: str | Path) -> str:
        """What was handed over, written so that a path cannot be taken for a repository."""
        found = usable_path(path, "path")
        if isinstance(path, str) and (is_path(path) or not found.exists()):
            return path
        return str(found)
