"""Rows and registries for the tests of datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nbtrain.data.datasets import DatasetRegistry
from nbtrain.errors import Problem, Refused

CASES = Path(__file__).parent / "cases"


def chat(question: str = "a", answer: str = "b", **columns: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **columns}


def text(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def written(folder: Path, data: str | bytes, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def refusals(registry: DatasetRegistry, source: Any) -> tuple[Problem, ...]:
    with pytest.raises(Refused) as refused:
        registry.register("d", source)
    assert registry.list() == []
    assert list((registry._store.home / "datasets").iterdir()) == []
    return refused.value.problems


def refusal(registry: DatasetRegistry, source: Any) -> Problem:
    problems = refusals(registry, source)
    assert len(problems) == 1, problems
    return problems[0]
