"""The arms of :mod:`step_cost`: the same model, tasks and limits under nbtrain and under TRL.

Each runs in a process of its own and returns CPU seconds, tokens and seconds by part, step by step.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

GROUP = 8
RATE = 1e-5


@dataclass(frozen=True)
class Case:
    """What both sides run. ``preamble`` is the number of worked examples before a question."""

    name: str
    dtype: str
    groups: int
    new_tokens: int
    steps: int
    preamble: int = 0
    model: str = ""


PREAMBLE = (
    "You are a careful calculator. Work out the sum that you are asked for and answer with the "
    "result. Check the units first, then the tens, and carry where you must. "
)


def tasks_of(case: Case) -> list[dict[str, Any]]:
    """Addition tasks, with worked examples where prompts are to have a realistic length."""
    shots = []
    for a, b in ((12, 30), (41, 7))[: case.preamble]:
        shots += [
            {"role": "user", "content": f"{PREAMBLE}What is {a} + {b}?"},
            {"role": "assistant", "content": str(a + b)},
        ]
    rows = []
    for number in range(64):
        a, b = (number * 37) % 90 + 5, (number * 53) % 90 + 5
        question = {"role": "user", "content": f"What is {a} + {b}?"}
        rows.append({"prompt": [*shots, question], "answer": str(a + b)})
    return rows


def small_llama(folder: Path) -> None:
    """A random Llama of 5M weights and 4,096 tokens whose replies are ragged.

    One channel is the same in every embedding, and so in every hidden state; the end token's row
    of the head is larger there, so that every token ends its reply with a like chance.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "<|pad|>", "<|end|>"]
    words += [f"Ġ{number}" for number in range(4096 - len(words))]
    core = Tokenizer(models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|pad|>", "<|end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", eos_token="<|end|>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=640,
            num_hidden_layers=5,
            num_attention_heads=8,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    with torch.no_grad():
        table = model.get_output_embeddings().weight
        table[:, 0] = 0.1
        table[tokenizer.eos_token_id, 0] = 3.5
    model.save_pretrained(folder)


@dataclass
class Meter:
    """CPU seconds of this process and its workers, completion tokens, and seconds by part."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    workers: list[psutil.Process] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _last: float = 0.0
    _before: float = 0.0

    def start(self) -> None:
        self.workers = psutil.Process().children(recursive=True)
        self._last, self._before = time.process_time(), self._of_workers()

    def step(self, tokens: int) -> None:
        now, others = time.process_time(), self._of_workers()
        parts = dict(self.parts) | {"reward workers": others - self._before}
        cpu = now - self._last + others - self._before
        self.steps.append(
            {"cpu": cpu, "tokens": tokens, "parts": parts | {"rest": cpu - sum(parts.values())}}
        )
        self.parts.clear()
        self._last, self._before = now, others

    def timed(self, part: str, call: Callable[..., Any], *, inside: str = "") -> Callable[..., Any]:
        """``call``, its CPU seconds booked to ``part`` and taken from the part it is ``inside``."""

        def run(*args: Any, **named: Any) -> Any:
            began = time.process_time()
            try:
                return call(*args, **named)
            finally:
                spent = time.process_time() - began
                self.parts[part] += spent
                if inside:
                    self.parts[inside] -= spent

        return run

    def _of_workers(self) -> float:
        return sum(sum(worker.cpu_times()[:2]) for worker in self.workers)


def run_nbtrain(case: Case) -> Meter:
    """The parts that a job wires: sampler, reward workers, collector, layouts and update."""
    import torch

    torch.set_num_threads(1)
    from nbtrain.rewards import RewardPool, as_terms, pack
    from nbtrain.rollout.admission import AdmissionRules
    from nbtrain.rollout.collector import Collector, CollectorSettings
    from nbtrain.rollout.flight import Flight
    from nbtrain.rollout.limits import Sampling
    from nbtrain.rollout.ragged import RaggedSampler
    from nbtrain.rollout.tokens import decode_completion, end_ids, render_prompt
    from nbtrain.rollout.types import TaskView
    from nbtrain.training.policy import Policy, load_tokenizer
    from nbtrain.training.update import Updater, UpdateSettings

    folder = Path(case.model)
    tokenizer = load_tokenizer(folder)
    tasks = [
        TaskView(
            f"{n:016x}",
            render_prompt(tokenizer, row["prompt"], raw=False),
            row["prompt"],
            dict(row),
        )
        for n, row in enumerate(tasks_of(case))
    ]

    def reward(completion: str, task: dict[str, Any]) -> float:
        digits = "".join(c for c in completion if c.isdigit())
        return 1.0 if digits == task["answer"] else 0.1 * (len(completion) % 5)

    with tempfile.TemporaryDirectory() as scratch:
        packed, _ = pack(as_terms([reward]))
        path = Path(scratch) / "rewards.pkl"
        path.write_bytes(packed)
        policy = Policy.load(
            folder,
            precision=case.dtype,
            lora_rank=16,
            lora_alpha=32,
            target_modules="default",
            seed=0,
            device=torch.device("cpu"),
        )
        stops = end_ids(policy.model.generation_config, tokenizer)
        sampler = RaggedSampler(
            policy.model,
            slots=case.groups * GROUP,
            eos_ids=stops,
            pad_id=tokenizer.pad_token_id,
            max_context=1024,
        )
        meter = Meter()
        timed: Any = sampler
        timed.step = meter.timed("generation", sampler.step)
        torch.autograd.backward = meter.timed("backward", torch.autograd.backward, inside="forward")
        with RewardPool(
            path, workers=2, timeout_seconds=60, log_path=Path(scratch) / "log"
        ) as pool:
            flight = Flight(
                sampler, pool, lambda ids: decode_completion(tokenizer, ids, stops), chat=True
            )
            everything = AdmissionRules(1, True, True, True, True, True, True)
            limits = Sampling(case.new_tokens, 1024, 1024)
            settings = CollectorSettings(case.groups, GROUP, 1024, 1e9, 0, everything, limits)
            collector = Collector(tasks, flight, settings)
            updater = Updater(
                policy, UpdateSettings("token", 0.2, 0.2, 0.0, 1.0, 1.0), weight_decay=0.0
            )
            update = meter.timed("forward", updater.update)
            pool.check_start()
            gc.collect()
            gc.freeze()  # as a job does
            meter.start()
            for step in range(1, case.steps + 1):
                batch = collector.collect(step)
                update(batch.used, RATE, version=step - 1)
                sampler.new_policy(step)
                done = [t for judged in batch.groups for t in judged.group.trajectories]
                meter.step(sum(len(t.token_ids) for t in done))
    return meter


def run_trl(case: Case, *, best: bool) -> Meter:
    """Stock GRPOTrainer; ``best`` are the settings that are fastest on a CPU."""
    import torch

    torch.set_num_threads(1)
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(case.model)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[case.dtype]
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=dtype)
    seen = [0]

    def score(text: str, answer: str) -> float:
        digits = "".join(c for c in text if c.isdigit())
        return 1.0 if digits == answer else 0.1 * (len(text) % 5)

    def reward(completions: Any, answer: Any, completion_ids: Any, **_: Any) -> list[float]:
        seen[0] += sum(len(ids) for ids in completion_ids)
        return [score(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]

    meter = Meter()
    with tempfile.TemporaryDirectory() as scratch:
        config = GRPOConfig(
            output_dir=scratch,
            use_cpu=True,
            bf16=False,
            max_steps=case.steps,
            per_device_train_batch_size=case.groups * GROUP,
            num_generations=GROUP,
            max_completion_length=case.new_tokens,
            beta=0.0,
            learning_rate=RATE,
            loss_type="grpo",
            report_to=[],
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
            **({"gradient_checkpointing": False} if best else {}),
        )
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(tasks_of(case)),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
        )
        trainer._generate = meter.timed("generation", trainer._generate)
        trainer.compute_loss = meter.timed("forward", trainer.compute_loss)
        trainer.accelerator.backward = meter.timed("backward", trainer.accelerator.backward)

        class Count(TrainerCallback):  # type: ignore[misc]
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                meter.start()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                meter.step(seen[0])
                seen[0] = 0

        trainer.add_callback(Count())
        trainer.train()
    return meter
