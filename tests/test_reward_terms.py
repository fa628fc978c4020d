"""Terms of a plan through real worker processes: bundles' code, built-ins, refusals."""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from test_bundles import GSM8K, write

from nbtrain.errors import Refused
from nbtrain.rewards import GradeRequest, GroupGrades, RewardPool, check_columns, pack
from nbtrain.rewards.bundle_code import NoFunction, stated_signature
from nbtrain.rewards.bundles import Bundle, BundleRegistry
from nbtrain.rewards.terms import KINDS, build_terms, pack_terms, parameters_of
from nbtrain.store import Store, open_store

LIMIT = 2.0

KITCHEN = {
    "helpers.py": "import pathlib\nTABLE = pathlib.Path(__file__).with_name('table.txt')\n"
    "def table():\n    return TABLE.read_text().split()\n",
    "table.txt": "yes ja oui",
    "data.py": "from . import helpers\nfrom .helpers import table as words\n"
    "def compute_score(solution_str, ground_truth=None):\n"
    "    return float(solution_str in words() and helpers.TABLE.parent.name == 'files')\n",
    "pkg/__init__.py": "",
    "pkg/deep/__init__.py": "from ...data import compute_score\n",
    "pkg/deep/inner.py": "from ..other import LENGTH\nfrom ... import helpers\n"
    "def compute_score(completion):\n    return float(len(completion) == LENGTH) + bool(helpers)\n",
    "pkg/other.py": "LENGTH = 3\n",
    "forms.py": "import asyncio, os\n"
    "def group(prompts, completions, answer, **kw):\n"
    "    return [float(c[0]['content'] == a) for c, a in zip(completions, answer)]\n"
    "def one(completion, task):\n    return float(completion == task['answer'])\n"
    "async def awaited(completion):\n    await asyncio.sleep(0.6)\n    return 1.0\n"
    "def details(solution_str, ground_truth):\n    return {'score': 0.25, 'acc': True}\n"
    "def none(completion):\n    return None\n"
    "def pid(completion):\n    return float(os.getpid())\n",
    "bad.py": "import sys\n"
    "def hangs(completion):\n    while completion == 'tower': pass\n    return 1.0\n"
    "def raises(completion):\n    raise ValueError('no such ' + completion)\n"
    "def prints(completion):\n    print('seen', completion)\n"
    "    print('error', completion, file=sys.stderr)\n    return 1.0\n",
}


def rule(module: str, function: str | None = None, bundle: str = "kitchen") -> dict[str, Any]:
    return {"kind": "rule", "bundle": bundle, "module": module, "function": function}


