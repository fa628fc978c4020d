"""What a model's ``config.json`` says about its architecture: can nbtrain train it, how much fits.

No list of model families: a causal language model passes when every layer is full attention,
because the sampler keeps keys and values of the whole context. Whatever else a configuration
announces (windows, recurrent layers, encoders, images, quantised weights, own code) is refused
by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from nbtrain.errors import Problem

__all__ = ["architecture_problems", "max_context", "model_kind"]

_FULL = {"full_attention", "attention", "full", "global"}
_CAUSAL = ("ForCausalLM", "LMHeadModel")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")

# Names that recurrent, linear-attention and convolution layers go by, in a model type or in the
# name of a configuration key ("mamba_d_state", "linear_num_key_heads", "conv_L_cache", ...).
_RECURRENT = re.compile(
    r"mamba|rwkv|xlstm|recurrent|retnet|hyena|linear_attention|linear_attn|linear_(num|key|value|conv)_"
    r"|gated_delta|\blfm2|conv_l_cache|conv_kernel|ssm_|\blru_|time_step_rank|state_size|\bmem_len"
    r"|\bjamba|\bbamba|\bzamba|\bgriffin|falcon_h1|nemotron_h|kimi_linear",
    re.IGNORECASE,
)
# Lists of one word per layer (or per block of layers), in the spellings that models use.
_LAYER_LISTS = (
    "layer_types",
    "attention_types",
    "attention_layers",
    "layers_block_type",
    "block_types",
)
_WINDOWS = ("sliding_window", "attention_window_size", "attention_window", "attention_chunk_size")
_HINT_FULL = "Choose a causal language model in which every layer is full attention"


def model_kind(config: Mapping[str, Any]) -> str:
    """The model type that the configuration states, ``"unknown"`` when it states none."""
    return str(config.get("model_type") or "unknown")


def max_context(config: Mapping[str, Any]) -> int | None:
    """Largest number of positions, prompt and reply together; ``None`` when none is stated."""
    for key in _CONTEXT_KEYS:
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def architecture_problems(config: Mapping[str, Any], slug: str) -> list[Problem]:
    """Everything in the configuration that keeps the model from being trained."""
    problems = [
        *_task_problems(config, slug),
        *_window_problems(config, slug),
        *_layer_problems(config, slug),
        *_loading_problems(config, slug),
    ]
    if not problems and max_context(config) is None:
        problems.append(
            _problem(
                slug,
                "states no context length",
                allowed="one of " + ", ".join(_CONTEXT_KEYS),
            )
        )
    return problems


def _problem(
    slug: str,
    what: str,
    *,
    found: object = None,
    allowed: str | None = None,
    hint: str | None = None,
) -> Problem:
    return Problem("base_model_slug", f"the model {slug!r} {what}", found, allowed, hint=hint)


def _task_problems(config: Mapping[str, Any], slug: str) -> Iterable[Problem]:
    architectures = [str(a) for a in config.get("architectures") or ()]
    if config.get("is_encoder_decoder"):
        yield _problem(
            slug,
            f"is an encoder-decoder ({model_kind(config)})",
            found=architectures,
            allowed="causal language models",
        )
    elif "vision_config" in config or "audio_config" in config or "text_config" in config:
        yield _problem(
            slug,
            f"reads images or sound beside text ({model_kind(config)}); such models are not "
            "built in yet",
            found=architectures,
            allowed="causal language models of text",
        )
    elif architectures and not any(a.endswith(_CAUSAL) for a in architectures):
        yield _problem(
            slug,
            f"is no causal language model ({', '.join(architectures)})",
            found=architectures,
            allowed="architectures ending in ForCausalLM or LMHeadModel",
        )


def _window_problems(config: Mapping[str, Any], slug: str) -> Iterable[Problem]:
    if config.get("layer_types") is not None:
        return  # says it layer by layer
    for key in _WINDOWS:
        window = config.get(key)
        if not window or not _window_in_use(config, key):
            continue
        context = max_context(config)
        hint = _HINT_FULL
        if isinstance(window, int) and context is not None and window >= context:
            hint = f"The window is not smaller than the context: in a copy, set {key} to null"
        yield _problem(
            slug,
            f"attends within a sliding window ({key}: {window}); such layers are not built in yet",
            found=window,
            allowed="full attention",
            hint=hint,
        )


def _window_in_use(config: Mapping[str, Any], key: str) -> bool:
    if key != "sliding_window":
        return True
    if config.get("use_sliding_window") is False:
        return False
    # Qwen2's rule: only layers from max_window_layers on have the window.
    first, layers = config.get("max_window_layers"), config.get("num_hidden_layers")
    if isinstance(first, int) and isinstance(layers, int) and "use_sliding_window" in config:
        return first < layers
    return True


def _words(value: object) -> set[str]:
    if isinstance(value, str):
        return {value}
    if isinstance(value, (list, tuple)):
        return set().union(*map(_words, value)) if value else set()
    return set()


def _layer_problems(config: Mapping[str, Any], slug: str) -> Iterable[Problem]:
    other = sorted(set().union(*(_words(config.get(key)) for key in _LAYER_LISTS)) - _FULL)
    if other:
        yield _problem(
            slug,
            f"has layers that are not full attention ({', '.join(other)}); such layers are not "
            "built in yet",
            found=other,
            allowed="full_attention",
            hint=_HINT_FULL,
        )
        return
    named = [model_kind(config), *(k for k, v in config.items() if v not in (None, False, 0, []))]
    recurrent = [name for name in named if _RECURRENT.search(name)]
    if recurrent:
        yield _problem(
            slug,
            f"has recurrent or linear-attention layers ({recurrent[0]}); such layers are not "
            "built in yet",
            found=recurrent[0],
            allowed="full attention",
            hint=_HINT_FULL,
        )
    if config.get("num_kv_shared_layers"):
        yield _problem(
            slug,
            "shares keys and values between layers (num_kv_shared_layers); not built in yet",
            found=config["num_kv_shared_layers"],
            allowed="full attention with keys and values of its own in every layer",
            hint=_HINT_FULL,
        )


def _loading_problems(config: Mapping[str, Any], slug: str) -> Iterable[Problem]:
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        yield _problem(
            slug,
            f"has quantised weights (quantization_config: {method})",
            found=method,
            allowed="weights in bf16, fp16 or fp32",
            hint="Use the unquantised weights of the same model",
        )
    if config.get("auto_map"):
        yield _problem(
            slug,
            "brings code of its own (auto_map), which is never run",
            found=sorted(config["auto_map"]) if isinstance(config["auto_map"], Mapping) else None,
            allowed="architectures that transformers has itself",
            hint="If transformers knows its model_type, remove auto_map in a copy of the folder",
        )
    if not config.get("model_type"):
        yield _problem(slug, "states no model_type in config.json")
