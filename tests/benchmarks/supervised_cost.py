"""Cost of a supervised update against stock ``trl.SFTTrainer``.

    python tests/benchmarks/supervised_cost.py --case embedded
    python tests/benchmarks/supervised_cost.py --case embedded-bf16
    python tests/benchmarks/supervised_cost.py --case smollm2 --model FOLDER

CPU milliseconds per trained token and peak memory: same ids and labels in the same order, same
model, weights' precision, LoRA and batch; one thread; each arm in a process of its own, arms
interleaved, the median over the rounds. TRL runs twice: with its own defaults, and with the
settings that are best on a CPU (no gradient checkpointing). The first update of every process
warms up and is left out. All arms begin with the same adapter, so their first losses agree: that
they do the same is printed too. Prints Markdown.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

ROOT = Path(__file__).parent.parent.parent
ARMS = {"nbtrain": "nbtrain", "trl": "TRL, no checkpointing", "trl-defaults": "TRL, its defaults"}
PER_PASS, PASSES = 4, 2
SEQUENCES = PER_PASS * PASSES

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its rows: prompts and answers of so many tokens, both drawn evenly."""

    name: str
    dtype: str
    updates: int
    prompt: tuple[int, int]
    answer: tuple[int, int]
    model: str = ""


TINY = str(ROOT / "nbtrain/catalog/embedded/tiny")
CASES = {
    "embedded": Case("embedded", "fp32", 16, (10, 60), (5, 40), TINY),
    "embedded-bf16": Case("embedded-bf16", "bf16", 16, (10, 60), (5, 40), TINY),
    "smollm2": Case("smollm2", "bf16", 4, (20, 90), (10, 60)),
}


def rows_of(case: Case) -> list[tuple[list[int], list[bool]]]:
    """Ids and which of them train. Their values do not matter to what an update costs."""
    draw = random.Random(7)
    rows = []
    for _ in range(case.updates * SEQUENCES):
        before, after = draw.randint(*case.prompt), draw.randint(*case.answer)
        ids = [draw.randrange(10, 250) for _ in range(before + after)]
        rows.append((ids, [False] * before + [True] * after))
    return rows


def model_of(case: Case) -> Any:
    """The base model with the adapter that every arm begins with, its weights in fp32."""
    import torch

    from nbtrain.training.adapted import attach_adapter
    from nbtrain.training.base_weights import load_base

    torch.set_num_threads(1)
    dtype = torch.float32 if case.dtype == "fp32" else torch.bfloat16
    base = load_base(Path(case.model), dtype=dtype, device=torch.device("cpu"))
    return attach_adapter(base, lora_rank=8, lora_alpha=16, target_modules="default", seed=1)


class Meter:
    """CPU seconds, trained tokens and loss of every update."""

    def __init__(self) -> None:
        self.updates: list[Figures] = []
        self._last = 0.0

    def start(self) -> None:
        """The first update begins."""
        self._last = time.process_time()

    def update(self, tokens: int, loss: float) -> None:
        """An update has ended."""
        now = time.process_time()
        self.updates.append({"cpu": now - self._last, "tokens": tokens, "loss": loss})
        self._last = now


def run_nbtrain(case: Case, meter: Meter, folder: Path) -> None:
    """Our updates, as a job makes them."""
    import torch

    from nbtrain.training.adapted import AdaptedModel, load_tokenizer
    from nbtrain.training.supervised.order import Order
    from nbtrain.training.supervised.packing import unpacked
    from nbtrain.training.supervised.rows import RowWriter, TokenizedRows
    from nbtrain.training.supervised.trainer import SupervisedTrainer, TrainerSettings

    with RowWriter(folder / "rows") as writer:
        for ids, trained in rows_of(case):
            writer.append(ids, trained)
    rows = TokenizedRows(folder / "rows")
    adapted = AdaptedModel(model_of(case), torch.device("cpu"))
    for parameter in adapted.trainable.values():
        parameter.data = parameter.data.float()
    settings = TrainerSettings(
        start_step=0,
        total_steps=case.updates,
        seed=1,
        rate=lambda step: 1e-4,
        weight_decay=0.0,
        max_grad_norm=1.0,
        packed=False,
    )
    trainer = SupervisedTrainer(
        adapted,
        rows,
        Order(unpacked(len(rows)), seed=1, shuffle=False, per_pass=PER_PASS, passes=PASSES),
        settings,
        tokenizer=load_tokenizer(Path(case.model)),
        folder=folder / "trainer",
        after=lambda done: meter.update(done.trained_tokens, done.loss),
    )
    meter.start()
    trainer.train()


