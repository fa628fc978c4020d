"""The widget."""

from __future__ import annotations

import html
import logging
import threading
from collections.abc import Sequence
from typing import Any

import anywidget
import traitlets

from nbtrain.client import Checkpoint, Run
from nbtrain.client.fronts import client_of
from nbtrain.errors import NotFound
from nbtrain.notebook.panel import messages
from nbtrain.notebook.panel.actions import Actions
from nbtrain.notebook.panel.program import loader, program
from nbtrain.notebook.panel.subshells import answer_at_once
from nbtrain.notebook.panel.views import Panels, Views

__all__ = ["RunPanel"]

_LONGEST_ID = 64

logger = logging.getLogger(__name__)


class RunPanel(anywidget.AnyWidget):  # type: ignore[misc]
    """The live panel of a run: curves, checkpoints, samples, diagnosis, and what one may do.

    ``panel.selected`` is the checkpoint that was picked in it, ``panel.resumed`` the run last
    started from it. ``panel.observe(f, "selected_id")`` calls ``f`` with each pick. A panel holds
    nothing of its own: in a fresh kernel ``nbtrain.attach(run).panel()`` shows everything again.

    What is saved with the notebook is small: the names below, and a loader that asks the kernel
    for the program.
    """

    selected_id = traitlets.Unicode(None, allow_none=True).tag(sync=True)
    """The id of the checkpoint that is picked, ``None`` before."""
    run_id = traitlets.Unicode("").tag(sync=True)
    run_name = traitlets.Unicode("").tag(sync=True)
    told = traitlets.Unicode("").tag(sync=True)
    """How the run stood when its phase changed last: what a saved notebook can still say."""

    def __init__(self, run: Run, views: Views) -> None:
        """A panel of ``run`` that ``views`` keep up to date."""
        self._guard = threading.RLock()
        self._views = views
        self._run = run
        self._panels: Panels | None = None
        self.resumed: Run | None = None
        # anywidget takes it for the address of a file where it is a class attribute of one line
        self.add_traits(_esm=traitlets.Unicode(loader()).tag(sync=True))
        super().__init__(
            run_id=run.id, run_name=run.name or run.id[:12], told=run.glance().brief(1.0)
        )
        self._actions = Actions(self)
        self.on_msg(self._hear)
        if self.comm is not None:
            answer_at_once(self.comm)
        self._enter(run)

    def _enter(self, run: Run) -> None:
        panels = self._views.of(run)
        panels.add(self)
        self._run, self._panels = run, panels
        self._views.follow(panels)

    @property
    def run(self) -> Run:
        """The run it shows."""
        return self._run

    @property
    def selected(self) -> Checkpoint | None:
        """The checkpoint that is picked, ``None`` before. Set it to one, its id or a prefix.

        Raises :class:`NotFound` for what is no checkpoint of the panel's run.
        """
        picked = self.selected_id
        if picked is None:
            return None
        found = [c for c in self._run.checkpoint_list() if c.checkpoint_id == picked]
        return found[0] if found else None

    @selected.setter
    def selected(self, checkpoint: Checkpoint | str | None) -> None:
        if checkpoint is None:
            self.selected_id = None
            return
        found = client_of(self._run).training.checkpoints.get(checkpoint)
        if found.run_id != self._run.id:
            msg = f"checkpoint {found.checkpoint_id[:12]} is none of {self._run.title}"
            raise NotFound(msg)
        self.selected_id = found.checkpoint_id

    def turn_to(self, run: Run) -> None:
        """Show another run from now on, in every place where the panel is displayed."""
        with self._guard:
            before = self._panels
            if run != self._run:
                if before is not None:
                    before.drop(self)
                self._enter(run)
                self.selected_id = None
                self.run_id, self.run_name = run.id, run.name or run.id[:12]
            panels = self._panels
        if panels is not None:
            panels.ask(self)
            self._views.follow(panels, now=True)

    def close(self) -> None:
        """Take the panel away from every page; the run goes on."""
        panels = getattr(self, "_panels", None)
        if panels is not None:
            panels.drop(self)
        self._panels = None
        layout = self.layout
        super().close()
        if layout is not None:
            layout.close()

    # What the poller and the actions call, from threads of their own

    def deliver(self, message: messages.Message) -> None:
        """Send a message to every page that shows the panel; it never raises."""
        content, buffers = message
        try:
            self.send(content, buffers)
        except Exception:
            logger.debug("a message of a panel could not be sent", exc_info=True)

    def tell(self, text: str) -> None:
        """Put into the panel's own state how the run stands."""
        with self._guard:
            self.told = text

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Take over what a page changed; it may come in a subshell while the poller tells.

        A page may change the pick alone; anything else that it sends is left out.
        """
        taken = {
            name: value
            for name, value in sync_data.items()
            if name == "selected_id" and _can_be_picked(value)
        }
        if taken:
            with self._guard:
                super().set_state(taken)

    def _hear(self, _: Any, content: Any, __: Any) -> None:
        asked = messages.as_asked(content)
        panels = self._panels
        if asked is None or panels is None:
            return
        if asked.kind == "code":
            self.deliver(messages.code(program(), asked.have))
        elif asked.kind == "hello":
            if panels.ask(self):
                self._views.follow(panels, now=True)
        else:
            self._actions.begin(asked)

    # How it shows itself

    def __repr__(self) -> str:
        """Cheap, and nothing is read."""
        return f"<panel of {self._run.title}>"

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget, and for where there is none which run it is and how it stood when shown."""
        stood = [f"when it was shown: {line}" for line in self.told.splitlines()[:1]]
        stood += self.told.splitlines()[1:]
        return self.bundle(stood, **kwargs)

    def bundle(self, stood: Sequence[str] = (), **kwargs: Any) -> Any:
        """What is displayed; ``stood`` says how the run stands, where no summary is beside it."""
        data, metadata = super()._repr_mimebundle_(**kwargs)
        lines = [
            f"live panel of {self._run.title}; it needs its kernel",
            *stood,
            f"the run as it stands: nbtrain.attach({self._run.id[:12]!r})",
        ]
        data["text/plain"] = "\n".join(lines)
        body = "".join(f"<div>{html.escape(line)}</div>" for line in lines)
        data["text/html"] = (
            '<div class="nbtrain-panel-fallback" style="font-family:sans-serif;font-size:13px;'
            f'line-height:1.45;opacity:0.85">{body}</div>'
        )
        return data, metadata


def _can_be_picked(value: object) -> bool:
    """Whether a page may set this as the id of the pick; empty text and ``None`` are no pick."""
    return value is None or (
        isinstance(value, str) and len(value) <= _LONGEST_ID and value.isprintable()
    )
