"""Everything a supervised run needs before its first update, and all that is wrong with it.

No trainer is made here, so that the checks can be had without training.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import PreTrainedTokenizerBase

from nbtrain.catalog import Catalog, tokenizer_digest
from nbtrain.catalog.architecture import carries_over
from nbtrain.data.datasets import DatasetRegistry
from nbtrain.data.masks import LossRules
from nbtrain.data.rendering import WRITES_DATE, Renderer, end_ids_in, writes_date
from nbtrain.errors import NbtrainError, Problem, Refused, StartChecksFailed
from nbtrain.plan.checks import Check
from nbtrain.plan.descriptor.document import in_flat
from nbtrain.plan.resolved import DatasetRef, ResolvedPlan
from nbtrain.plan.supervised_memory import SupervisedMemory, memory_of
from nbtrain.rollout.forward import described
from nbtrain.rollout.ranks import Ranks
from nbtrain.store import Store
from nbtrain.training.adapted import AdaptedModel, load_tokenizer
from nbtrain.training.base_files import base_folder, loading
from nbtrain.training.environment import emulated, free_memory
from nbtrain.training.supervised import checks
from nbtrain.training.supervised.model import leaves_lean, load_model
from nbtrain.training.supervised.order import Order
from nbtrain.training.supervised.packing import pack, unpacked
from nbtrain.training.supervised.rows import TokenizedRows
from nbtrain.training.supervised.scores import RowScores
from nbtrain.training.supervised.tokenizing import Tokenized, tokenize

__all__ = ["Preparation", "Prepared", "naming"]

log = logging.getLogger("nbtrain.training")


def naming(plan: ResolvedPlan) -> Callable[[str], str]:
    """What a setting is called where the plan was stated."""
    return plan.called


def _flat(problem: Problem) -> Problem:
    """A refusal of rows with the names of options for what the data's floor calls fields."""
    hint = None if problem.hint is None else in_flat(problem.hint)
    return replace(problem, message=in_flat(problem.message), hint=hint)


@dataclass(slots=True)
class Prepared:
    """What was made ready. ``problems`` is everything that stops the run; then parts may lack.

    ``remarks`` stop nothing. ``ends`` are the ids that end a reply.
    """

    checks: list[Check] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    model: AdaptedModel | None = None
    tokenizer: PreTrainedTokenizerBase | None = None
    tokenizer_fingerprint: str = ""
    ends: tuple[int, ...] = ()
    rows: TokenizedRows | None = None
    validation: TokenizedRows | None = None
    order: Order | None = None
    memory: SupervisedMemory | None = None

    @property
    def pad_id(self) -> int:
        """What stands where there is nothing; any id does, since places decide."""
        assert self.tokenizer is not None
        return int(self.tokenizer.pad_token_id or 0)

    def close(self) -> None:
        """Close the files of rows."""
        for rows in (self.rows, self.validation):
            if rows is not None:
                rows.close()


class Says(Protocol):
    """Told what is being done; ``now`` where it may take long without another word."""

    def __call__(self, text: str, /, *, now: bool = False) -> None: ...


def _silent(text: str, /, *, now: bool = False) -> None:
    return


