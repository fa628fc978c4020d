"""``nbtrain quickstart``: the whole way once, from a plan to a resumed checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nbtrain.client import Client, Detached, Run
from nbtrain.client.glance import first_and_last, number
from nbtrain.errors import Refused, first_line

__all__ = ["main"]

OPTIONS: dict[str, Any] = {
    "num_steps": 60,
    "algorithm": "gspo",
    "batch_size": 8,
    "group_size": 8,
    "learning_rate": 5e-4,
    "lr_warmup_steps": 0,
    "val_interval_steps": 10,
}
FURTHER_STEPS = 10
REPORT = Path("nbtrain-quickstart.html")
_PAUSE = 0.25  # seconds between two looks at the run


def main(console: Console | None = None, client: Client | None = None) -> None:
    """Train, show, pick, resume. Raises :class:`RunEnded` when a run fails."""
    console = console or Console()
    client = client or Client()
    console.print(
        "The sample workload sums: what is 51 + 48? The reward is 1 for the exact answer."
    )
    for other in client.training.runs.still_running("quickstart"):
        console.print(f"Another {other.title} is still running.", markup=False)
    # By its content: whatever a name may mean in a home that an older version wrote
    first = client.training.create(
        bench_id=client.workloads.sample().id,
        base_model_slug="nbtrain/tiny",
        options=OPTIONS,
        display_name="quickstart",
    )
    console.print(f"Started {first.title} in the background.")
    follow(first, console)
    tell(first, console)
    best = first.best()
    console.print(
        f"Going on from the best checkpoint, step {best.step_index}, for {FURTHER_STEPS} steps."
    )
    more = client.training.create(
        base_model_slug=best.base_model_slug,
        parent_checkpoint_id=best,
        # Training state is kept for some checkpoints only; without it the weights alone go on
        options={"num_steps": FURTHER_STEPS, "load_weights_only": not best.has_training_state},
        display_name="quickstart-resumed",
    )
    for note in more.glance().refresh().notes:
        console.print(note, style="dim", markup=False)
    follow(more, console)
    tell(more, console)
    console.print(written(first), markup=False)
    console.print(closing(first), markup=False)


def follow(run: Run, console: Console) -> None:
    """Show a bar and the reward while the run goes on; an interrupt detaches."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[told]}"),
    )
    glance = run.glance()
    try:
        with Progress(*columns, console=console, refresh_per_second=4) as bar:
            start = run.progress.start_step
            task = bar.add_task(run.name or "run", total=run.progress.total_steps - start, told="")
            while True:
                seen = glance.refresh()
                told = _reward(seen.rewards) if seen.rewards else seen.phase.lower()
                done = seen.completed_steps - seen.start_step
                bar.update(task, completed=done, told=told)
                if glance.is_final:
                    break
                time.sleep(_PAUSE)
    except KeyboardInterrupt:
        msg = (
            f"stopped watching; {run.title} goes on in the background. To stop it, in Python: "
            f"nbtrain.attach({run.name or run.id[:12]!r}).cancel()"
        )
        raise Detached(msg) from None
    run.wait()  # it is over: this raises with the reason if it failed


def _reward(rewards: list[tuple[int, float | None]]) -> str:
    recent = [value for _, value in rewards[-5:] if value is not None]
    return f"reward {number(sum(recent) / len(recent))}" if recent else "reward –"


def tell(run: Run, console: Console) -> None:
    """The reward's way and the checkpoint table."""
    seen = run.glance().refresh()
    if seen.ended:
        console.print(f"It stopped at step {seen.completed_steps}: {seen.ended}", markup=False)
    moved = first_and_last(seen.rewards)
    if moved is not None:
        before, after, each = moved
        console.print(
            f"Mean reward of the first {each} steps {number(before)}, "
            f"of the last {each} steps {number(after)}."
        )
    rounds = [r for r in seen.held_out if r.complete]
    if rounds:
        console.print(
            f"Held-out reward {number(rounds[0].reward)} at step {rounds[0].step}, "
            f"{number(rounds[-1].reward)} at step {rounds[-1].step}."
        )
    table = Table("step", "checkpoint", "held-out", "holds", "", title=f"Checkpoints of {run.name}")
    for line in seen.checkpoints:
        table.add_row(
            str(line.step),
            line.checkpoint_id[:12],
            number(line.held_out),
            line.kind,
            "best" if line.best else "",
        )
    console.print(table)


def written(run: Run, path: Path = REPORT) -> str:
    """Write the run's report into the current folder and say so, or why it could not be."""
    try:
        return f"Its report, to be opened in a browser: {run.report(path)}"
    except (Refused, OSError) as error:
        return f"No report was written: {first_line(error)}"


def closing(run: Run) -> str:
    """What to do next."""
    lines = [
        "In a notebook, everything is there again:",
        "    %load_ext nbtrain",
        f'    run = nbtrain.attach("{run.name}")',
        f"    %train watch {run.name}",
    ]
    notebook = Path(__file__).parents[2] / "notebooks" / "quickstart.ipynb"
    if notebook.is_file():
        lines.append(f"The same as a notebook: jupyter lab {notebook}")
    return "\n".join(lines)
