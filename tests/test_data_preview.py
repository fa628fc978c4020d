"""A masked row for the eye."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st
from masked import chatml, family, masked, said

from nbtrain.data.masks import cut
from nbtrain.data.preview import preview_html, preview_text


def test_trained_text_stands_between_brackets() -> None:
    found = masked(chatml(), said("one?", "uno", "two?", "dos"))
    assert preview_text(found) == (
        "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n[[uno<|im_end|>]]\n"
        "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n[[dos<|im_end|>]]\n"
    )


def test_replies_that_follow_at_once_are_two_stretches_apart_from_the_template() -> None:
    found = masked(family("mistral"), said("one?", "uno", "two?", "dos"))
    assert preview_text(found) == "<s>[INST] one?[/INST][[ uno</s>]][INST] two?[/INST][[ dos</s>]]"


def test_what_was_cut_is_not_shown() -> None:
    found = masked(chatml(), said("a", "b"))
    shorter = cut(found, len(found.ids) - 1, "right")
    assert preview_text(shorter) == preview_text(found)[:-1]


def test_html_is_escaped_and_says_what_the_colour_means() -> None:
    shown = preview_html(masked(chatml(), said("<script>alert('&')</script>", "<b>uno</b>")))
    assert "<script>" not in shown
    assert "&lt;script&gt;alert(" in shown
    assert re.search(r"<mark[^>]*>&lt;b&gt;uno&lt;/b&gt;&lt;\|im_end\|&gt;</mark>", shown)
    assert re.search(r"<mark[^>]*>trained</mark> 11 of \d+ tokens", shown)
    # Neither ink nor an opaque ground of its own: both themes show through.
    assert "color:#" not in shown.replace("border-bottom:2px solid #", "")
    assert set(re.findall(r"background:([^;]*)", shown)) == {"rgba(46,160,67,0.28)"}


@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=2))
def test_nothing_of_the_text_is_lost(texts: list[str]) -> None:
    texts = [text.replace("[[", "").replace("]]", "") for text in texts[: len(texts) // 2 * 2]]
    found = masked(chatml(), said(*texts))
    assert preview_text(found).replace("[[", "").replace("]]", "") == found.text
