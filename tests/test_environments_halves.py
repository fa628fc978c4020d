"""Half characters in what an environment says: refused by what is wrong, where it said it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from nbtrain.environments.contract import read_contract
from nbtrain.environments.episode import Episode, EpisodeError
from nbtrain.environments.halves import half_in


class Halves:
    def __init__(self, answer: Any = None) -> None:
        self.answer = answer

    def reset(self) -> Any:
        return self.answer


class Talks(Halves):
    def step(self, reply: str) -> Any:
        return self.answer


class Reads(Halves):
    def look(self) -> str:
        """Look."""
        return str(self.answer)


class Describes:
    def reset(self) -> None: ...

    def look(self) -> None:
        "Look for \udcff."


def user(**more: Any) -> dict[str, Any]:
    return {"role": "user", "content": "", **more}


@pytest.mark.parametrize(
    ("value", "half"),
    [
        ("\ud83d\ude00", "'\\ud83d'"),  # both halves, each by itself
        ([{"a": {"\udfff": 1}}], "'\\udfff'"),
        ((1, None, ["x", "\udc00"]), "'\\udc00'"),
        ("\U0001f600 \ufffe", None),
        ({"a": [1.5, True, None, "ä"]}, None),
    ],
)
def test_halves_are_found_wherever_they_are(value: object, half: str | None) -> None:
    assert half_in(value) == half


@pytest.mark.parametrize(
    ("cls", "answer", "ask"),
    [
        (Talks, "a\ud800", lambda episode: episode.reset({})),
        (Talks, "a\ud800", lambda episode: episode.act({"content": "x"})),
        (Talks, ("\ud800", True), lambda episode: episode.act({"content": "x"})),
        (Talks, [user(name="\ud800")], lambda episode: episode.act({"content": "x"})),
        (Talks, user(**{"\ud800": 1}), lambda episode: episode.act({"content": "x"})),
    ],
)
def test_an_answer_is_refused_by_the_name_of_its_environment(
    cls: type, answer: Any, ask: Callable[[Episode], Any]
) -> None:
    episode = Episode("Named", lambda: cls(answer))
    with pytest.raises(EpisodeError, match=r"'Named': \w+ returned .* half a character, '\\ud800'"):
        ask(episode)


def test_a_tool_fails_as_if_it_had_raised() -> None:
    """The model reads why and may go on, as with everything that a tool raises."""
    call = {"function": {"name": "look", "arguments": {}}}
    ((message,), done) = Episode("Named", lambda: Reads("\ud800")).act({"tool_calls": [call]})
    assert not done
    assert "environment 'Named': look returned text with half a character" in message["content"]
    assert half_in(message) is None


def test_a_tool_described_with_one_is_refused_before_anything_runs() -> None:
    contract, problems = read_contract(Describes)
    assert contract is None
    assert [str(problem) for problem in problems] == [
        "environment: Describes describes its tools with half a character, '\\udcff'; "
        "allowed: valid Unicode"
    ]
