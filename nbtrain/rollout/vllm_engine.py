"""vLLM's engine in this process. vLLM is imported only when an engine is made."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nbtrain.errors import Problem, StartChecksFailed
from nbtrain.rollout.vllm_scoring import Drawing, Scoring

__all__ = ["VllmEngine", "prepare_process"]

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as largest rank; an adapter of a lower one fits in."""


def prepare_process(*, cpu: bool) -> None:
    """Set the environment variables vLLM needs to run inside this process; call before engines.

    On the CPU it would otherwise bind threads to cores of its own choice, and compile its count
    of ranks for 15 s. ``VLLM_CPU_KVCACHE_SPACE``, which would win over the engine's own budget,
    is removed.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if cpu:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


class VllmEngine:
    """vLLM's engine for the base model in ``folder``. One serves a process until its end.

    (vLLM keeps process groups that all its engines share; the first one that is collected takes
    them away from the others.)

    Parameters
    ----------
    folder
        The base model, in Hugging Face's format.
    dtype
        Of weights and adapters: ``"float32"`` or ``"bfloat16"``.
    slots, max_context
        Most replies at a time, and most tokens of prompt and reply together.
    kv_budget_bytes
        Most memory for keys and values; where all slots need less, that is taken, and all at
        once. The base weights and the adapters come on top.
    lora_rank
        Rank of the adapters.
    max_versions
        Policy versions that may be sampling at a time; requests of one more wait.
    drawings
        Every way in which requests will be drawn: the log-probs are chosen to be right for these.
    seed
        vLLM's own; requests bring theirs.
    eager
        Run without compiling the model: faster to start, slower on a GPU.

    Raises
    ------
    StartChecksFailed
        When no log-probs vLLM has are right for all ``drawings``, the adapter's rank is too high,
        or this process is one of several ranks.
    ValueError
        When vLLM does not take the model, or the budget is too small for one full context.
    """

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        slots: int,
        max_context: int,
        kv_budget_bytes: int,
        lora_rank: int,
        max_versions: int,
        drawings: Sequence[Drawing],
        seed: int,
        eager: bool,
    ) -> None:
        _refuse_ranks()
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        architecture = (config.get("architectures") or ["model of unknown architecture"])[0]
        self.scoring = Scoring.of(drawings, architecture)
        self.slots = slots
        self.max_context = max_context
        overrides = {}
        if self.scoring.scaled is not None:
            overrides["logit_scale"] = config.get("logit_scale", 1.0) / self.scoring.scaled
        rank = _vllm_rank(lora_rank)
        # Blocks have up to 256 tokens, and one is vLLM's own.
        tokens = (slots + 1) * (max_context // 256 + 1) * 256
        with _process_left_alone():
            from vllm import EngineArgs, LLMEngine

            self.engine: Any = LLMEngine.from_engine_args(
                EngineArgs(
                    model=str(folder),
                    skip_tokenizer_init=True,
                    dtype=dtype,
                    seed=seed,
                    max_model_len=max_context,
                    max_num_seqs=slots,
                    hf_overrides=overrides,
                    logprobs_mode=self.scoring.mode,
                    enable_lora=True,
                    max_lora_rank=rank,
                    max_loras=max_versions + 1,
                    kv_cache_memory_bytes=int(
                        min(kv_budget_bytes, _kv_need(config, dtype, tokens))
                    ),
                    # With a fixed budget vLLM only asks whether this share of a GPU is free.
                    gpu_memory_utilization=0.05,
                    enable_prefix_caching=True,
                    # A step then gives each running request its token in the same call.
                    async_scheduling=False,
                    enforce_eager=eager,
                    disable_log_stats=True,
                    use_tqdm_on_load=False,
                )
            )
        self.vocabulary: int = self.engine.model_config.get_vocab_size()
        self.numbers = itertools.count(1)
        """Adapters and requests are never called by a name twice: caches go by names."""


def _refuse_ranks() -> None:
    """Process groups of vLLM's own do not go together with those of several ranks."""
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        message = f"the vLLM sampler cannot run in {group.get_world_size()} ranks"
        hint = "Set gpus to 1, or sampler to 'ragged'"
        raise StartChecksFailed([Problem("gpus", message, group.get_world_size(), "1", hint=hint)])


def _kv_need(config: dict[str, Any], dtype: str, tokens: int) -> float:
    """Bytes of keys and values of so many tokens when every layer keeps all of them."""
    text = config.get("text_config") or config
    try:
        heads = text["num_attention_heads"]
        width = text.get("head_dim") or text["hidden_size"] // heads
        kept = text["num_hidden_layers"] * (text.get("num_key_value_heads") or heads) * width
    except KeyError:
        return math.inf
    return float(2 * kept * getattr(torch, dtype).itemsize * tokens)


def _vllm_rank(rank: int) -> int:
    """The smallest largest rank that vLLM takes and ``rank`` fits in."""
    if rank > _LORA_RANKS[-1]:
        message = f"lora_rank {rank} is too high for the vLLM sampler"
        allowed = f"1 to {_LORA_RANKS[-1]}"
        raise StartChecksFailed([Problem("lora_rank", message, found=rank, allowed=allowed)])
    return next(each for each in _LORA_RANKS if each >= rank)


@contextmanager
def _process_left_alone() -> Iterator[None]:
    """Take back what starting vLLM changes for the rest of the process.

    It seeds every generator, replaces ``torch.set_num_threads``, and preloads libraries into all
    later child processes.
    """
    kept = torch.get_rng_state(), random.getstate(), np.random.get_state()
    set_num_threads = torch.set_num_threads
    preload = os.environ.get("LD_PRELOAD")
    try:
        yield
    finally:
        torch.set_rng_state(kept[0])
        random.setstate(kept[1])
        np.random.set_state(kept[2])
        torch.set_num_threads = set_num_threads
        os.environ.pop("LD_PRELOAD", None)
        if preload is not None:
            os.environ["LD_PRELOAD"] = preload
