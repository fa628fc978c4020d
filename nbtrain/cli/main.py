"""``nbtrain``: the command line."""

from __future__ import annotations

from typing import Annotated

import typer

import nbtrain
from nbtrain.errors import NbtrainError

__all__ = ["app"]

app = typer.Typer(
    name="nbtrain",
    help="Train language models from a notebook; runs go on in background kernel processes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

DETACHED = 130  # what a shell expects of a program that an interrupt ended


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"nbtrain {nbtrain.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Train language models from a notebook; runs go on in background kernel processes."""


@app.command()
def quickstart() -> None:
    """Train the embedded model on the sample workload, pick the best checkpoint, resume it.

    A real run that takes under a minute on two CPU cores, without a network. An interrupt only
    detaches: the run goes on in the background.
    """
    from nbtrain.cli import quickstart as command

    try:
        command.main()
    except KeyboardInterrupt as error:
        told = str(error) or "stopped; a run that was started goes on in the background"
        typer.echo(f"\n{told}", err=True)
        raise typer.Exit(DETACHED) from None
    except NbtrainError as error:
        typer.echo(f"\n{error}", err=True)
        raise typer.Exit(1) from None
