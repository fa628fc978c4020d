"""``%%train`` and ``%train``."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import wraps
from typing import Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand

from nbtrain.client import default_client
from nbtrain.client.refusals import Detached
from nbtrain.errors import NbtrainError, PlanRefused
from nbtrain.notebook import live
from nbtrain.notebook.cell import CellText, read_cell
from nbtrain.notebook.commands import run_command
from nbtrain.notebook.dry_run import dry_run
from nbtrain.notebook.flags import help_text
from nbtrain.notebook.launching import start
from nbtrain.notebook.names import Names
from nbtrain.notebook.refusals import CellError, CellRefused, interrupted
from nbtrain.notebook.verbs import overview
from nbtrain.plan import small

__all__ = ["TrainMagics"]


def _told_briefly(magic: Callable[..., Any]) -> Callable[..., Any]:
    """Errors that nbtrain raises on purpose are shown as sentences; all others keep everything."""

    @wraps(magic)
    def quiet(*args: Any) -> Any:
        try:
            return magic(*args)
        except (CellRefused, CellError, Detached):
            raise
        except NbtrainError as error:
            raise CellError(str(error)) from None
        except KeyboardInterrupt:
            raise interrupted() from None

    return quiet


def _small() -> str:
    told = f"--small takes, of what is not stated, {small.in_words()}."
    return textwrap.fill(told, 100, initial_indent="    ", subsequent_indent="    ")


@magics_class
class TrainMagics(Magics):  # type: ignore[misc]
    """The magics that ``%load_ext nbtrain`` brings."""

    @no_var_expand  # type: ignore[untyped-decorator]
    @cell_magic("train")  # type: ignore[untyped-decorator]
    @_told_briefly
    def train_cell(self, line: str, cell: str) -> None:  # noqa: D102 - given below
        text = CellText(line, cell)
        plan = read_cell(text, Names(self.shell))
        client = default_client()
        view = plan.resolve(client)
        if plan.dry_run:
            self._hand_over(dry_run(self.shell, client, view, check=plan.check), plan.into)
            return
        try:
            run, notes = start(client, view, text.whole, again=plan.new, how="--new trains again")
        except PlanRefused as error:
            raise plan.refusal(error) from None
        self._hand_over(run, plan.into)
        shown = live.show(self.shell, run, notes, with_panel=True)
        if plan.wait:
            try:
                run.wait()
            finally:
                shown.look_now()

    train_cell.__doc__ = f"""Train a model in the background; the cell returns at once.

        %%train --workload sums --model nbtrain/tiny --method gspo --name first --into run
        num_steps: 60
        learning_rate: 5e-4

    The body is YAML or JSON: one option a line (%train options lists them), or nothing, or a
    whole run descriptor, which begins with "kind: run". With --method sft the options are a
    supervised run's: %train options --method sft.

    A value that is exactly $name is the Python object of that name, on the line and in the body;
    $$ at the start is a dollar. What the line states may stand in the body too, under the name
    in %train options; stated twice, it must be equal.

{help_text()}

{_small()}

    Behind a blank, # begins a comment. The output below the cell follows the run and keeps the
    curve when the notebook is saved. %train list and %train watch RUN find a run again;
    run.texts() shows what the model wrote, run.best() is the checkpoint to go on from.
    """

    def _hand_over(self, thing: Any, into: str | None) -> None:
        """Into the variable, or into ``_`` without a second output."""
        if into is not None:
            self.shell.user_ns[into] = thing
        else:
            self.shell.displayhook.update_user_ns(thing)

    @no_var_expand  # type: ignore[untyped-decorator]
    @line_magic("train")  # type: ignore[untyped-decorator]
    @_told_briefly
    def train_line(self, line: str) -> Any:  # noqa: D102 - given below
        text = CellText(line, "", "%train ")
        return run_command(self.shell, text)

    # what Shift+Tab shows in a cell too, since IPython looks for a line's magic first
    train_line.__doc__ = f"""Look after runs.

{textwrap.indent(overview(), "    ")}

    A cell that begins with %%train starts a run; %%train? tells more of it. On its first line:

{help_text()}
    """
