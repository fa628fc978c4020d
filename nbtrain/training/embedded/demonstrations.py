"""Demonstrations that the embedded model is made of: five small tasks, clean or of mixed quality.

Clean ones are right and tagged (``<answer>99</answer>``). Mixed ones are often untagged or wrong,
so that the skill is in the model but only part of its samples show it: reinforcement has
something to sharpen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from nbtrain.catalog.samples import sums_prompt, sums_rows

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Quality:
    """Shares of demonstrations: tagged ones, and right ones among the tagged and the untagged."""

    tagged: float
    right_if_tagged: float
    right_if_untagged: float


CLEAN = Quality(1.0, 1.0, 1.0)
MIXED = Quality(tagged=0.55, right_if_tagged=0.545, right_if_untagged=0.545)

# No held-out sum is demonstrated, neither right nor wrong.
_HELD_OUT = frozenset(row["prompt"][0]["content"] for row in sums_rows()[1])


def _pair(rng: Random) -> tuple[int, int]:
    while True:
        a, b = rng.randrange(100), rng.randrange(100)
        if sums_prompt(a, b) not in _HELD_OUT:
            return a, b


def addition(rng: Random) -> tuple[str, str]:
    """Question and right answer of a sum of two numbers from 0 to 99, never a held-out one."""
    a, b = _pair(rng)
    return sums_prompt(a, b), str(a + b)


def sorting(rng: Random) -> tuple[str, str]:
    """Question and right answer: 4 to 6 digits in ascending order."""
    digits = "".join(rng.choice("0123456789") for _ in range(rng.randint(4, 6)))
    return f"Sort the digits {digits}.", "".join(sorted(digits))


def _letters(rng: Random, alphabet: str, low: int, high: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(rng.randint(low, high)))


def reversing(rng: Random) -> tuple[str, str]:
    """Question and right answer: 3 to 5 letters backwards."""
    word = _letters(rng, "abcdefghijklmnopqrstuvwxyz", 3, 5)
    return f"Reverse the letters {word}.", word[::-1]


def counting(rng: Random) -> tuple[str, str]:
    """Question and right answer: how often a letter stands in 4 to 8 letters."""
    word = _letters(rng, "abcde", 4, 8)
    letter = rng.choice("abcde")
    return f"How many times does {letter} appear in {word}?", str(word.count(letter))


def _wrong(answer: str, rng: Random) -> str:
    """The answer with one character replaced by another of its kind."""
    place = rng.randrange(len(answer))
    kind = "0123456789" if answer[place].isdigit() else "abcdefghijklmnopqrstuvwxyz"
    other = rng.choice([c for c in kind if c != answer[place]])
    return answer[:place] + other + answer[place + 1 :]


def _reply(answer: str, quality: Quality, rng: Random) -> str:
    tagged = rng.random() < quality.tagged
    right = rng.random() < (quality.right_if_tagged if tagged else quality.right_if_untagged)
    said = answer if right else _wrong(answer, rng)
    if tagged:
        return f"<answer>{said}</answer>"
    return rng.choice(("{}", "The answer is {}", "{}.")).format(said)


SINGLE_TURN: tuple[tuple[Callable[[Random], tuple[str, str]], float], ...] = (
    (addition, 5.0),
    (sorting, 4.0),
    (reversing, 1.0),
    (counting, 0.5),
)


def single_turn(quality: Quality, rng: Random) -> Messages:
    """One question with its reply."""
    tasks, weights = zip(*SINGLE_TURN, strict=True)
    question, answer = rng.choices(tasks, weights)[0](rng)
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": _reply(answer, quality, rng)},
    ]


def with_calculator(quality: Quality, rng: Random) -> Messages:
    """A sum asked with the calculator: the call, the tool's answer, the reply.

    A demonstration of lower quality may call with a wrong number or answer without calling.
    """
    a, b = _pair(rng)
    question = {"role": "user", "content": f"{sums_prompt(a, b)} Use the calculator."}
    if rng.random() >= quality.tagged:
        return [question, {"role": "assistant", "content": _reply(str(a + b), quality, rng)}]
    if rng.random() >= quality.right_if_tagged:
        a = int(_wrong(str(a), rng))
    return [
        question,
        {"role": "assistant", "content": f"<calc>{a}+{b}</calc>"},
        {"role": "tool", "content": str(a + b)},
        {"role": "assistant", "content": _reply(str(a + b), quality, rng)},
    ]
