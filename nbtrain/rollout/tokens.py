"""Between text and token ids: prompts as a model expects them, end ids, replies as text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

__all__ = ["decode_completion", "end_ids", "render_prompt"]


def end_ids(generation_config: Any, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a reply, ascending.

    The end ids of the generation config, which may be one, a list or none, and the tokenizer's
    own: chat models often declare their end-of-turn token in only one of the two places.
    Either argument may be ``None``.
    """
    declared = getattr(generation_config, "eos_token_id", None)
    found = set() if declared is None else set(_as_list(declared))
    own = getattr(tokenizer, "eos_token_id", None)
    if own is not None:
        found.add(int(own))
    return tuple(sorted(found))


def render_prompt(
    tokenizer: Any,
    prompt: Sequence[Mapping[str, Any]] | str,
    raw: bool = False,
    template: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[int, ...]:
    """The ids that a model is prompted with.

    ``template`` is what the chat template takes beside the messages, such as what
    ``nbtrain.catalog.thinking.template_arguments`` gives for a reasoning effort.

    Messages go through the tokenizer's chat template up to where the assistant's turn begins.
    A text is one user turn when there is a template; without one, or with ``raw``, it is encoded
    as plain text with whatever the tokenizer adds by itself (a begin-of-text token, say).

    Raises ``ValueError`` for messages without a template or with ``raw``: what they should look
    like as text is not ours to invent.
    """
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if isinstance(prompt, str):
        if raw or not has_template:
            return tuple(tokenizer(prompt)["input_ids"])
        prompt = [{"role": "user", "content": prompt}]
    if raw or not has_template:
        reason = "the workload is raw" if raw else "the tokenizer has no chat template"
        msg = f"the prompt is a list of messages, but {reason}; give it as text"
        raise ValueError(msg)
    # A template writes the special tokens itself; encoding its text again would double them.
    ids = tokenizer.apply_chat_template(
        [dict(message) for message in prompt],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=False,
        **template,
    )
    return tuple(int(token) for token in ids)


def decode_completion(tokenizer: Any, ids: Sequence[int], ends: Collection[int]) -> str:
    """The text of a reply: without its end id and without other special tokens.

    Nothing is tidied up: encoding the text of ordinary tokens and decoding it again gives the
    same text, spaces before punctuation included.
    """
    kept = list(ids)
    if kept and kept[-1] in ends:
        kept.pop()
    text: str = tokenizer.decode(kept, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def _as_list(declared: Any) -> list[int]:
    return [int(declared)] if isinstance(declared, int) else [int(token) for token in declared]