TERMS: dict[str, dict[str, Any]] = {
    "gsm8k": rule("reward", bundle="gsm8k"),
    "data": rule("data"),
    "handed on": rule("pkg.deep"),
    "inner": rule("pkg.deep.inner"),
    "other reward": rule("reward", bundle="other"),
    **{name: rule("forms", name) for name in ("group", "one", "awaited", "details", "none", "pid")},
    **{name: rule("bad", name) for name in ("hangs", "raises", "prints")},
    "exact": {"kind": "exact"},
    "labels": {"kind": "json-label-match", "weight": 2},
    "numeric": {"kind": "numeric", "column": "ground_truth", "tolerance": 0.5},
    "regex": {"kind": "regex", "pattern": "a+"},
    "format": {"kind": "format", "pattern": "a+"},
    "length": {"kind": "length", "maxChars": 2},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    folder = tmp_path_factory.mktemp("terms")
    store = open_store(folder / "home")
    registry = BundleRegistry(store)
    registry.register("gsm8k", write(folder / "gsm8k", {"reward.py": GSM8K}))
    registry.register("kitchen", write(folder / "kitchen", KITCHEN))
    other = {"reward.py": "def compute_score(completion, task):\n    return -1.0\n"}
    registry.register("other", write(folder / "other", other))
    return store


@pytest.fixture(scope="module")
def pool(store: Store) -> Iterator[RewardPool]:
    """One worker with every term; a test asks for those it is about."""
    file = store.home / "rewards.pkl"
    file.write_bytes(pack_terms([{**t, "name": name} for name, t in TERMS.items()], store))
    log = store.home / "rewards.log"
    with RewardPool(file, workers=1, timeout_seconds=LIMIT, log_path=log) as pool:
        assert pool.check_start() is None
        yield pool


def grade(
    pool: RewardPool, names: str | list[str], texts: list[str], **columns: Any
) -> GroupGrades:
    wanted = [names] if isinstance(names, str) else names
    index = {term.name: number for number, term in enumerate(pool.terms)}
    request = GradeRequest([{"role": "user", "content": "?"}], texts, columns, task_id="t1")
    pool.submit("key", request, terms=[index[name] for name in wanted])
    end = time.monotonic() + 60
    while not (got := pool.finished(5)):
        assert time.monotonic() < end, "the pool stands still"
    return got[0][1]


def rewards_of(grades: GroupGrades) -> list[float | None]:
    return [g.reward for g in grades]


# --- bundles in workers


def test_the_number_after_the_mark_is_scored(pool: RewardPool) -> None:
    answers = ["3 + 4 = 7\n#### 1,007", "#### 7", "1007", "#### 1007.", "#### 3 #### 1007"]
    grades = grade(
        pool, "gsm8k", answers, ground_truth="So 1007.\n#### 1007", data_source="gsm8k", answer=""
    )
    assert rewards_of(grades) == [1.0, 0.0, 0.0, 1.0, 1.0]


def test_siblings_data_and_packages_are_found(pool: RewardPool) -> None:
    assert rewards_of(grade(pool, "data", ["ja", "no"])) == [1.0, 0.0]
    assert rewards_of(grade(pool, "handed on", ["oui", "no"])) == [1.0, 0.0]
    assert rewards_of(grade(pool, "inner", ["abc", "ab"])) == [2.0, 1.0]


def test_modules_of_one_name_from_two_bundles_are_two(pool: RewardPool) -> None:
    (got,) = grade(pool, ["gsm8k", "other reward"], ["#### 1"], ground_truth="#### 1")
    assert got.terms == {"gsm8k": 1.0, "other reward": -1.0}


def test_every_form_is_called_as_its_text_says(pool: RewardPool) -> None:
    assert [term.form.value for term in pool.terms[5:9]] == ["group", "sample", "sample", "verl"]
    grades = grade(pool, ["group", "one"], ["2", "3"], answer="2")
    assert [g.terms for g in grades] == [{"group": 1.0, "one": 1.0}, {"group": 0.0, "one": 0.0}]
    assert rewards_of(grade(pool, "details", ["a"], ground_truth="b")) == [0.25]
    # One after the other they would take 3.6 s, more than the limit allows twice.
    awaited = grade(pool, "awaited", ["a"] * 6)
    assert rewards_of(awaited) == [1.0] * 6
    assert awaited.seconds < LIMIT


def test_what_goes_wrong_is_a_status_not_a_number(pool: RewardPool) -> None:
    grades = grade(pool, "raises", ["x"])
    assert (grades[0].reward, grades[0].kind) == (None, "exception")
    assert grades[0].error is not None
    first, _, trace = grades[0].error.partition("\n")
    assert first == "reward 'raises' raised ValueError: no such x"
    assert "files/bad.py" in trace
    assert "scoring.py" not in trace
    assert [g.kind for g in grade(pool, "none", ["x"])] == ["missing"]
    (missing,) = grade(pool, "details", ["x"], answer="y")
    assert (missing.reward, missing.kind) == (None, "exception")
    assert "the task has no column 'ground_truth'" in str(missing.error)


def test_a_bundle_that_hangs_is_killed_and_the_others_are_scored(pool: RewardPool) -> None:
    grades = grade(pool, "hangs", ["a", "tower", "b"])
    assert [g.kind for g in grades] == ["ok", "timeout", "ok"]
    assert rewards_of(grade(pool, "data", ["ja"])) == [1.0]  # in the worker that came after


def test_what_a_bundle_prints_goes_to_the_log(pool: RewardPool) -> None:
    assert rewards_of(grade(pool, "prints", ["hello"])) == [1.0]
    end = time.monotonic() + 30
    while "error hello" not in (log := pool.log_path.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    assert "seen hello" in log
    assert "error hello" in log


def test_nothing_of_a_bundle_is_imported_here(pool: RewardPool, store: Store) -> None:
    pid = grade(pool, "pid", ["a"])[0].reward
    assert pid
    assert not [name for name in sys.modules if name.startswith("nbtrain_bundle_")]
    files = [str(getattr(module, "__file__", "")) for module in list(sys.modules.values())]
    assert not [file for file in files if str(store.home) in file]
    # And the workers leave no bytecode in it.
    assert not list(store.home.rglob("*.pyc"))


def test_built_ins_read_the_answer_unless_another_column_is_stated(pool: RewardPool) -> None:
    grades = grade(pool, ["exact", "numeric"], ["4", "4.4"], answer="4", ground_truth="#### 4")
    assert [g.terms for g in grades] == [
        {"exact": 1.0, "numeric": 1.0},
        {"exact": 0.0, "numeric": 1.0},
    ]
    names = ["regex", "format", "length"]
    assert [list(g.terms.values()) for g in grade(pool, names, ["aa", "bab"])] == [
        [1.0, 1.0, 1.0],
        [1.0, 0.0, 0.0],
    ]
    assert rewards_of(grade(pool, "labels", ['{"a": 1}'], answer='{"a": 1, "b": 2}')) == [1.0]


# --- loading fails


def failure(store: Store, name: str, folder: Path, files: Mapping[str, str]) -> str:
    BundleRegistry(store).register(name, write(folder / name, files))
    file = folder / f"{name}.pkl"
    file.write_bytes(pack_terms([rule("reward", bundle=name)], store))
    log = folder / "log"
    with RewardPool(file, workers=1, timeout_seconds=LIMIT, log_path=log) as pool:
        problem = pool.check_start()
    assert problem is not None
    return problem.message


def test_an_absolute_import_of_a_sibling_says_how_to_write_it(store: Store, tmp_path: Path) -> None:
    text = "import helpers\ndef compute_score(completion):\n    return 1.0\n"
    said = failure(store, "absolute", tmp_path, {"reward.py": text, "helpers.py": ""})
    assert said.startswith(
        "the rewards could not be loaded: ModuleNotFoundError: No module named 'helpers'"
    )
    assert "siblings in a bundle are imported by 'from . import helpers'" in said
    assert "files/reward.py" in said


def test_a_decorator_that_changes_the_form_is_told(store: Store, tmp_path: Path) -> None:
    text = (
        "def lists(f):\n    return lambda completions: [f(c) for c in completions]\n"
        "@lists\ndef compute_score(completion):\n    return 1.0\n"
    )
    said = failure(store, "decorated", tmp_path, {"reward.py": text})
    assert "reward.compute_score is of the form group" in said
    assert "does a decorator change its parameters?" in said


# --- what the text says


@pytest.mark.parametrize(
    ("text", "clause"),
    [
        ("x = 1", "has no function 'compute_score' in its module 'm'; functions there: none"),
        ("def score(completion): ...", "functions there: score"),
        ("def compute_score(a, b): ...", "has m.compute_score, which takes (a, b)"),
        (
            "def compute_score(completion, answer): ...",
            "takes (completion, answer): nothing can be given for answer",
        ),
        ("def compute_score(completion):\n    yield 1", "which is a generator"),
        ("compute_score = print", "whose parameters do not show without running it"),
        ("from math import sqrt as compute_score", "whose parameters do not show"),
        ("def compute_score(:", "is no Python at line 1"),
        ("from .n import compute_score", "has no module 'n'"),
        ("from .m import compute_score", "from module to module without an end"),
        ("from ..n import compute_score", "imports from above the bundle"),
        ("from . import m as compute_score", "has a module, not a function"),
    ],
)
def test_a_function_that_cannot_score_is_refused_by_its_text(
    text: str, clause: str, tmp_path: Path
) -> None:
    write(tmp_path, {"m.py": text})
    with pytest.raises(NoFunction) as refused:
        stated_signature(tmp_path, "m", "compute_score")
    assert clause in str(refused.value)


@pytest.mark.parametrize(
    ("text", "form", "required"),
    [
        (GSM8K, "verl", {"data_source", "solution_str", "ground_truth"}),
        ("async def compute_score(completion, task): ...", "sample", {"completion", "task"}),
        ("compute_score = lambda completion: 1.0", "sample", {"completion"}),
        ("def compute_score(*, completions, x=1, y, **kw): ...", "group", {"completions", "y"}),
        ("import x\nif x:\n    def compute_score(completion): ...", "sample", {"completion"}),
        (
            "try:\n    import x\nexcept E:\n    pass\nelse:\n"
            "    def compute_score(completion):\n        def g():\n            yield 1",
            "sample",
            {"completion"},
        ),
        (
            "def compute_score(a, b): ...\ndef compute_score(completion): ...",
            "sample",
            {"completion"},
        ),
    ],
)
def test_a_signature_is_told_from_the_text(
    text: str, form: str, required: set[str], tmp_path: Path
) -> None:
    write(tmp_path, {"m.py": text})
    signature = stated_signature(tmp_path, "m", "compute_score")
    assert (signature.form.value, set(signature.required)) == (form, required)


# --- building


def registry_of(store: Store) -> Any:
    return BundleRegistry(store).get


def refusals(store: Store, terms: Any) -> list[tuple[str, str]]:
    with pytest.raises(Refused) as refused:
        build_terms(terms, registry_of(store))
    return [(problem.field, str(problem)) for problem in refused.value.problems]


def test_everything_wrong_with_terms_is_said_at_once(store: Store) -> None:
    said = refusals(
        store,
        [
            {"kind": "rul", "weight": "1"},
            {"weight": 1.0},
            {"kind": "judge", "model": "m"},
            rule("reward", bundle="kitchn"),
            rule("nowhere"),
            rule("forms", "compute_score"),
            {"kind": "rule", "bundle": "kitchen"},
            {"kind": "regex", "pattern": "("},
            {"kind": "exact", "colum": "x", "name": ""},
            "exact",
            {"kind": "length"},
        ],
    )
    wanted = [
        ("reward.terms[0].kind", "Did you mean 'rule'?"),
        ("reward.terms[0].weight", "allowed: a finite number"),
        ("reward.terms[1].kind", "has no kind; allowed: rule, json-label-match, exact"),
        ("reward.terms[2].kind", "judge terms are not built yet"),
        ("reward.terms[3].bundle", "no bundle is called 'kitchn'; did you mean 'kitchen'?"),
        ("reward.terms[4].module", "has no 'nowhere'; allowed: bad, data, forms, helpers, pkg"),
        ("reward.terms[5].function", "functions there: group, one, awaited"),
        ("reward.terms[6].module", "a rule term needs its 'module'"),
        ("reward.terms[7].pattern", "allowed: a regular expression ("),
        ("reward.terms[8].name", "allowed: text of 1 to 64 characters"),
        ("reward.terms[8].colum", "Did you mean 'column'?"),
        ("reward.terms[9]", "is a str; allowed: a mapping with a kind"),
        ("reward.terms[10].max_chars", "needs its 'max_chars'"),
    ]
    assert [field for field, _ in said] == [field for field, _ in wanted]
    for (_, text), (_, part) in zip(said, wanted, strict=True):
        assert part in text


def test_no_terms_and_weights_of_zero_are_refused(store: Store) -> None:
    assert refusals(store, [])[0][0] == "reward.terms"
    assert "every weight is 0" in refusals(store, [{"kind": "exact", "weight": 0}])[0][1]


def test_a_wrong_signature_names_the_forms_that_are_allowed(store: Store, tmp_path: Path) -> None:
    text = "def compute_score(answer, gold):\n    return 1.0\n"
    BundleRegistry(store).register("wrong", write(tmp_path / "wrong", {"reward.py": text}))
    ((field, said),) = refusals(store, [rule("reward", bundle="wrong")])
    assert field == "reward.terms[0].function"
    assert "takes (answer, gold); allowed: f(completion, task), f(prompts, completions" in said


def test_terms_are_named_by_kind_or_module_and_need_their_columns(store: Store) -> None:
    terms = build_terms(
        [rule("reward", bundle="gsm8k"), {"kind": "exact"}, {"kind": "exact", "weight": 0.5}],
        registry_of(store),
    )
    assert [(t.name, t.weight) for t in terms] == [("reward", 1), ("exact", 1), ("exact#2", 0.5)]
    missing = [problem.found for problem in check_columns(terms, ["question"])]
    assert missing == ["ground_truth", "answer", "answer"]


def test_identity_and_bytes_tell_the_bundle_not_where_it_lies(store: Store, tmp_path: Path) -> None:
    terms = [{**rule("reward", bundle="gsm8k"), "weight": 0.5}, {"kind": "json-label-match"}]
    identity = pack(build_terms(terms, registry_of(store)))[1]
    other = open_store(tmp_path / "elsewhere")
    BundleRegistry(other).register("gsm8k", store.home.parent / "gsm8k")
    assert pack(build_terms(terms, registry_of(other)))[1] == identity
    bundle: Bundle = registry_of(store)("gsm8k")
    assert identity == [
        {
            "name": "reward",
            "weight": 0.5,
            "kind": "rule",
            "bundle": bundle.bundle_id,
            "module": "reward",
            "function": "compute_score",
        },
        {"name": "json-label-match", "weight": 1.0, "kind": "json-label-match", "column": "answer"},
    ]
    json.dumps(identity, allow_nan=False)
    (built, _) = build_terms(terms, registry_of(store))
    assert pickle.loads(pickle.dumps(built.function)) == built.function
    assert len(pickle.dumps(built.function)) < 1000


def test_every_kind_tells_its_parameters() -> None:
    assert {kind: parameters_of(kind) for kind in KINDS} == {
        "rule": {"bundle": True, "module": True, "function": False},
        "json-label-match": {"column": False},
        "exact": {"column": False},
        "numeric": {"column": False, "tolerance": False},
        "regex": {"pattern": True},
        "length": {"max_chars": True},
        "format": {"pattern": True},
    }
