"""What a dataset looks like to one model: lengths in tokens, what is trained, what is refused."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from nbtrain.data.findings import LINES_NAMED, Finding, Findings
from nbtrain.data.masks import LossRules, mask_row
from nbtrain.data.preview import preview_html, preview_text
from nbtrain.data.rendering import WRITES_DATE, Renderer, RowRefused, writes_date
from nbtrain.errors import Problem, Where

if TYPE_CHECKING:
    from nbtrain.data.dataset import Dataset

__all__ = [
    "Analysis",
    "Lengths",
    "analyze",
    "placed",
    "preview_row",
    "rows_page",
    "template_digest",
    "tokenizer_fingerprint",
]

_TOLD_EVERY = 500
_TOLD_AFTER = 2.0  # seconds


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts over rows: the middle, the 90th and 99th percentile (nearest rank), the most
    and the sum. All 0 where there is no row.
    """

    median: int = 0
    p90: int = 0
    p99: int = 0
    max: int = 0
    total: int = 0

    @classmethod
    def of(cls, counts: Mapping[int, int]) -> Lengths:
        """From how many rows have each length."""
        rows = sum(counts.values())
        if not rows:
            return cls()
        ordered = sorted(counts.items())

        def at(share: float) -> int:
            left = max(1, math.ceil(share * rows))
            for length, count in ordered:
                left -= count
                if left <= 0:
                    return length
            return ordered[-1][0]

        total = sum(length * count for length, count in ordered)
        return cls(at(0.5), at(0.9), at(0.99), ordered[-1][0], total)


@dataclass(frozen=True, slots=True)
class Analysis:
    """A dataset under one tokenizer, its chat template and the rules of the loss.

    ``tokens`` and ``trained`` count tokens per row, refused rows left out. ``over`` rows are
    longer than ``max_length``, ``over_lines`` are the lines of the first ten of them (rows,
    counted from 1, where the dataset came from no file). ``findings`` tell why ``refused`` rows
    cannot be trained on. ``tokenizer`` and ``template`` are SHA-256 digests. ``remarks`` tell what
    the template does that is worth knowing.
    """

    rows: int
    refused: int
    tokens: Lengths
    trained: Lengths
    max_length: int
    over: int
    over_lines: tuple[int, ...]
    findings: tuple[Finding, ...]
    tokenizer: str
    template: str
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The analysis as plain values; :meth:`from_json` reads them."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Analysis:
        """The analysis that :meth:`to_json` wrote."""
        return cls(
            **{
                **data,
                "tokens": Lengths(**data["tokens"]),
                "trained": Lengths(**data["trained"]),
                "over_lines": tuple(data["over_lines"]),
                "findings": tuple(Finding.from_json(found) for found in data["findings"]),
                "remarks": tuple(data["remarks"]),
            }
        )

    def __str__(self) -> str:
        lines = [f"{self.rows:,} rows, {self.refused:,} refused"]
        for what, told in (("tokens a row", self.tokens), ("trained tokens a row", self.trained)):
            lines.append(
                f"{what}: median {told.median:,}, p90 {told.p90:,}, p99 {told.p99:,}, "
                f"max {told.max:,}; {told.total:,} in all"
            )
        over = f"{self.over:,} rows longer than {self.max_length:,} tokens"
        if self.over_lines:
            more = " …" if self.over > len(self.over_lines) else ""
            over += f": lines {', '.join(f'{line:,}' for line in self.over_lines)}{more}"
        return "\n".join(
            [*lines, over, *self.remarks, *(f"  {finding}" for finding in self.findings)]
        )


