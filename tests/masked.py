"""Tokenizers with real chat templates, and rows to mask with them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import trl
from tiny_models import byte_tokenizer

from nbtrain.data.masks import LossRules, MaskedRow, mask_row
from nbtrain.data.rendering import Renderer, RowRefused

TRL = Path(trl.__file__).parent / "chat_templates"
OWN = Path(__file__).parent / "templates"
CASES = Path(__file__).parent / "cases"

ENDS = {
    "qwen2_5": ["<|im_end|>", "<|endoftext|>"],
    "qwen3": ["<|im_end|>", "<|endoftext|>"],
    "qwen3_5_think": ["<|im_end|>"],
    "qwen3_instruct_2507": ["<|im_end|>"],
    "llama3": ["<|eot_id|>", "<|end_of_text|>"],
    "llama3_1": ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
    "llama3_2": ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
    "mistral": ["</s>"],
    "gemma": ["<end_of_turn>", "<eos>"],
    "gemma3": ["<end_of_turn>", "<eos>"],
    "gemma4_v2": ["<turn|>", "<|tool_response>"],
    "gemma4_v5": ["<turn|>", "<|tool_response>"],
    "deepseekv3": ["<｜end▁of▁sentence｜>"],
    "deepseek_r1_distill": ["<｜end▁of▁sentence｜>"],
    "phi3": ["<|endoftext|>", "<|end|>"],
    "phi3_5": ["<|endoftext|>", "<|end|>"],
    "nemotron_3_nano": ["<|im_end|>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>"],
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "lfm2": ["<|im_end|>"],
    "lfm2_v2": ["<|im_end|>"],
    "smolvlm": ["<end_of_utterance>"],
    "idefics3": ["<end_of_utterance>"],
    "llava_next": ["</s>"],
    "muse_glimmer": ["<|eot|>"],
}
"""Template to the tokens that end a reply, as the models' generation configs list them."""

CHATML = (CASES / "TM-03.template.jinja").read_text("utf-8")


def tokenizer_with(template: str | None, ends: list[str]) -> Any:
    """A byte-level tokenizer with this template; the first of ``ends`` is its own end token."""
    tokenizer = byte_tokenizer(template)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>", "<|im_start|>", *ends]})
    tokenizer.bos_token, tokenizer.eos_token = "<s>", ends[0]
    return tokenizer


def renderer_with(template: str, ends: list[str]) -> Renderer:
    tokenizer = tokenizer_with(template, ends)
    return Renderer(tokenizer, [tokenizer.convert_tokens_to_ids(end) for end in ends])


@cache
def family(name: str) -> Renderer:
    """A renderer for a template of :data:`ENDS`."""
    path = TRL / f"{name}.jinja"
    path = path if path.exists() else OWN / f"{name}.jinja"
    return renderer_with(path.read_text("utf-8"), ENDS[name])


@cache
def chatml() -> Renderer:
    return renderer_with(CHATML, ["<|im_end|>"])


def case_renderer(name: str, end: str) -> Renderer:
    return renderer_with((CASES / f"{name}.template.jinja").read_text("utf-8"), [end])


def case_rows(name: str) -> list[dict[str, Any]]:
    path = next(CASES.glob(f"{name}.row*.jsonl"))
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def said(*texts: str) -> dict[str, Any]:
    """A row of user and assistant in turn."""
    roles = ("user", "assistant")
    return {
        "messages": [
            {"role": roles[index % 2], "content": text} for index, text in enumerate(texts)
        ]
    }


def masked(renderer: Renderer, row: dict[str, Any], turns: Any = "all", **more: Any) -> MaskedRow:
    return mask_row(renderer, row, LossRules(turns, **more))


def trained(renderer: Renderer, row: dict[str, Any], turns: Any = "all", **more: Any) -> list[str]:
    """The text of each trained stretch, by the tokens themselves."""
    found = masked(renderer, row, turns, **more)
    decoded = renderer.tokenizer.decode(
        [token for token, one in zip(found.ids, found.trained, strict=True) if one],
        clean_up_tokenization_spaces=False,
    )
    assert decoded == "".join(found.trained_texts)
    return found.trained_texts


def refusals(renderer: Renderer, row: dict[str, Any], turns: Any = "all", **more: Any) -> list[str]:
    """The messages of a row's refusal; none where it is not refused."""
    try:
        masked(renderer, row, turns, **more)
    except RowRefused as error:
        return [problem.message for problem in error.problems]
    return []
