"""Tiny models with random weights, one for each architecture family, and a byte tokenizer.

Real transformers classes, small enough that a test can recompute everything.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from nbtrain.training.base_weights import language_target

VOCABULARY = 276
EOS = 257
PAD = 256

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": EOS,
}


def tiny_config(family: str) -> PreTrainedConfig:
    """A small configuration of a family in :data:`FAMILIES`, :data:`OWN_CACHE`, …"""
    return (FAMILIES | OWN_CACHE | IMAGE_TEXT_FULL)[family]()


FAMILIES = {
    "llama": lambda: LlamaConfig(**_COMMON, num_key_value_heads=2),
    "qwen3": lambda: Qwen3Config(**_COMMON, num_key_value_heads=2, head_dim=16),
    "gemma": lambda: GemmaConfig(**_COMMON, num_key_value_heads=1, head_dim=8),
    "phi3": lambda: Phi3Config(**_COMMON, num_key_value_heads=4, sliding_window=None),
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=EOS,
    ),
}


def _sliding_gemma3() -> PreTrainedConfig:
    return transformers.Gemma3TextConfig(
        **_COMMON,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"],
    )


def _image_text_gemma3() -> PreTrainedConfig:
    return transformers.Gemma3Config(
        text_config=_sliding_gemma3().to_dict(),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
        },
        mm_tokens_per_image=4,
        image_token_id=270,
        boi_token_id=271,
        eoi_token_id=272,
    )


_HYBRID = {
    **_COMMON,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def _image_text_qwen35() -> PreTrainedConfig:
    return transformers.Qwen3_5Config(
        text_config=dict(_HYBRID),
        vision_config={
            "depth": 1,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 32,
            "num_position_embeddings": 16,
        },
        image_token_id=270,
        video_token_id=271,
        vision_start_token_id=272,
        vision_end_token_id=273,
    )


def _image_text_llava() -> PreTrainedConfig:
    return transformers.LlavaConfig(
        text_config=FAMILIES["llama"]().to_dict(),
        vision_config={
            "model_type": "clip_vision_model",
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 8,
            "patch_size": 4,
        },
        image_token_index=270,
        vision_feature_layer=-1,
    )


_MAMBA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": EOS,
}

OWN_CACHE = {
    "mistral": lambda: transformers.MistralConfig(
        **_COMMON, num_key_value_heads=2, sliding_window=6
    ),
    "gemma3": _sliding_gemma3,
    "gemma3_image": _image_text_gemma3,
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_HYBRID, num_experts=0, mlp_only_layers=[0, 1]
    ),
    "qwen3_5_image": _image_text_qwen35,
    "mamba": lambda: transformers.MambaConfig(**_MAMBA, state_size=4),
    "mamba2": lambda: transformers.Mamba2Config(
        **_MAMBA, state_size=8, num_heads=8, head_dim=8, n_groups=1, chunk_size=16
    ),
    "jamba": lambda: transformers.JambaConfig(
        **_COMMON,
        num_key_value_heads=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
    ),
}
"""Sliding windows, recurrent layers and mixtures: what the ragged sampler cannot hold."""

IMAGE_TEXT_FULL = {"llava": _image_text_llava}
"""Image-text models whose language backbone is full attention."""


def tiny_model(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 4.0
) -> PreTrainedModel:
    """A random model in eval mode.

    ``spread`` scales the output head so that the distribution over ids is far from uniform
    (standard deviation of the logits about 1 to 4); otherwise wrong attention would hardly show.
    """
    torch.manual_seed(seed)
    config = tiny_config(family)
    classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if hasattr(config, "vision_config"):
        classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    model: PreTrainedModel = classes[type(config)](config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if _projects(name, parameter):
                parameter.mul_(spread)
        head = model.get_output_embeddings().weight
        head.mul_(2.0 / (head.std() * head.shape[1] ** 0.5))
    return model.to(dtype).eval()


def _projects(name: str, parameter: nn.Parameter) -> bool:
    """Whether it is the matrix of a linear layer; what steers a recurrence would make it wild."""
    wild = ("embed", "wte", "conv", "dt_proj", "x_proj")
    return parameter.ndim == 2 and name.endswith("weight") and not any(w in name for w in wild)


def with_lora(model: PreTrainedModel, *, seed: int = 1, scale: float = 0.05) -> nn.Module:
    """The model under a LoRA adapter, on all linear layers of its language, that is not zero."""
    torch.manual_seed(seed)
    wrapped = get_peft_model(
        model,
        LoraConfig(r=4, lora_alpha=8, target_modules=language_target(model), task_type="CAUSAL_LM"),
    )
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=scale)
    return wrapped.eval()


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """256 byte tokens, then ``<|pad|>``, ``<|end|>`` and ``<|turn|>``; any text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|pad|>", "<|end|>", "<|turn|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<|pad|>", eos_token="<|end|>"
    )
    tokenizer.chat_template = chat_template
    return tokenizer
