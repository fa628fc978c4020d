"""The side process that a notebook asks about tokens: started when first needed, kept warm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.client.warm import WarmProcess, kept

if TYPE_CHECKING:
    from nbtrain.catalog.base_models import BaseModel
    from nbtrain.data.analysis import Analysis
    from nbtrain.data.dataset import Dataset
    from nbtrain.data.masks import LossRules

__all__ = ["SideProcess", "side_process"]


def side_process(home: Path) -> SideProcess:
    """The one side process that this Python process has for a home."""
    return kept(SideProcess, home)


class SideProcess(WarmProcess):
    """Answers what needs a tokenizer. Its log is ``side.log`` in ``home``."""

    module = "nbtrain.data.side"
    called = "the process that knows tokenizers"
    log_name = "side.log"

    def __init__(self, home: Path, *, patience: float = 60.0, first: float = 300.0) -> None:
        super().__init__(home, patience=patience, first=first)

    def analyze(
        self,
        dataset: Dataset,
        model: BaseModel,
        rules: LossRules | None = None,
        max_length: int = 2048,
        progress: Callable[[int], None] | None = None,
    ) -> Analysis:
        """Lengths and findings of a dataset under a model's tokenizer; takes minutes for 100,000
        rows. ``progress`` is called with rows done. Raises ``Refused`` and ``NbtrainError``.
        """
        from nbtrain.data.analysis import Analysis

        found = self._ask(
            "analyze", dataset, model, rules, progress=progress, max_length=max_length
        )
        return Analysis.from_json(found)

    def rows(
        self,
        dataset: Dataset,
        model: BaseModel,
        rules: LossRules | None = None,
        offset: int = 0,
        limit: int = 25,
    ) -> list[dict[str, Any]]:
        """A page of rows with token counts and marked text, as
        :func:`nbtrain.data.analysis.rows_page` gives them.
        """
        page: list[dict[str, Any]] = self._ask(
            "rows", dataset, model, rules, offset=offset, limit=limit
        )
        return page

    def preview(
        self, dataset: Dataset, model: BaseModel, rules: LossRules | None = None, row: int = 0
    ) -> dict[str, Any]:
        """One row, counted from 0: ``text`` and ``html`` with the trained parts marked, ``line``,
        ``tokens`` and ``trained``. Raises ``Refused`` naming the line of a row that cannot be
        trained on, and for one that there is not.
        """
        shown: dict[str, Any] = self._ask("preview", dataset, model, rules, row=row)
        return shown

    def _ask(
        self,
        op: str,
        dataset: Dataset,
        model: BaseModel,
        rules: LossRules | None,
        progress: Callable[[int], None] | None = None,
        **more: object,
    ) -> Any:
        request: dict[str, Any] = {
            "op": op,
            "dataset": {"folder": str(dataset.folder), "name": dataset.name},
            "model": {"kind": model.kind, "location": str(model.location)},
            "rules": {} if rules is None else asdict(rules),
            **more,
        }
        return self.request(request, progress)
