"""The embedded model's tokenizer: every byte is a token, and so are a few phrases.

Any text round-trips. Phrases keep the replies of the built-in tasks at about five tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD, END_OF_TEXT, START, END = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (PAD, END_OF_TEXT, START, END)
PHRASES = (
    "user",
    "assistant",
    "system",
    "tool",
    "What is ",
    " + ",
    "Sort the digits ",
    "Reverse the letters ",
    "How many times does ",
    " appear in ",
    " Use the calculator.",
    "The answer is ",
    "<answer>",
    "</answer>",
    "<calc>",
    "</calc>",
)

# ChatML. The generation tags mark what an assistant mask covers: the reply and its end token.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{- message['content'] + '<|im_end|>' -}}{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """The tokenizer: 4 special tokens, 256 bytes, then the phrases; 276 ids in all."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: n for n, token in enumerate((*SPECIALS, *alphabet))}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    core.add_tokens([AddedToken(phrase, normalized=False) for phrase in PHRASES])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
