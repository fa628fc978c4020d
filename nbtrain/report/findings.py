"""What a diagnosis says: findings as text, static HTML and a frame, from plain data."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, overload

from nbtrain.plan.fields import counted

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Diagnosis", "Finding"]

Severity = Literal["problem", "hint", "fine"]
_RANK = {"problem": 0, "hint": 1, "fine": 2}
_COLOUR = {"problem": "#c0392b", "hint": "#9a6700", "fine": "#1a7f37"}
_SHOWN = 5  # ids of each kind

COLUMNS = (
    *("severity", "rule", "sentence", "suggestion", "options", "trajectories", "groups", "steps"),
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found: a sentence with figures, and what to do about it.

    ``rule`` names the rule that found it. ``options`` are those that the suggestion would
    change. ``trajectories`` (public ids), ``groups`` and ``steps`` are samples of what the
    sentence speaks of. ``weight`` (0..1) orders findings of equal severity.
    """

    rule: str
    severity: Severity
    sentence: str
    suggestion: str = ""
    options: tuple[str, ...] = ()
    trajectories: tuple[str, ...] = ()
    groups: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    weight: float = 0.5

    @property
    def samples(self) -> str:
        """The ids behind the sentence, in words; empty without any."""
        named = (
            ("trajectories", self.trajectories),
            ("groups", self.groups),
            ("steps", self.steps),
        )
        return "; ".join(
            f"{what} {', '.join(map(str, ids[:_SHOWN]))}" for what, ids in named if ids
        )

    def __str__(self) -> str:
        return f"{self.severity}: {self.sentence}"


class Diagnosis(Sequence[Finding]):
    """Findings about a run, the most important first.

    A sequence; ``frame`` holds them as a DataFrame, ``healthy`` says that no problem was found.
    """

    def __init__(self, title: str, findings: Sequence[Finding]) -> None:
        self.title = title
        self._findings = sorted(findings, key=lambda f: (_RANK[f.severity], -f.weight))

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> list[Finding]: ...
    def __getitem__(self, index: int | slice) -> Finding | list[Finding]:
        return self._findings[index]

    def __len__(self) -> int:
        return len(self._findings)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._findings)

    @property
    def healthy(self) -> bool:
        """Whether nothing is a problem."""
        return not self.problems

    @property
    def problems(self) -> list[Finding]:
        """Findings that keep the run from learning, or from going on."""
        return [f for f in self._findings if f.severity == "problem"]

    @property
    def hints(self) -> list[Finding]:
        """Findings that cost something or may become a problem."""
        return [f for f in self._findings if f.severity == "hint"]

    @property
    def rules(self) -> list[str]:
        """The rules that found something, in order."""
        return [f.rule for f in self._findings]

    @property
    def frame(self) -> pd.DataFrame:
        """One row per finding."""
        import pandas as pd

        rows = [{name: getattr(f, name) for name in COLUMNS} for f in self._findings]
        return pd.DataFrame(rows, columns=pd.Index(COLUMNS))

    def __repr__(self) -> str:
        lines = [f"{self.title}: {self._headline()}"]
        for finding in self._findings:
            lines.append(f"- {finding}")
            lines += [f"  {line}" for line in (finding.suggestion, _led(finding.samples)) if line]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        esc = html.escape
        rows = []
        for f in self._findings:
            more = "".join(
                f'<div style="opacity:0.75">{esc(line)}</div>'
                for line in (f.suggestion, _led(f.samples))
                if line
            )
            rows.append(
                f'<div style="border-left:3px solid {_COLOUR[f.severity]};padding-left:8px;'
                f'margin:6px 0;white-space:pre-wrap"><b>{f.severity}</b> {esc(f.sentence)}'
                f"{more}</div>"
            )
        head = f"<div><b>{esc(self.title)}</b>: {esc(self._headline())}</div>"
        style = "font-family:sans-serif;font-size:13px;line-height:1.45;max-width:720px"
        return f'<div class="nbtrain-diagnosis" style="{style}">{head}{"".join(rows)}</div>'

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": self._repr_html_()}

    def _headline(self) -> str:
        if not self._findings:
            return "nothing to report"
        counts = (
            _count(len(self.problems), "problem"),
            _count(len(self.hints), "hint"),
        )
        return ", ".join(told for told in counts if told) or "no problem found"


def _led(samples: str) -> str:
    return f"for example {samples}" if samples else ""


def _count(number: int, what: str) -> str:
    return counted(number, what) if number else ""