def analyze(
    dataset: Dataset,
    tokenizer: Any,
    rules: LossRules,
    max_length: int,
    *,
    ends: Collection[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Analysis:
    """Tokenize every row once and say what was seen; memory does not grow with the rows.

    ``ends`` as :class:`~nbtrain.data.rendering.Renderer` takes them. ``progress`` is called with
    the number of rows done, every 500 rows or two seconds. Raises ``Refused`` for a tokenizer that
    cannot render conversations; refused rows are findings.
    """
    renderer = Renderer(tokenizer, ends)
    tokens: Counter[int] = Counter()
    trained: Counter[int] = Counter()
    findings = Findings()
    rows = refused = over = 0
    over_lines: list[int] = []
    told = time.monotonic()
    for rows, row in enumerate(dataset.open_rows(), 1):
        if progress is not None and (
            rows % _TOLD_EVERY == 0 or time.monotonic() - told > _TOLD_AFTER
        ):
            told = time.monotonic()
            progress(rows)
        try:
            masked = mask_row(renderer, row, rules)
        except RowRefused as error:
            refused += 1
            note(findings, error, dataset.line_of(rows - 1))
            continue
        tokens[len(masked.ids)] += 1
        trained[masked.trained_tokens] += 1
        if len(masked.ids) > max_length:
            over += 1
            if len(over_lines) < LINES_NAMED:
                over_lines.append(dataset.line_of(rows - 1))
    return Analysis(
        rows=rows,
        refused=refused,
        tokens=Lengths.of(tokens),
        trained=Lengths.of(trained),
        max_length=max_length,
        over=over,
        over_lines=tuple(over_lines),
        findings=tuple(findings.refusals),
        tokenizer=tokenizer_fingerprint(tokenizer),
        template=template_digest(tokenizer),
        remarks=(WRITES_DATE,) if writes_date(tokenizer) else (),
    )


def note(findings: Findings, error: RowRefused, line: int) -> None:
    """Count a refused row among findings: what has one field and message is alike."""
    for problem in error.problems:
        findings.add(
            problem.message,
            line,
            problem.field,
            problem.message,
            problem.allowed,
            hint=problem.hint,
        )


def rows_page(
    dataset: Dataset,
    renderer: Renderer,
    rules: LossRules,
    offset: int = 0,
    limit: int = 25,
    progress: Callable[[int], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Rows from ``offset`` on, at most ``limit``, with what the model reads of them.

    ``progress`` is called with rows done before each. A row has ``row`` (from 0), ``line``,
    ``tokens``, ``trained`` (tokens), ``text`` (trained text between ``[[`` and ``]]``) and
    ``refused`` (sentences); a refused row has no counts.
    """
    found: list[dict[str, Any]] = []
    for index, row in enumerate(dataset.page(offset, limit), max(0, offset)):
        progress(len(found))
        found.append(_shown(renderer, row, rules, index, dataset.line_of(index)))
    return found


def _shown(
    renderer: Renderer, row: Mapping[str, Any], rules: LossRules, index: int, line: int
) -> dict[str, Any]:
    told: dict[str, Any] = {"row": index, "line": line}
    try:
        masked = mask_row(renderer, row, rules)
    except RowRefused as error:
        refused = [str(problem) for problem in error.problems]
        return {**told, "tokens": None, "trained": None, "text": None, "refused": refused}
    return {
        **told,
        "tokens": len(masked.ids),
        "trained": masked.trained_tokens,
        "text": preview_text(masked),
        "refused": [],
    }


def preview_row(
    dataset: Dataset, renderer: Renderer, rules: LossRules, index: int
) -> dict[str, Any]:
    """One row's ``text``, ``html``, ``tokens`` and ``trained``.

    Raises :class:`RowRefused` naming the row's line, and ``IndexError`` for a row that is none.
    """
    line = dataset.line_of(index)
    (row,) = dataset.page(index, 1)
    try:
        masked = mask_row(renderer, row, rules)
    except RowRefused as error:
        raise placed(error, line, dataset.name) from error
    return {
        "row": index,
        "line": line,
        "tokens": len(masked.ids),
        "trained": masked.trained_tokens,
        "text": preview_text(masked),
        "html": preview_html(masked),
    }


def placed(error: RowRefused, line: int, source: str | None) -> RowRefused:
    """The refusal with the line of its row in ``source``."""
    where = Where(line=line, source=source)
    return RowRefused(
        [
            Problem(one.field, one.message, one.found, one.allowed, where, one.hint)
            for one in error.problems
        ]
    )


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 of everything by which a fast tokenizer turns text into ids, 64 hex digits."""
    return hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()


def template_digest(tokenizer: Any) -> str:
    """SHA-256 of a tokenizer's chat template (of all of them, where it has several)."""
    template = tokenizer.chat_template
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
