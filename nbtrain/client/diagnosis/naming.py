"""What a finding calls an option: a descriptor's reader knows its fields by other names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache

from nbtrain.report.findings import Finding

__all__ = ["as_descriptor"]


_BESIDE = {
    "num_steps": "rlHyperparams.maxSteps",
    "max_output_tokens_per_trajectory": "rlHyperparams.maxCompletionLength",
    "lr_warmup_steps": "scheduler.warmupRatio",
    "lr_min_ratio": "scheduler.minLearningRateRatio",
}
"""Options of a reinforcement run that no field becomes as it is: the field to change."""


@lru_cache(maxsize=8)
def _fields(method: str) -> dict[str, str]:
    """The descriptor's field by the name of the setting that it becomes."""
    from nbtrain.plan.descriptor.table import setting_names

    return ({} if method == "sft" else _BESIDE) | setting_names(method)


def as_descriptor(findings: Iterable[Finding], method: str) -> list[Finding]:
    """The findings with options under their descriptor's names, where it has them."""
    names = _fields(method)
    # a name of one word, such as epochs, is also a word of a sentence, but not where it is advised
    long = "|".join(re.escape(name) for name in names if "_" in name)
    short = "|".join(re.escape(name) for name in names if "_" not in name)
    word = re.compile(
        rf"\b(?:{long})\b(?!\()|(?<=[Rr]aise )(?:{short})\b|(?<=[Ll]ower )(?:{short})\b"
    )

    def told(text: str) -> str:
        return word.sub(lambda found: names[found[0]], text)

    return [
        replace(
            finding,
            sentence=told(finding.sentence),
            suggestion=told(finding.suggestion),
            options=tuple(dict.fromkeys(names.get(name, name) for name in finding.options)),
        )
        for finding in findings
    ]
