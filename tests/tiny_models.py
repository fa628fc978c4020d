"""Tiny models with random weights, one for each architecture family, and a byte tokenizer.

Real transformers classes, small enough that a test can recompute everything.
"""

from __future__ import annotations

import torch
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
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

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
    """A small full-attention configuration of a family in :data:`FAMILIES`."""
    return FAMILIES[family]()


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


def tiny_model(
    family: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0, spread: float = 4.0
) -> PreTrainedModel:
    """A random model in eval mode.

    ``spread`` scales the output head so that the distribution over ids is far from uniform
    (standard deviation of the logits about 1 to 4); otherwise wrong attention would hardly show.
    """
    torch.manual_seed(seed)
    config = tiny_config(family)
    model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name and "wte" not in name:
                parameter.mul_(spread)
        head = model.get_output_embeddings().weight
        head.mul_(2.0 / (head.std() * head.shape[1] ** 0.5))
    return model.to(dtype).eval()


def with_lora(model: PreTrainedModel, *, seed: int = 1, scale: float = 0.05) -> nn.Module:
    """The model under a LoRA adapter on all linear layers whose effect is not zero."""
    torch.manual_seed(seed)
    wrapped = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
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
