"""What a panel can do with its run: each action on a thread of its own, each ending in words."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from nbtrain.client import Run
from nbtrain.client.fronts import client_of
from nbtrain.client.going_on import go_on
from nbtrain.errors import NbtrainError, Problem, Refused
from nbtrain.notebook.panel import messages

if TYPE_CHECKING:
    from nbtrain.client import Checkpoint

__all__ = ["Actions"]

_AT_ONCE = 4
_REMEMBERED = 1_000
"""Actions whose ends are kept; with a page's own ids, none is asked for again after as many."""
_MOST_PROMPTS = 64
_LONGEST = 20_000  # characters of a reply that a page is sent
_MOST_STEPS = 1_000_000

logger = logging.getLogger(__name__)

Ended = tuple[str, Any]
"""What came of an action: a sentence, and its result for the page."""


class Acting(Protocol):
    """The panel that acts."""

    @property
    def run(self) -> Run:
        """The run it shows."""
        ...

    @property
    def resumed(self) -> Run | None:
        """The run last started from it."""
        ...

    @resumed.setter
    def resumed(self, run: Run) -> None: ...

    def deliver(self, message: messages.Message) -> None:
        """Send a message to its pages."""
        ...

    def turn_to(self, run: Run) -> None:
        """Show another run from now on."""
        ...


class Actions:
    """The actions of one panel. Whatever a page sends, nothing raises: it is answered."""

    def __init__(self, panel: Acting) -> None:
        self._panel = panel
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._ended: dict[int, messages.Message] = {}

    def begin(self, asked: messages.Asked) -> None:
        """Start what a page asked for and return at once."""
        request, action = asked.request, _ACTIONS.get(asked.action)
        if action is None or asked.args is None:
            told = f"there is no action {asked.action!r}" if action is None else "no arguments"
            self._panel.deliver(messages.done(request, told, ok=False))
            return
        with self._lock:
            if request in self._running:
                return  # a page that asks twice gets one answer
            ended = self._ended.get(request)
            full = len(self._running) >= _AT_ONCE
            if not full and ended is None:
                self._running.add(request)
        if ended is not None:  # one that did not hear the answer gets it again, and no second act
            self._panel.deliver(ended)
            return
        if full:
            told = f"{_AT_ONCE} actions are under way already: wait for one of them"
            self._panel.deliver(messages.done(request, told, ok=False))
            return
        threading.Thread(
            target=self._act,
            args=(request, action, asked.args),
            name=f"nbtrain-panel-{asked.action}",
            daemon=True,
        ).start()

    def _act(self, request: int, action: _Action, args: Mapping[str, Any]) -> None:
        def told(text: str) -> None:
            self._panel.deliver(messages.doing(request, str(text)))

        try:
            said, result = action(self._panel, args, told)
            end = messages.done(request, said, result=result)
        except NbtrainError as error:
            end = messages.done(request, str(error), ok=False)
        except Exception as error:
            # Nothing may be printed from here: it would land under whichever cell was run last
            logger.debug("an action of a panel failed", exc_info=True)
            end = messages.done(request, f"{type(error).__name__}: {error}", ok=False)
        with self._lock:
            self._running.discard(request)
            self._ended[request] = end
            while len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]
        self._panel.deliver(end)


_Action = Callable[[Acting, Mapping[str, Any], Callable[[str], None]], Ended]


def _cancel(panel: Acting, _: Mapping[str, Any], __: Callable[[str], None]) -> Ended:
    run = panel.run
    if run.is_over:
        return f"{run.title} is over already: {run.status}", None
    run.cancel()
    return f"{run.title} was asked to stop; its checkpoints stay", None


def _generate(panel: Acting, args: Mapping[str, Any], told: Callable[[str], None]) -> Ended:
    prompts, n = args.get("prompts"), args.get("n")
    problems = []
    if not _texts(prompts):
        problems.append(Problem("prompts", "write a prompt first"))
    elif len(prompts or ()) > _MOST_PROMPTS:
        problems.append(Problem("prompts", f"at most {_MOST_PROMPTS} prompts at once"))
    if not _whole(n) or not 1 <= int(n or 0) <= _MOST_PROMPTS:
        problems.append(Problem("n", f"replies per prompt: a number from 1 to {_MOST_PROMPTS}"))
    if problems:
        raise Refused(problems)
    samples = _checkpoint(panel, args).generate(prompts, int(n or 1), told=told)
    shown = [
        {
            "prompt": _text(sample.prompt),
            "completion": _text(sample.completion),
            "ended": _text(sample.ended),
        }
        for sample in samples
    ]
    return f"{len(shown)} {'reply' if len(shown) == 1 else 'replies'}", {"samples": shown}


def _resume(panel: Acting, args: Mapping[str, Any], told: Callable[[str], None]) -> Ended:
    steps, name, only = args.get("steps"), args.get("name"), args.get("weights_only", False)
    problems = []
    if not _whole(steps) or not 1 <= int(steps or 0) <= _MOST_STEPS:
        allowed = f"further steps: a whole number from 1 to {_MOST_STEPS:,}"
        problems.append(Problem("steps", allowed))
    if name is not None and not isinstance(name, str):
        problems.append(Problem("name", "the name is no text"))
    if not isinstance(only, bool):
        problems.append(Problem("weights_only", "weights_only is neither true nor false"))
    if problems:
        raise Refused(problems)
    checkpoint = _checkpoint(panel, args)
    told("checking the plan and starting the job")
    called = name.strip() if isinstance(name, str) else ""
    run = go_on(
        panel.run, checkpoint, int(steps or 0), name=called or None, weights_only=bool(only)
    )
    panel.resumed = run
    return f"started {run.title}", {"run_id": run.id, "title": run.title}


def _export(panel: Acting, args: Mapping[str, Any], told: Callable[[str], None]) -> Ended:
    folder = args.get("folder")
    if not isinstance(folder, str) or not folder.strip():
        raise Refused([Problem("folder", "name a folder first")])
    checkpoint = _checkpoint(panel, args)
    told("copying the adapter")
    path = checkpoint.export(folder.strip())
    return f"the adapter is in {path.absolute()}", None


def _follow(panel: Acting, args: Mapping[str, Any], _: Callable[[str], None]) -> Ended:
    ref = args.get("run_id", args.get("run"))
    if not isinstance(ref, str):
        raise Refused([Problem("run_id", "no run is named")])
    run = client_of(panel.run).training.runs.get(ref)
    panel.turn_to(run)
    return f"following {run.title}", {"run_id": run.id, "title": run.title}


_ACTIONS: dict[str, _Action] = {
    "cancel": _cancel,
    "generate": _generate,
    "resume": _resume,
    "export": _export,
    "follow": _follow,
}


def _checkpoint(panel: Acting, args: Mapping[str, Any]) -> Checkpoint:
    ref = args.get("checkpoint")
    if not isinstance(ref, str):
        raise Refused([Problem("checkpoint", "pick a checkpoint first")])
    return client_of(panel.run).training.checkpoints.get(ref)


def _texts(value: object) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(text, str) and text.strip() for text in value)
    )


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(value: object) -> str:
    """As text that can be sent; what is far too long for a page says so."""
    text = str(value).encode("utf-8", "replace").decode()
    more = len(text) - _LONGEST
    return text if more <= 0 else f"{text[:_LONGEST]} … ({more:,} characters more)"
