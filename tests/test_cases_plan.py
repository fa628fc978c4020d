"""Every field of a descriptor, followed from the document into what trains.

Each is stated otherwise than its default, alone, in a document that the client resolves; the job's
own parts are then built from that plan, and a supervised one makes its updates. What is looked at
is never the plan. A field that nothing could receive is refused by its name, or is of the record
alone; the tables name all there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft.tuners.lora.layer import LoraLayer
from plan_world import put
from supervised_world import chats
from torch import nn

from nbtrain.client import Client
from nbtrain.errors import PlanRefused
from nbtrain.jobs.environment import rank_count
from nbtrain.plan.descriptor.table import FIELDS, fields_of
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.plan.schedule import schedule_of, trace
from nbtrain.rollout.admission import AS_GRADED
from nbtrain.rollout.ranks import Alone
from nbtrain.store import Store, new_id, open_store
from nbtrain.training import setup
from nbtrain.training.job import Job
from nbtrain.training.prepare_model import weights_folder
from nbtrain.training.supervised import preparing, tokenizing
from nbtrain.training.supervised.job import SupervisedJob
from nbtrain.training.supervised.loop import SupervisedLoop
from nbtrain.training.supervised.preparing import Preparation, Prepared
from nbtrain.training.supervised.rates import rates_of
from nbtrain.training.supervised.restoring import total_steps
from nbtrain.training.supervised.smoke import SmokeCheck
from nbtrain.training.work import work_of

CPU = torch.device("cpu")
TINY = "nbtrain/tiny"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client with the names that the documents use."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBTRAIN_HOME", str(tmp_path_factory.mktemp("home")))
        client = Client()
        client.workloads.create("t")
        rows = [row | {"mark": [0, 1]} for row in chats(16)]
        client.datasets.register("d", rows)
        client.datasets.register("other", chats(9))
        client.datasets.register("held-out", chats(3))
        yield client


@pytest.fixture(scope="module")
def store(client: Client) -> Iterator[Store]:
    with open_store() as store:
        yield store


def resolved(client: Client, document: dict[str, Any]) -> ResolvedPlan:
    """The plan of a document as a job reads it, that is behind JSON."""
    return ResolvedPlan.from_json(client.training.resolve(document).plan.to_json())


# --- a supervised run --------------------------------------------------------------------------


def document(**config: Any) -> dict[str, Any]:
    config = {"dataset": "d", "method": "sft", "maxSeqLength": 64} | config
    return {"kind": "run", "workload": "t", "baseModel": TINY, "config": config}


@dataclass
class Recorder:
    """What a job would have committed."""

    updates: list[Any] = field(default_factory=list)
    validated: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)

    def update(self, done: Any, between: dict[str, float]) -> None:
        self.updates.append(done)

    def validation(self, row: dict[str, Any]) -> None:
        self.validated.append(row["step"])

    def checkpoint(self, step: int, reason: str, state: Any) -> None:
        self.saved.append(step)


@dataclass
class Received:
    """What a supervised job made of a plan: its parts, and what ran through them."""

    ready: Prepared
    plan: ResolvedPlan
    adapter: dict[str, torch.Tensor]
    keep: int | None
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    recorder: Recorder = field(default_factory=Recorder)
    decay: set[float] = field(default_factory=set)
    clipped: set[float] = field(default_factory=set)
    passes: list[list[int]] = field(default_factory=list)
    """Sequences in every forward pass, update by update."""

    def modules(self, kind: type[nn.Module] = LoraLayer) -> dict[str, Any]:
        model: nn.Module = self.ready.model.model  # type: ignore[union-attr]
        return {name: one for name, one in model.named_modules() if isinstance(one, kind)}

    @property
    def config(self) -> Any:
        return self.ready.model.model.config  # type: ignore[union-attr]

    @property
    def base(self) -> Any:
        return self.ready.model.model.get_base_model()  # type: ignore[union-attr]

    @property
    def rates(self) -> list[float]:
        return [done.learning_rate for done in self.recorder.updates]

    @property
    def steps(self) -> list[int]:
        return [done.step for done in self.recorder.updates]

    @property
    def rows(self) -> list[int]:
        return list(self.recorder.updates[0].rows)


def received(store: Store, plan: ResolvedPlan, folder: Path) -> Received:
    """Prepare ``plan`` and train it to its end."""
    run = store.create_run(new_id(), plan={}, resolved=plan)
    job = SupervisedJob(store, run, 1)
    plan = job._plan
    with pytest.MonkeyPatch.context() as patch:
        tokenized: list[dict[str, Any]] = []
        true_tokenize, true_clip = tokenizing.tokenize, nn.utils.clip_grad_norm_

        def tokenize(dataset: Any, renderer: Any, rules: Any, folder: Path, **named: Any) -> Any:
            tokenized.append(named | {"rules": rules})
            return true_tokenize(dataset, renderer, rules, folder, **named)

        patch.setattr(preparing, "tokenize", tokenize)
        ready = Preparation(store, plan, folder / "rows", ranks=Alone(), device=CPU).run()
        with closing(ready):
            assert ready.problems == []
            assert ready.model is not None
            keep = job._recorder(ready)._keep
            found = Received(ready, plan, ready.model.adapter_state(), keep, tokenized)

            def clip(parameters: Any, norm: float) -> Any:
                found.clipped.add(norm)
                return true_clip(parameters, norm)

            patch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
            _train(store, plan, ready, found, folder)
    return found


def _train(store: Store, plan: ResolvedPlan, ready: Prepared, found: Received, at: Path) -> None:
    loop = SupervisedLoop(
        plan,
        ready,
        total_steps=total_steps(plan, ready),
        folder=at / "trainer",
        recorder=found.recorder,  # type: ignore[arg-type]
        ranks=Alone(),
        environment={},
        tick=lambda: None,
    )

    def seen(module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training:
            step = len(found.recorder.updates)
            found.passes += [[] for _ in range(step + 1 - len(found.passes))]
            found.passes[step].append(len(kwargs["input_ids"]))

    assert ready.model is not None
    ready.model.model.register_forward_pre_hook(seen, with_kwargs=True)
    assert loop.run().failure is None
    optimizer = loop._trainer.optimizer
    assert optimizer is not None
    found.decay = {group["weight_decay"] for group in optimizer.param_groups}


@pytest.fixture(scope="module")
def plain(client: Client, store: Store, tmp_path_factory: pytest.TempPathFactory) -> Received:
    return received(store, resolved(client, document()), tmp_path_factory.mktemp("plain"))


def four_bit(r: Received) -> bool:
    import bitsandbytes

    return bool(r.modules(bitsandbytes.nn.Linear4bit))


HYPER, DATA = "config.hyperparams", "config.data"
Look = Callable[[Received], Any]
SUPERVISED: dict[str, tuple[Any, Look, Any]] = {
    "config.dataset": ("other", lambda r: len(r.ready.rows or ()), 9),
    "config.maxSeqLength": (48, lambda r: r.tokenized[0]["max_tokens"], 48),
    f"{HYPER}.lora.rank": (
        4, lambda r: {one.lora_A["default"].out_features for one in r.modules().values()}, {4},
    ),
    f"{HYPER}.lora.alpha": (
        4.0, lambda r: {one.scaling["default"] for one in r.modules().values()}, {0.5},
    ),
    f"{HYPER}.lora.dropout": (
        0.25,
        lambda r: {getattr(m.lora_dropout["default"], "p", 0) for m in r.modules().values()},
        {0.25},
    ),
    f"{HYPER}.lora.targetModules": (
        ".*q_proj", lambda r: {name.rpartition(".")[2] for name in r.modules()}, {"q_proj"},
    ),
    f"{HYPER}.optimizer.learningRate": (
        3e-4, lambda r: [round(rate * 6 / 3e-4, 9) for rate in r.rates], [6, 5, 4, 3, 2, 1],
    ),
    f"{HYPER}.optimizer.weightDecay": (0.25, lambda r: r.decay, {0.25}),
    f"{HYPER}.optimizer.maxGradNorm": (0.25, lambda r: r.clipped, {0.25}),
    f"{HYPER}.scheduler.kind": ("constant", lambda r: r.rates, [1e-4] * 6),
    f"{HYPER}.scheduler.warmupRatio": (
        0.5, lambda r: [round(rate / 1e-4, 3) for rate in r.rates[:3]], [0.333, 0.667, 1],
    ),
    f"{HYPER}.training.epochs": (5, lambda r: r.steps, list(range(1, 11))),
    f"{HYPER}.training.maxSteps": (2, lambda r: r.steps, [1, 2]),
    f"{HYPER}.training.microBatchPerGpu": (2, lambda r: r.passes[0], [2] * 4),
    f"{HYPER}.training.gradientAccumulation": (2, lambda r: r.passes[0], [4, 4]),
    f"{HYPER}.training.validationFrequencySteps": (
        4, lambda r: r.recorder.validated, [0, 4, 6],
    ),
    f"{HYPER}.training.seed": (
        7, lambda r: (r.rows, next(iter(r.adapter.values())).flatten()[:3].tolist()), None,
    ),
    "config.model.precision": ("INT4", four_bit, True),
    "config.model.gradientCheckpointing": (True, lambda r: r.base.is_gradient_checkpointing, True),
    "config.model.attentionImplementation": (
        "eager", lambda r: r.config._attn_implementation, "eager",
    ),
    f"{DATA}.truncation": ("right", lambda r: r.tokenized[0]["truncation"], "right"),
    f"{DATA}.packing": (
        True, lambda r: len(r.rows) > r.recorder.updates[0].sequences, True,
    ),
    f"{DATA}.shuffle": (False, lambda r: r.rows, list(range(8))),
    f"{DATA}.validationDataset": ("held-out", lambda r: len(r.ready.validation or ()), 3),
    "config.loss.assistantTurns": (
        "all", lambda r: r.tokenized[0]["rules"].assistant_turns, "all",
    ),
    "config.loss.trainOnToolCalls": (
        False, lambda r: r.tokenized[0]["rules"].tool_calls, False,
    ),
    "config.loss.trainOnToolResults": (
        True, lambda r: r.tokenized[0]["rules"].tool_results, True,
    ),
    "config.loss.explicitLossMaskColumn": (
        "mark", lambda r: r.tokenized[0]["rules"].mask_column, "mark",
    ),
    "execution.microBatchSequences": (3, lambda r: r.passes[0], [3, 3, 2]),
    "execution.saveEvery": (2, lambda r: r.recorder.saved, [2, 4, 6]),
    "execution.keepAdapters": (2, lambda r: r.keep, 2),
}  # fmt: skip
"""Path: another value, what a job has of it, and what that must be (``None``: another)."""
WITH = {
    f"{HYPER}.training.validationFrequencySteps": {f"{DATA}.validationDataset": "held-out"},
    f"{HYPER}.scheduler.minLearningRateRatio": {f"{HYPER}.scheduler.kind": "cosine"},
}
"""What a field needs beside it."""
ELSEWHERE = {
    f"{HYPER}.scheduler.minLearningRateRatio", "execution.gpus", "baseModel", "config.method",
    "smoke.sliceSize", "smoke.maxSteps", "smoke.threshold",
}  # fmt: skip
"""Supervised fields with a test of their own below."""
RECORDED = {"kind", "workload", "grader", "submissionId", "description", "configName"}
"""What the record or the store takes, and no trainer could."""
REFUSED: dict[str, Any] = {
    f"{HYPER}.optimizer.kind": "lion",
    "config.rlHyperparams.optimizer.kind": "lion",
    "config.rlHyperparams.lora.dropout": 0.1,
    "config.rlHyperparams.stalenessThreshold": 1,
    "config.warmStartConfigHash": "a" * 64,
    "config.model.weightPrecision": "bf16",
    "config.engineSettings.engine": "verl",
    "execution.rolloutGpus": 1,
    "execution.deviceProfile": "another",
    "execution.engine": "verl",
    "execution.rollout.memoryShare": 0.4,
    "execution.memory.offload.weights": True,
    "execution.hostMemoryGiB": 1e6,
}
"""What no run can follow is refused by its name; host memory is compared and goes no further."""


def stated(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    for name, beside in WITH.get(path, {}).items():
        document = put(document, name, beside)
    return put(document, path, value)


def test_the_tables_name_every_supervised_field() -> None:
    every = {one.path for one in fields_of("sft")}
    assert set(SUPERVISED) | ELSEWHERE | RECORDED | REFUSED.keys() & every == every


@pytest.mark.parametrize("path", list(SUPERVISED))
def test_a_supervised_job_receives_what_is_stated(
    path: str, client: Client, store: Store, plain: Received, tmp_path: Path
) -> None:
    value, look, expected = SUPERVISED[path]
    found = look(received(store, resolved(client, stated(document(), path, value)), tmp_path))
    assert found != look(plain)
    assert expected is None or found == expected


def test_the_floor_of_a_cosine_is_the_last_rate(
    client: Client, store: Store, tmp_path: Path
) -> None:
    path = f"{HYPER}.scheduler.minLearningRateRatio"
    found = received(store, resolved(client, stated(document(), path, 0.25)), tmp_path)
    assert found.rates[-1] == pytest.approx(0.25e-4)
    assert found.rates == sorted(found.rates, reverse=True)


@pytest.mark.parametrize(("ratio", "total"), [(0.07, 100), (0.29, 100), (0.1, 30), (0.0, 7)])
def test_a_job_trains_at_the_rates_that_its_plan_shows(
    ratio: float, total: int, client: Client
) -> None:
    """Also where a share of the updates is not a whole number in floats: 0.07 x 100 > 7."""
    made = put(document(), f"{HYPER}.scheduler.warmupRatio", ratio)
    made = put(made, f"{HYPER}.training.epochs", 100)
    plan = resolved(client, put(made, f"{HYPER}.training.maxSteps", total))
    rate = rates_of(plan, plan.total_steps)
    shown = trace(schedule_of(plan.options, plan.total_steps))
    assert [rate(step) for step in range(1, total + 1)] == shown
    assert shown.index(max(shown)) == max(round(ratio * total) - 1, 0)


def test_another_base_model_is_the_one_that_is_loaded(
    client: Client, store: Store, plain: Received, tmp_path: Path
) -> None:
    import shutil

    from transformers import AutoModelForCausalLM

    source = Path(plain.plan.base_model.location)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(1.0)
    folder = tmp_path / "moved"
    shutil.copytree(source, folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder)
    client.base_models.select(folder, "moved")
    found = received(store, resolved(client, document() | {"baseModel": "moved"}), tmp_path / "job")
    mean = [one.base.get_input_embeddings().weight.float().mean() for one in (plain, found)]
    assert float(mean[1] - mean[0]) == pytest.approx(1.0, abs=1e-2)


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_there_are_as_many_ranks_as_gpus(method: str, client: Client) -> None:
    plan = resolved(client, document(method=method, **_rewarded(method)))
    assert rank_count(plan.to_json()) == 1
    plan = resolved(
        client, document(method=method, **_rewarded(method)) | {"execution": {"gpus": 2}}
    ) if method == "grpo" else resolved(
        client,
        put(document(), f"{HYPER}.training.gradientAccumulation", 2) | {"execution": {"gpus": 2}},
    )  # fmt: skip
    assert rank_count(plan.to_json()) == 2


def test_a_smoke_check_receives_its_three_fields(
    client: Client, store: Store, tmp_path: Path
) -> None:
    smoke = {"sliceSize": 5, "maxSteps": 3, "threshold": 0.5}
    plan = resolved(client, document() | {"smoke": smoke})
    ready = Preparation(store, plan, tmp_path / "rows", ranks=Alone(), device=CPU).run()
    with closing(ready):
        check = SmokeCheck(store, plan, ready, ranks=Alone(), device=CPU)
        assert len(ready.rows or ()) == 5
        assert total_steps(plan, ready) == 3
        assert check.until(3) is not None
        verdict = check.verdict()
    assert (verdict["threshold"], verdict["rows"], verdict["updates"]) == (0.5, 5, 3)


# --- a reinforcement run -----------------------------------------------------------------------


def _rewarded(method: str) -> dict[str, Any]:
    return {} if method == "sft" else {"reward": {"terms": [{"kind": "exact", "weight": 1.0}]}}


@dataclass
class Parts:
    """What a reinforcement job put together."""

    loop: Any
    policy: Any
    tasks: int
    keep: int

    @property
    def collector(self) -> Any:
        return self.loop._collector._settings

    @property
    def update(self) -> Any:
        return self.loop._updater.settings

    @property
    def lora(self) -> Any:
        return self.policy.model.peft_config["default"]

    @property
    def rates(self) -> list[float]:
        total = self.loop.settings.total_steps
        return [self.loop.settings.rate(step) for step in range(1, total + 1)]


def built(store: Store, plan: ResolvedPlan, folder: Path) -> Parts:
    """The loop of ``plan`` as its job builds it; nothing is sampled."""
    run = store.create_run(new_id(), plan={}, resolved=plan)
    job = Job(store, run, 1)
    work = work_of(store, plan, folder)
    policy = setup.load_policy(plan, weights_folder(plan, store.home), CPU)
    parts: Any = SimpleNamespace(
        policy=policy,
        flight=SimpleNamespace(lane=lambda **named: named),
        train=[],
        held_out=[],
        environment={},
        memory=None,
        tokenizer_fingerprint="",
    )
    loop = job._loop(parts, Alone(), lambda: None)  # type: ignore[arg-type]
    tasks = len(work.tasks.split(validation=False).train_tasks)
    return Parts(loop, policy, tasks, loop._recorder._keep)  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def rl_plain(client: Client, store: Store, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return built(store, resolved(client, rl_document()), tmp_path_factory.mktemp("rl"))


def rl_document() -> dict[str, Any]:
    return document(method="grpo", **_rewarded("grpo"))


RL = "config.rlHyperparams"
RlLook = Callable[[Parts], Any]
REINFORCEMENT: dict[str, tuple[Any, RlLook, Any]] = {
    "config.dataset": ("other", lambda p: p.tasks, 9),
    "config.method": ("gspo", lambda p: p.update.level, "sequence"),
    "config.maxSeqLength": (48, lambda p: p.collector.sampling.max_context, 48),
    f"{RL}.epochs": (3, lambda p: p.loop.settings.total_steps, 6),
    f"{RL}.maxSteps": (9, lambda p: p.loop.settings.total_steps, 9),
    f"{RL}.groupSize": (6, lambda p: p.collector.group_size, 6),
    f"{RL}.promptsPerStep": (4, lambda p: p.collector.batch_size, 4),
    f"{RL}.klBeta": (0.25, lambda p: p.update.kl_beta, 0.25),
    f"{RL}.temperature": (
        1.25, lambda p: (p.collector.sampling.temperature, p.update.temperature), (1.25, 1.25),
    ),
    f"{RL}.maxCompletionLength": (
        9,
        lambda p: (p.collector.sampling.max_new_tokens, p.collector.sampling.max_trajectory_tokens),
        (9, 9),
    ),
    f"{RL}.lora.rank": (4, lambda p: p.lora.r, 4),
    f"{RL}.lora.alpha": (3.0, lambda p: p.lora.lora_alpha, 3.0),
    f"{RL}.lora.targetModules": (
        ".*q_proj",
        lambda p: {n.split(".lora_")[0].rpartition(".")[2] for n in p.policy.trainable},
        {"q_proj"},
    ),
    f"{RL}.optimizer.learningRate": (3e-4, lambda p: max(p.rates), 3e-4),
    f"{RL}.optimizer.weightDecay": (
        0.25, lambda p: {g["weight_decay"] for g in p.loop._updater.optimizer.param_groups}, {0.25},
    ),
    f"{RL}.optimizer.maxGradNorm": (0.25, lambda p: p.update.max_grad_norm, 0.25),
    f"{RL}.scheduler.kind": ("cosine", lambda p: len(set(p.rates)), 2),
    f"{RL}.scheduler.warmupRatio": (0.9, lambda p: p.rates, [0.5e-5, 1e-5]),
    "execution.microBatchSequences": (3, lambda p: p.update.layout.sequences, 3),
    "execution.saveEvery": (2, lambda p: p.loop.settings.checkpoint_interval, 2),
    "execution.keepAdapters": (2, lambda p: p.keep, 2),
}  # fmt: skip
RL_ELSEWHERE = {
    f"{RL}.scheduler.minLearningRateRatio", "execution.gpus", "baseModel", "warmStartModelId",
}  # fmt: skip
"""With a test below, above, or with the warm starts."""
RL_REFUSED: dict[str, Any] = {
    "config.model.precision": "INT4",
    "config.model.gradientCheckpointing": True,
    "config.model.attentionImplementation": "eager",
}


def test_the_tables_name_every_reinforcement_field() -> None:
    every = {one.path for one in fields_of("grpo")}
    known = REINFORCEMENT.keys() | RL_ELSEWHERE | RL_REFUSED.keys() | RECORDED
    assert known | REFUSED.keys() & every == every


@pytest.mark.parametrize("path", list(REINFORCEMENT))
def test_a_reinforcement_job_receives_what_is_stated(
    path: str, client: Client, store: Store, rl_plain: Parts, tmp_path: Path
) -> None:
    value, look, expected = REINFORCEMENT[path]
    found = look(built(store, resolved(client, put(rl_document(), path, value)), tmp_path))
    assert found == expected != look(rl_plain)


def test_a_reinforcement_job_grades_as_it_is_told(rl_plain: Parts) -> None:
    assert rl_plain.collector.rules is AS_GRADED
    assert rl_plain.collector.max_staleness == 0
    assert rl_plain.collector.sampling.max_turns == 1


def test_the_floor_of_a_reinforcement_cosine(client: Client, store: Store, tmp_path: Path) -> None:
    made = put(rl_document(), f"{RL}.scheduler.kind", "cosine")
    made = put(made, f"{RL}.scheduler.minLearningRateRatio", 0.25)
    parts = built(store, resolved(client, made), tmp_path)
    assert parts.rates[-1] == pytest.approx(0.25e-5)


@pytest.mark.parametrize("path", [*REFUSED, *RL_REFUSED])
def test_what_no_job_could_follow_is_refused_by_name(path: str, client: Client) -> None:
    rl = path in RL_REFUSED or "sft" not in FIELDS[path].methods or "rollout." in path
    value = (REFUSED | RL_REFUSED)[path]
    with pytest.raises(PlanRefused) as refused:
        client.training.resolve(put(rl_document() if rl else document(), path, value))
    named = [problem.field for problem in refused.value.problems]
    assert any(one == FIELDS[path].name or path.startswith(f"config.{one}.") for one in named)