class Preparation:
    """Tokenizes, loads and checks. ``scratch`` is a folder for tokenized rows.

    ``says`` is told what is being done, ``tick`` is called often; both may raise to stop.
    Of several ranks rank 0 tokenizes, and all read its files.
    """

    def __init__(
        self,
        store: Store,
        plan: ResolvedPlan,
        scratch: Path,
        *,
        ranks: Ranks,
        device: torch.device,
        says: Says = _silent,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._store, self._plan, self._scratch = store, plan, scratch
        self._ranks, self._device = ranks, device
        self._says, self._tick = says, tick
        self._name = naming(plan)
        self._ready = Prepared()

    @property
    def memory(self) -> SupervisedMemory | None:
        """What the longest pass is expected to need, as soon as that is known."""
        return self._ready.memory

    def run(self) -> Prepared:
        """Do all of it. What is wrong stands in the answer; nothing but a stop is raised."""
        ready, plan = self._ready, self._plan
        self._dividing()
        folder, changed = base_folder(self._store, plan)
        ready.problems += changed
        found = None if folder is None else self._data(folder)
        if found is not None and ready.rows is not None and len(ready.rows):
            self._lay_out(found)
            if not changed:
                self._memory(found)
        if folder is not None and not changed and "memory" not in self._refused():
            self._model(folder)
        self._packing()
        names = {
            "packing": self._name("packing"),
            "adapter_targets": self._name("lora_target_modules"),
        }
        ready.problems += checks.problems_of(ready.checks, names)
        every = self._ranks.gather(ready.problems)
        ready.problems = list(dict.fromkeys(p for one in every for p in one))
        return ready

    # --- data -----------------------------------------------------------------------------------

    def _data(self, folder: Path) -> Tokenized | None:
        """The tokenizer of ``folder``, and the rows under it; ``None`` where there are none."""
        ready = self._ready
        try:
            with loading(self._plan, "the tokenizer"):
                ready.tokenizer = load_tokenizer(folder)
            ready.tokenizer_fingerprint = tokenizer_digest(folder)
            ready.ends = tuple(sorted(end_ids_in(folder, ready.tokenizer)))
            if writes_date(ready.tokenizer):
                ready.remarks.append(WRITES_DATE)
            return self._tokenize(ready.tokenizer)
        except Refused as refused:
            ready.problems += refused.problems
        except NbtrainError as error:
            ready.problems.append(Problem("dataset", str(error)))
        return None

    def _tokenize(self, tokenizer: PreTrainedTokenizerBase) -> Tokenized | None:
        plan, ready = self._plan, self._ready
        assert plan.dataset is not None
        renderer = Renderer(tokenizer, ready.ends)
        if self._ranks.rank == 0:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._ranks.gather(None)
        most = None if plan.smoke is None else plan.smoke.slice_size
        found, ready.rows = self._side(plan.dataset, renderer, "train", most)
        if plan.validation_dataset is not None:
            _, ready.validation = self._side(plan.validation_dataset, renderer, "validation", None)
        return found

    def _side(
        self, ref: DatasetRef, renderer: Renderer, side: str, most: int | None
    ) -> tuple[Tokenized, TokenizedRows | None]:
        """One dataset, tokenized by rank 0 for all."""
        plan, ready, folder = self._plan, self._ready, self._scratch / side
        found: Tokenized | None = None
        failed: NbtrainError | None = None
        if self._ranks.rank == 0:
            self._says(f"reading the dataset {ref.name or ref.dataset_id[:12]}")
            try:
                found = tokenize(
                    DatasetRegistry(self._store).get(ref.dataset_id).verify(),
                    renderer,
                    loss_rules(plan),
                    folder,
                    max_tokens=plan["max_seq_length"],
                    truncation=plan["truncation"],
                    source=ref.name or ref.dataset_id[:12],
                    most=most,
                    progress=self._progress,
                )
            except NbtrainError as error:
                failed = error
        found, failed = self._ranks.gather((found, failed))[0]
        if failed is not None:
            raise failed
        assert found is not None
        name = "" if side == "train" else "validation"
        ready.checks += checks.row_checks(found, name=name)
        ready.problems += map(_flat, found.problems) if plan.flat else found.problems
        if found.rows:
            rate = f"{found.rows:,} rows tokenised"
            ready.remarks.append(f"{name} {rate} at {found.rate:,.0f} rows/s".strip())
        return found, TokenizedRows(folder)

    def _progress(self, done: int, total: int) -> None:
        if done == 1 or done % 16 == 0:
            self._says(f"tokenising {done:,} of {total:,} rows")
            self._tick()

    def _lay_out(self, found: Tokenized) -> None:
        plan, ready = self._plan, self._ready
        assert ready.rows is not None
        lengths = ready.rows.lengths.tolist()
        sequences = (
            pack(lengths, plan["max_seq_length"]) if plan["packing"] else unpacked(len(lengths))
        )
        ready.order = Order(
            sequences,
            seed=plan["seed"],
            shuffle=plan["shuffle"],
            per_pass=plan["micro_batch_per_gpu"],
            passes=plan["gradient_accumulation"],
        )
        if plan["packing"]:
            ready.remarks.append(f"{found.rows:,} rows packed into {len(sequences):,} sequences")

    def _dividing(self) -> None:
        """The passes of an update are dealt out evenly to the ranks."""
        passes, ranks = self._plan["gradient_accumulation"], self._ranks.size
        if passes % ranks:
            accumulation, gpus = self._name("gradient_accumulation"), self._name("gpus")
            message = f"{accumulation} {passes} cannot be divided by {gpus} {ranks}"
            hint = f"State {accumulation} as a multiple of {ranks}, or {gpus}: 1"
            self._ready.problems.append(Problem(gpus, message, ranks, hint=hint))

    # --- model ----------------------------------------------------------------------------------

    def _memory(self, found: Tokenized) -> None:
        plan, ready = self._plan, self._ready
        model = Catalog(self._store).base_model(plan.base_model.slug)
        longest = plan["max_seq_length"] if plan["packing"] else found.longest
        ready.memory = memory_of(
            plan, model, longest=longest, trained=found.trained_tokens / found.tokens
        )
        free = free_memory(self._device, ranks=self._ranks.size)
        ready.checks.append(checks.memory_check(ready.memory, free))

    def _model(self, folder: Path) -> None:
        plan, ready = self._plan, self._ready
        self._says("loading the model", now=True)
        self._tick()
        try:
            with loading(plan, "the model"):
                ready.model = load_model(plan, folder, self._device)
        except StartChecksFailed as refused:
            for problem in refused.problems:
                if problem.field == "lora_target_modules":
                    target = self._name(problem.field)
                    said = str(problem).replace(problem.field, target)
                    ready.checks.append(
                        Check("adapter_targets", 0, "modules", said, refuse=1, at_least=True)
                    )
                else:
                    ready.problems.append(self._named(problem))
            return
        ready.checks.append(checks.adapter_targets(ready.model, plan["lora_target_modules"]))
        if isinstance(ready.model.model.get_output_embeddings(), BaseTunerLayer):
            target = self._name("lora_target_modules")
            message = f"{target} covers the output head, which TRL does not adapt"
            ready.problems.append(Problem(target, message, plan["lora_target_modules"]))
        remark = emulated("bf16", self._device) if plan["precision"] != "fp32" else None
        if remark is not None:
            log.warning("start check: %s", remark)

    def _named(self, problem: Problem) -> Problem:
        """The problem with its setting called as the plan calls it."""
        name = self._name(problem.field)
        message = problem.message.replace(problem.field, name)
        return replace(problem, field=name, message=message)

    def _packing(self) -> None:
        plan, ready = self._plan, self._ready
        if not plan["packing"] or ready.model is None or ready.order is None or ready.rows is None:
            return
        mixes = carries_over(described(ready.model.model.config))
        if mixes is not None:
            name = self._name("packing")
            message = f"{name}: the model {mixes}, which would carry one packed row into the next"
            ready.problems.append(Problem(name, message, True, "false"))
        self._says("comparing packed rows with rows alone", now=True)
        self._tick()
        scores = RowScores(ready.model.model, lean=leaves_lean(plan))
        check = checks.packing_check(
            scores, ready.rows, ready.order.sequences, plan["micro_batch_per_gpu"]
        )
        ready.checks.append(check)

    def _refused(self) -> set[str]:
        return {check.name for check in self._ready.checks if check.verdict == "refused"}


def loss_rules(plan: ResolvedPlan) -> LossRules:
    """Which tokens the plan trains on."""
    return LossRules(
        assistant_turns=plan["assistant_turns"],
        tool_calls=plan["train_on_tool_calls"],
        tool_results=plan["train_on_tool_results"],
        mask_column=plan["explicit_loss_mask_column"],
    )
