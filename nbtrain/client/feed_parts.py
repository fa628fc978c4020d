"""The parts of a run's state that its feed tells: each as plain JSON, and only when it changed.

What is dear to make (trajectories, the log) is made anew only when what it is made from changed,
and only so often while the run goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

from nbtrain.client import shown_parts as make
from nbtrain.client.glance import AS_READ

if TYPE_CHECKING:
    from nbtrain.client.run import Run
    from nbtrain.report.summary import RunSummary

__all__ = ["Parts"]

_CLOCKS = 5.0  # seconds after which times are told again though nothing else changed
_PAUSES = {"trajectories": 3.0, "log": 5.0}
"""Seconds between two looks at what is dear, while the run goes on."""
_SHARE = 0.0015  # of a core for each of them, which may make the pauses longer
_LONGEST = 60.0


class Parts:
    """What a feed said last of each part."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._glance = run.glance()
        self._said: dict[str, Any] = {}
        self._made_of: dict[str, Hashable] = {}
        self._due: dict[str, float] = {}
        self._picked: object = None
        self._weights = False
        self._clocks = 0.0
        self._still: dict[str, Any] = {}
        self._not_finite_read = 0
        self._not_finite: dict[int, list[dict[str, Any]]] = {}

    @property
    def is_final(self) -> bool:
        """Whether the run was over when the dear parts were last made."""
        return all(name in self._made_of and self._due[name] == 0.0 for name in _PAUSES)

    def changed(self) -> dict[str, Any]:
        """The parts that differ from what was said before, as of the last reading of the run."""
        glance, followed = self._glance, self._glance.followed
        summary = glance.refresh(AS_READ)
        over = followed.row.ended_for_good
        steps = (followed.generation, len(followed.step_log))
        now = {
            "head": make.head(self.run, summary, over=over),
            "diagnosis": make.findings(glance.findings(AS_READ)),
            **self._progress(summary),
            **self._checkpoints(),
        }
        self._once("about", now, lambda: make.about(self.run, glance.plan))
        self._once("schedule", now, lambda: make.schedule(glance.plan))
        self._dear("trajectories", (*steps, over), now, lambda: make.trajectories(followed))
        logs = self.run.folder / "logs"
        self._dear("log", make.log_state(logs), now, lambda: make.log_tail(logs))
        now["not_finite"] = self._lost()
        now["actions"] = self._actions(over=over)
        new = {name: value for name, value in now.items() if self._said.get(name) != value}
        self._said |= new
        return new

    def _once(self, name: str, now: dict[str, Any], made: Callable[[], Any]) -> None:
        if name not in self._said:
            now[name] = made()

    def _dear(
        self, name: str, made_of: Hashable, now: dict[str, Any], made: Callable[[], Any]
    ) -> None:
        """Make the part if what it is made from changed, at once when the run is over."""
        over = self._glance.followed.row.ended_for_good
        last = over and self._due.get(name) != 0.0
        same = self._made_of.get(name) == made_of and not last
        if same or (not over and time.monotonic() < self._due.get(name, 0.0)):
            return
        begun = time.thread_time()
        now[name] = made()
        pause = (time.thread_time() - begun) / _SHARE
        self._made_of[name] = made_of
        later = time.monotonic() + min(_LONGEST, max(_PAUSES[name], pause))
        self._due[name] = 0.0 if over else later

    def _progress(self, summary: RunSummary) -> dict[str, Any]:
        """How far the run is; the clocks alone are no reason to tell it again at every look."""
        times = [row["created_at"] for row in make.newest(self._glance.followed.steps)]
        now = make.progress(summary, times, time.time())
        still = {name: value for name, value in now.items() if not name.endswith("_seconds")}
        late = not self._glance.is_final and time.monotonic() >= self._clocks + _CLOCKS
        if still == self._still and not late:
            return {}
        self._still = still
        self._clocks = time.monotonic()
        return {"progress": now}

    def _checkpoints(self) -> dict[str, Any]:
        picked = self._glance.picks(AS_READ)
        if picked is self._picked:
            return {}
        self._picked = picked
        self._weights = any(checkpoint.has_weights for checkpoint in picked[1])
        return {"checkpoints": make.checkpoint_rows(picked[1])}

    def _lost(self) -> list[dict[str, Any]]:
        """Figures that were NaN or infinite, of the newest steps that have any."""
        followed = self._glance.followed
        for key in followed.step_log[self._not_finite_read :]:
            row = followed.steps[key]
            names = row["nonfinite"] or ()
            self._not_finite[key] = [{"step": row["step"], "name": str(n)} for n in names]
            if not names:
                del self._not_finite[key]
        self._not_finite_read = len(followed.step_log)
        return [told for key in sorted(self._not_finite) for told in self._not_finite[key]][-200:]

    def _actions(self, *, over: bool) -> dict[str, bool]:
        weights = self._weights
        return {
            "cancel": not over,
            "generate": weights,
            "resume": weights,
            "export": weights,
            "follow": True,
        }