def run_trl(case: Case, meter: Meter, folder: Path, *, best: bool) -> None:
    """Stock updates on the same rows."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rows = rows_of(case)
    table = {
        "input_ids": [ids for ids, _ in rows],
        "labels": [[i if one else -100 for i, one in zip(*row, strict=True)] for row in rows],
    }

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            meter.start()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                first = (state.global_step - 1) * SEQUENCES
                mine = rows[first : first + SEQUENCES]
                meter.update(sum(sum(trained) for _, trained in mine), float(logs["loss"]))

    trainer = SFTTrainer(
        model=model_of(case),
        args=SFTConfig(
            output_dir=str(folder),
            per_device_train_batch_size=PER_PASS,
            gradient_accumulation_steps=PASSES,
            max_steps=case.updates,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            train_sampling_strategy="sequential",
            bf16=False,  # the weights have their precision already
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **({"gradient_checkpointing": False} if best else {}),
        ),
        train_dataset=Dataset.from_dict(table),
        processing_class=AutoTokenizer.from_pretrained(case.model),
        callbacks=[Watch()],
    )
    trainer.train()


def one_arm(case: Case, arm: str) -> Figures:
    """Run one arm in this process; its first update warms up."""
    meter = Meter()
    with tempfile.TemporaryDirectory() as scratch:
        runs: dict[str, Callable[[], None]] = {
            "nbtrain": lambda: run_nbtrain(case, meter, Path(scratch)),
            "trl": lambda: run_trl(case, meter, Path(scratch), best=True),
            "trl-defaults": lambda: run_trl(case, meter, Path(scratch), best=False),
        }
        runs[arm]()
    if len(meter.updates) != case.updates:
        raise SystemExit(f"{arm} made {len(meter.updates)} of {case.updates} updates")
    measured = meter.updates[1:]
    return {
        "cpu": sum(one["cpu"] for one in measured),
        "tokens": sum(one["tokens"] for one in measured),
        "updates": len(measured),
        "first_loss": meter.updates[0]["loss"],
        "last_loss": meter.updates[-1]["loss"],
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def measure(case: Case, arm: str) -> Figures:
    """One arm in a fresh process."""
    command = [sys.executable, __file__, "--case", case.name, "--model", case.model]
    command += ["--updates", str(case.updates), "--arm", arm]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise SystemExit(f"{arm} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: Figures = json.loads(lines[-1].removeprefix("RESULT "))
    return result


def table(case: Case, results: dict[str, list[Figures]]) -> str:
    """The arms side by side, as Markdown, with ratios of medians to TRL's."""

    def median(arm: str, key: str, per: str | None = None) -> float:
        return float(statistics.median(r[key] / (r[per] if per else 1) for r in results[arm]))

    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}"
        for name in ("torch", "transformers", "trl", "peft")
    )
    lines = [
        f"{case.name}, {case.dtype}, {PASSES} passes of {PER_PASS} sequences, LoRA of rank 8, "
        f"{case.updates - 1} updates a round, median of {len(results['nbtrain'])}, one thread; "
        f"{datetime.datetime.now(tz=datetime.UTC).date()}, {versions}",
        "",
        "| arm | CPU ms a trained token | ratio | CPU s an update | peak MiB | ratio | "
        "first loss | last loss |",
        "|---" * 8 + "|",
    ]
    for arm, label in ARMS.items():
        cost, peak = median(arm, "cpu", "tokens"), median(arm, "peak_mib")
        cells = [
            label,
            f"{1e3 * cost:.3f}",
            f"{median('nbtrain', 'cpu', 'tokens') / cost:.2f}",
            f"{median(arm, 'cpu', 'updates'):.3f}",
            f"{peak:.0f}",
            f"{median('nbtrain', 'peak_mib') / peak:.2f}",
            f"{median(arm, 'first_loss'):.4f}",
            f"{median(arm, 'last_loss'):.4f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Interleave the arms and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=CASES, default="embedded")
    parser.add_argument("--model", default="", help="model folder, for a case that has none")
    parser.add_argument("--updates", type=int, default=0, help="a round, the first warms up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    case = CASES[options.case]
    case = replace(case, model=options.model or case.model, updates=options.updates or case.updates)
    if not case.model:
        raise SystemExit(f"--case {case.name} needs --model FOLDER")
    if options.arm:
        print("RESULT " + json.dumps(one_arm(case, options.arm)))
        return
    results: dict[str, list[Figures]] = {arm: [] for arm in ARMS}
    for _ in range(options.rounds):
        for arm, rounds in results.items():
            rounds.append(measure(case, arm))
    print(table(case, results))


if __name__ == "__main__":
    main()
