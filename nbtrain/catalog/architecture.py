"""What a model's ``config.json`` says about its architecture: can nbtrain train it, with which
sampler, and how much fits.

No list of model families. A language model whose layers all attend to the whole context can be
decoded by the ragged sampler, which holds keys and values itself; windows, recurrent layers and
the like keep their own caches and take the plain one (``own_cache`` says why). What cannot be
trained at all (encoder-decoders, sound, quantised weights, own code) is refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from nbtrain.errors import Problem

__all__ = [
    "architecture_problems",
    "carries_over",
    "max_context",
    "model_kind",
    "own_cache",
    "sampler_kind",
]

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
_SLIDING = {"sliding_attention", "sliding", "local"}
# Their positions come from the attention mask, which the ragged sampler replaces.
_MASK_POSITIONS = re.compile(r"^(bloom|mpt)$")
# Their state is kept in no cache of transformers, so rows can neither be copied nor dropped.
_NO_CACHE = re.compile(r"^(rwkv|xlstm|recurrent_gemma|reformer|xlnet|transfo-xl)")
_UNSTATED = {"gemma3": 131072, "gemma3_text": 131072}
"""Contexts of families whose published configurations leave out what their class fills in."""
_RECURRENT_CONTEXT = 8192
"""Bound for a model without positions, whose memory of the past is of one size whatever the
length: it ends a reply that would go on for ever."""


def model_kind(config: Mapping[str, Any]) -> str:
    """The model type that the configuration states, ``"unknown"`` when it states none."""
    return str(config.get("model_type") or "unknown")


def max_context(config: Mapping[str, Any]) -> int | None:
    """Largest number of positions, prompt and reply together; ``None`` when none is known.

    A purely recurrent model has none of its own and gets 8,192.
    """
    text = _text(config)
    for key in _CONTEXT_KEYS:
        value = text.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    if unstated := _UNSTATED.get(model_kind(text)) or _UNSTATED.get(model_kind(config)):
        return unstated
    if _recurrent(text) and "num_attention_heads" not in text:
        return _RECURRENT_CONTEXT
    return None


def sampler_kind(config: Mapping[str, Any]) -> Literal["ragged", "generate"]:
    """The sampler that can decode the model: the ragged one wherever it can."""
    return "ragged" if own_cache(config, max_context(config)) is None else "generate"


def own_cache(config: Mapping[str, Any], context: int | None) -> str | None:
    """Why the model needs a cache of its own, as the end of a sentence; ``None`` if it does not.

    It does not where each layer keeps the keys and values of all of up to ``context`` tokens.
    A window at least that wide never slides.
    """
    text = _text(config)
    windows = [text[key] for key in _WINDOWS if text.get(key) and _window_in_use(text, key)]
    slides = not all(isinstance(w, int) and context and w >= context for w in windows)
    other = set().union(*(_words(text.get(key)) for key in _LAYER_LISTS)) - _FULL
    if windows and not slides:
        other -= _SLIDING
    if other:
        window = f" (sliding window {windows[0]})" if windows and other & _SLIDING else ""
        return f"has layers of type {', '.join(sorted(other))}{window}"
    if windows and slides and text.get("layer_types") is None:
        return f"attends within a sliding window of {windows[0]}"
    if recurrent := _recurrent(text):
        return f"has recurrent or linear-attention layers ({recurrent})"
    if text.get("num_kv_shared_layers"):
        return "shares keys and values between layers (num_kv_shared_layers)"
    if text.get("alibi") or _MASK_POSITIONS.search(model_kind(text)):
        return "takes its positions from the attention mask"
    return None


def carries_over(config: Mapping[str, Any]) -> str | None:
    """Why rows that stand one behind the other in a sequence would mix, as the end of a sentence.

    ``None`` where each layer attends by positions that may begin anew, within a window or not.
    """
    text = _text(config)
    if recurrent := _recurrent(text):
        return f"has recurrent or linear-attention layers ({recurrent})"
    other = set().union(*(_words(text.get(key)) for key in _LAYER_LISTS)) - _FULL - _SLIDING
    if other := other - {"chunked_attention"}:
        return f"has layers of type {', '.join(sorted(other))}"
    if text.get("alibi") or _MASK_POSITIONS.search(model_kind(text)):
        return "takes its positions from the attention mask"
    return None


def architecture_problems(config: Mapping[str, Any], slug: str) -> list[Problem]:
    """Everything in the configuration that keeps the model from being trained."""
    problems = [
        *_task_problems(config, slug),
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
    elif "vision_config" not in config and ("audio_config" in config or "text_config" in config):
        yield _problem(
            slug,
            f"reads sound or something else beside text ({model_kind(config)})",
            found=architectures,
            allowed="causal language models of text, and image-text models",
        )
    elif architectures and not any(a.endswith(_causal(config)) for a in architectures):
        yield _problem(
            slug,
            f"is no causal language model ({', '.join(architectures)})",
            found=architectures,
            allowed="architectures ending in " + " or ".join(_causal(config)),
        )
    elif _NO_CACHE.search(model_kind(config)):
        yield _problem(
            slug,
            f"keeps its state outside a cache of transformers ({model_kind(config)})",
            found=model_kind(config),
            allowed="any architecture whose state transformers' own cache holds",
        )


def _causal(config: Mapping[str, Any]) -> tuple[str, ...]:
    return (*_CAUSAL, "ForConditionalGeneration") if "vision_config" in config else _CAUSAL


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of the configuration that describes the language backbone."""
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


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


def _recurrent(text: Mapping[str, Any]) -> str | None:
    """The first name that tells of recurrent, linear-attention or convolution layers."""
    named = [model_kind(text), *(k for k, v in text.items() if v not in (None, False, 0, []))]
    return next((name for name in named if _RECURRENT.search(name)), None)


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
