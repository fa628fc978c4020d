"""A model that says what it was made to say: each id is followed by the next, 31 by 9.

A real llama whose layers add nothing, so that real samplers, layouts and losses run on replies
that a test can foretell.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nbtrain.training.policy import Policy

SIZE = 32
AFTER_LAST = 9


def chain_policy(folder: Path, generation_config: Path | None = None) -> Policy:
    """The chain under a fresh adapter, loaded from ``folder`` as a run loads its model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SIZE,
        hidden_size=SIZE,
        intermediate_size=SIZE,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=AFTER_LAST,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    following = [(n + 1) if n + 1 < SIZE else AFTER_LAST for n in range(SIZE)]
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.get_input_embeddings().weight.copy_(torch.eye(SIZE))
        head = model.get_output_embeddings().weight
        head.normal_(std=0.2)  # scores that are all alike would tell layouts nothing
        for before, after in enumerate(following):
            head[after, before] += 5.0
    model.save_pretrained(folder)
    if generation_config is not None:
        declared = json.loads(generation_config.read_text())
        (folder / "generation_config.json").write_text(json.dumps(declared))
    return Policy.load(
        folder,
        precision="fp32",
        lora_rank=2,
        lora_alpha=4,
        target_modules="default",
        seed=1,
        device=torch.device("cpu"),
    )
