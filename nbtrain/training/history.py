"""Adapters of the latest policy versions, kept to score tokens that an older policy sampled.

Below fp32 a sampler's log-prob and the trainer's differ by more than GSPO's clip range, so the
ratio of a stale token needs the *trainer's* log-prob under the weights that sampled it. Those are
the frozen base and the adapter of that version: a copy of the adapter is all that is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

__all__ = ["AdapterHistory"]


class AdapterHistory:
    """The last ``size`` adapters by policy version: ``max_staleness`` + 1 are enough.

    Memory: one copy of the adapter for each version, beside the adapter itself and in its
    precision (19 MiB for rank 16 on SmolLM2-135M).
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], size: int) -> None:
        if size < 1:
            msg = f"a history keeps at least one adapter, not {size}"
            raise ValueError(msg)
        self._parameters = parameters
        self._size = size
        self._kept: dict[int, dict[str, Tensor]] = {}

    @property
    def versions(self) -> list[int]:
        """Versions that are kept, oldest first."""
        return list(self._kept)

    def __contains__(self, version: int) -> bool:
        return version in self._kept

    def keep(self, version: int) -> None:
        """Copy the adapter as it stands as that of ``version``; the oldest beyond the size goes.

        A version that is kept already is not copied again.
        """
        if version not in self._kept:
            self._store(
                version,
                {name: parameter.detach().clone() for name, parameter in self._parameters.items()},
            )

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """The model runs with the adapter of ``version``; afterwards with exactly what it had.

        Raises ``KeyError`` for a version that is not kept. No gradient may be pending.
        """
        kept = self._kept[version]
        own = {name: parameter.data for name, parameter in self._parameters.items()}
        try:
            for name, parameter in self._parameters.items():
                parameter.data = kept[name]
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = own[name]

    def state(self) -> dict[str, Tensor]:
        """Every kept tensor by ``<version>|<parameter>``, copied to the CPU."""
        return {
            f"{version}|{name}": tensor.to("cpu", copy=True)
            for version, kept in self._kept.items()
            for name, tensor in kept.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Strict counterpart of :meth:`state`. Raises ``ValueError`` when it misfits."""
        by_version: dict[int, dict[str, Tensor]] = {}
        for key, tensor in state.items():
            number, _, name = key.partition("|")
            by_version.setdefault(int(number), {})[name] = tensor
        for version, kept in by_version.items():
            if kept.keys() != self._parameters.keys() or any(
                kept[name].shape != parameter.shape for name, parameter in self._parameters.items()
            ):
                msg = f"the kept adapter of policy version {version} does not fit this one"
                raise ValueError(msg)
        self._kept.clear()
        for version in sorted(by_version):
            self._store(
                version,
                {
                    name: by_version[version][name].to(
                        device=parameter.device, dtype=parameter.dtype, copy=True
                    )
                    for name, parameter in self._parameters.items()
                },
            )

    def _store(self, version: int, tensors: dict[str, Tensor]) -> None:
        self._kept[version] = tensors
        for old in sorted(self._kept)[: -self._size]:
            del self._kept[old]
