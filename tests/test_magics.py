"""The magics, in a real shell; launching is cut short, everything up to it is real."""

from __future__ import annotations

import threading
from pathlib import Path

import pandas as pd
import pytest
import stored
from shells import Shell, interrupting

from nbtrain.client import Client, Detached, Run, default_client, waiting
from nbtrain.notebook.refusals import CellError
from nbtrain.plan.phases import Phase

FIRST = """%%train --workload sums --model nbtrain/tiny --method gspo --name first --into run
num_steps: 8
batch_size: 2
group_size: 4
val_interval_steps: 4
"""


def test_the_first_cell_of_the_tour(shell: Shell, launched: list[Run]) -> None:
    shell.do(FIRST)
    (run,) = launched
    assert shell.ns["run"] == run
    assert run.name == "first"
    assert run.plan["num_steps"] == 8
    assert run.plan.base_model.slug == "nbtrain/tiny"
    (bundle,) = shell.bundles
    assert set(bundle) == {"text/plain", "text/html"}
    assert run.id[:12] in bundle["text/html"]
    assert shell.ip.display_pub.outputs[0]["transient"]["display_id"].startswith("nbtrain-")
    expected = "expected: about 64 trajectories to train on, about 150 in 3 validation rounds"
    assert expected in bundle["text/plain"]
    given = stored.row_of(run).plan
    assert given["text"].startswith("%%train --workload sums")
    assert given["arguments"]["workload"] == "sums"
    assert given["options"]["num_steps"] == 8


def test_without_into_the_run_is_the_underscore(shell: Shell, launched: list[Run]) -> None:
    shell.do("%%train --workload sums\n")
    assert shell.ns["_"] == launched[0]
    assert len(shell.bundles) == 1
    assert shell.do("_.id") == launched[0].id


def test_an_empty_body_and_comments_are_fine(shell: Shell, launched: list[Run]) -> None:
    shell.do("%%train --workload sums # nothing else\n\n# only this\n")
    shell.do('{"a": 1}')
    shell.do("%%train\nworkload: sums\n\n# above\nnum_steps: 3   # trailing\n")
    assert [run.progress.total_steps for run in launched] == [100, 3]


def test_a_json_body(shell: Shell, launched: list[Run]) -> None:
    shell.do('%%train\n{"workload": "sums", "num_steps": 3, "learning_rate": 1e-4}')
    assert launched[0].plan["learning_rate"] == 1e-4


def test_problems_are_shown_with_their_line_a_caret_and_no_traceback(
    shell: Shell, launched: list[Run]
) -> None:
    told = shell.refuse(
        "%%train --workload sums --nmae x\nnum_steps: 3\nlearnig_rate: 1e-4\nbatch_size: 0\n"
    )
    assert "unknown flag '--nmae', did you mean '--name'?" in told
    assert "line 1, column 25" in told
    told = shell.refuse(
        "%%train --workload sums\nnum_steps: 3\nlearnig_rate: 1e-4\nbatch_size: 0\n"
    )
    lines = told.splitlines()
    assert lines[0].startswith("nothing was started, 2 problems")
    at = lines.index("    learnig_rate: 1e-4")
    assert lines[at + 1] == "    ^"
    assert "learning_rate" in lines[at - 1]
    at = lines.index("    batch_size: 0")
    assert lines[at + 1] == "                ^"
    assert not launched


def test_problems_of_the_line_have_their_place_on_it(shell: Shell) -> None:
    cell = "%%train --workload sums --method ppo --from abcdef --model nbtrain/tny\n"
    told = shell.refuse(cell)
    for word in ("ppo", "abcdef", "nbtrain/tny"):
        column = cell.index(word) + 1
        assert f"(line 1, column {column})" in told


def test_a_first_look_is_smaller_and_says_so(shell: Shell, launched: list[Run]) -> None:
    shell.do("%%train --workload sums --small\nbatch_size: 6\n")
    plan = launched[0].plan
    assert (plan["batch_size"], plan["group_size"]) == (6, 4)
    assert stored.row_of(launched[0]).plan["arguments"]["small"] is True
    shell.do("%%train --workload sums --small --dry-run\n")
    (bundle,) = shell.bundles
    assert "batch_size" in bundle["text/plain"]
    assert "4  (small, in place of 32)" in bundle["text/plain"]


def test_switches_that_make_no_sense_are_refused_under_their_own_word(shell: Shell) -> None:
    told = shell.refuse("%%train --workload sums --smoke\n")
    assert "--smoke is for sft, this run is gspo: there are no answers to reproduce" in told
    assert "    %%train --workload sums --smoke\n" + " " * (4 + 24) + "^" in told
    told = shell.refuse("%%train --workload sums --method sft --smoke --small\n")
    assert "--small is stated with smoke" in told
    told = shell.refuse("%%train --workload sums --dry-run --wait --new\n")
    assert "--wait is stated with --dry-run, which starts nothing" in told
    assert "--new is stated with --dry-run, which starts nothing" in told
    assert "    %%train --workload sums --dry-run --wait --new\n" + " " * (4 + 34) + "^" in told


@pytest.mark.parametrize(
    ("line", "body"),
    [
        ("--method grpo", "algorithm: gspo"),
        ("--workload sums", "workload: other"),
        ("--name a", "display_name: b"),
        ("--weights-only --from abcd", "load_weights_only: false"),
    ],
)
def test_what_is_stated_twice_must_be_equal(shell: Shell, line: str, body: str) -> None:
    shell.do("import nbtrain; nbtrain.workload('other', tasks=[{'prompt': str(i)} for i in "
             "range(40)], rewards=nbtrain.rewards.length(max_chars=3))")  # fmt: skip
    assert "stated twice" in shell.refuse(f"%%train {line}\n{body}\n")


def test_what_is_stated_twice_equally_is_fine(shell: Shell, launched: list[Run]) -> None:
    shell.do(
        "%%train --workload sums --method grpo --name a\nalgorithm: grpo\nworkload: sums\n"
        "display_name: a\n"
    )
    assert launched[0].plan["algorithm"] == "grpo"


def test_names_stand_for_objects_in_body_and_line(shell: Shell, launched: list[Run]) -> None:
    shell.ns["rate"] = 3e-4
    shell.ns["w"] = default_client().workloads.get("sums")
    shell.do("%%train\nworkload: $w\nlearning_rate: $rate\n")
    shell.do("%%train --workload $w --name $$five\n")
    assert launched[0].plan["learning_rate"] == 3e-4
    assert launched[1].name == "$five"


def test_an_undefined_name_is_refused_with_its_place(shell: Shell) -> None:
    shell.ns["best"] = 1
    told = shell.refuse("%%train --workload sums --from $bset\nlearning_rate: $nothing_here\n")
    assert "line 1, column 32" in told
    assert "Did you mean $best?" in told
    assert "line 2, column 16" in told


def test_line_and_body_arrive_exactly_as_typed(shell: Shell, launched: list[Run]) -> None:
    shell.ns.update(x=5, HOME="home")
    shell.do("%%train --workload sums --name 'cost $HOME {x} it''s {100} 50%'\nnum_steps: 1\n")
    assert launched[0].name == "cost $HOME {x} it's {100} 50%"


@pytest.mark.parametrize("name", ["1x", "a.b", "class", "a b"])
def test_into_needs_a_variable(shell: Shell, name: str) -> None:
    assert "--into needs" in shell.refuse(f"%%train --workload sums --into '{name}'\n")


@pytest.mark.parametrize(
    "name",
    ["print", "__builtins__", "In", "Out", "get_ipython", "exit", "quit", "open", "_", "__",
     "_oh", "_i", "_3", "_i12", "__name__", "list", "ValueError", "display"],
)  # fmt: skip
def test_into_overwrites_nothing_of_python_or_ipython(
    shell: Shell, launched: list[Run], name: str
) -> None:
    told = shell.refuse(f"%%train --workload sums --into {name}\nnum_steps: 1\n")
    assert f"--into would overwrite {name}, which is" in told
    assert not isinstance(shell.ns.get(name), Run)
    assert not launched


@pytest.mark.parametrize("name", ["run", "_run", "in_", "out", "prints", "_x1", "größe"])
def test_into_takes_any_other_name(shell: Shell, launched: list[Run], name: str) -> None:
    shell.ns[name] = "a value of the user's"
    shell.do(f"%%train --workload sums --into {name}\nnum_steps: 1\n")
    assert shell.ns[name] == launched[0]


@pytest.mark.parametrize("odd", ["\x1b[31m", "a\u202eb", "\u2066x\u2069", "\x07", "\u200f"])
def test_a_quoted_line_escapes_what_would_move_it(shell: Shell, odd: str) -> None:
    told = shell.refuse(f"%%train --workload sums --name '{odd}' --modle x\nnum_steps: 1\n")
    assert all(letter.isprintable() or letter == "\n" for letter in told)
    lines = told.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("    %%train"))
    assert odd.encode("unicode_escape").decode() in lines[at]
    assert lines[at].index("--modle") == lines[at + 1].index("^")


def test_a_dry_run_starts_nothing(shell: Shell, launched: list[Run]) -> None:
    shell.do("%%train --workload sums --dry-run --into plan\nnum_steps: 3\n")
    assert not launched
    assert shell.ns["plan"].config["num_steps"] == 3
    (bundle,) = shell.bundles
    assert "num_steps" in bundle["text/html"]
    assert "4 validation rounds of 50 trajectories: 200" in bundle["text/html"]
    assert "time unknown until the first step" in bundle["text/plain"]
    assert not default_client().training.runs.list().items


def test_a_named_cell_run_again_attaches(shell: Shell, launched: list[Run]) -> None:
    shell.do(FIRST)
    shell.do(FIRST.replace("--into run", "--into again"))
    assert len(launched) == 1
    assert shell.ns["again"] == shell.ns["run"]
    assert "attached to run first" in shell.bundles[0]["text/plain"]
    stored.finish(launched[0], Phase.FAILED, failure="it broke")
    shell.do(FIRST)
    assert len(launched) == 1
    assert "it broke" in shell.bundles[0]["text/plain"]
    shell.do(FIRST.replace("num_steps: 8", "num_steps: 9"))
    shell.do(FIRST.replace("num_steps: 8", "num_steps: 9").replace("--into", "--new --into"))
    assert len(launched) == 3
    assert {run.name for run in launched} == {"first"}


def test_a_cell_without_a_name_trains_again(shell: Shell, launched: list[Run]) -> None:
    for _ in range(2):
        shell.do("%%train --workload sums\n")
    assert len(launched) == 2


def test_going_on_from_a_checkpoint_says_what_is_inherited(
    shell: Shell, launched: list[Run]
) -> None:
    shell.do(FIRST)
    run = launched[0]
    stored.train(run)
    stored.validate(run, 4, 0.5)
    stored.save(run, 4)
    shell.ns["best"] = run.best()
    shell.do("%%train --from $best --into more\nnum_steps: 20\n")
    more = launched[1]
    assert (more.plan.start_step, more.plan.total_steps) == (4, 24)
    told = shell.bundles[0]["text/plain"]
    assert f"goes on from checkpoint {run.best().checkpoint_id[:12]}" in told
    assert "batch_size 2" in told
    assert "step 4 to 24, 20 updates, learning rate" in told
    shell.do("%%train --from $best --weights-only\nnum_steps: 20\n")
    assert launched[2].plan.start_step == 0


def test_wait_fails_the_cell_when_the_run_failed(
    shell: Shell, launched: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_soon() -> None:
        while not launched:
            pass
        stored.finish(launched[0], Phase.FAILED, failure="the rank was killed by signal 9")

    threading.Thread(target=fail_soon, daemon=True).start()
    result = shell.run(FIRST.replace("--into", "--wait --into"))
    assert isinstance(result.error_in_exec, CellError)
    assert "killed by signal 9" in str(result.error_in_exec)
    assert shell.ns["run"].status == "failed"
    assert "killed by signal 9" in shell.bundles[-1]["text/plain"]


def test_interrupting_the_wait_detaches(
    shell: Shell, launched: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "time", interrupting())
    result = shell.run(FIRST.replace("--into", "--wait --into"))
    assert isinstance(result.error_in_exec, Detached)
    (lines,) = shell.tracebacks
    assert "%train cancel first" in lines[0]
    assert launched[0].status == "pending"


def test_train_alone_is_one_line(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.do("%train") is None
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_line_magic(
    shell: Shell, launched: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    columns = ["name", "status", "completed_steps", "total_steps", "run_id"]
    assert list(shell.do("%train list").columns)[:5] == columns
    shell.do(FIRST)
    run = launched[0]
    listed = shell.do("%train list --limit 5")
    assert isinstance(listed, pd.DataFrame)
    assert listed["name"].tolist() == ["first"]
    assert listed["run_id"].tolist() == [run.id[:12]]
    for ref in ("first", run.id[:8], "$run", "'first'", "_"):
        assert shell.do(f"%train show {ref}") == run
    stored.train(run)
    stored.save(run, 0)
    assert repr(shell.do("%train diagnose first")).startswith("run first")
    saved = shell.do("%train checkpoints first")
    assert saved["step_index"].tolist() == [0]
    assert saved["checkpoint_id"].tolist() == [run.checkpoint_list()[0].checkpoint_id[:12]]
    shell.do("%train watch first  # in place")
    assert run.id[:12] in shell.bundles[0]["text/plain"]
    shell.do("%train cancel first")
    assert "its checkpoints stay" in capsys.readouterr().out
    assert [c["command"] for c in run._store.commands(run._key)] == ["cancel"]
    stored.finish(run)
    shell.do("%train cancel first")
    assert "over already" in capsys.readouterr().out


def test_wait_on_the_line(shell: Shell, launched: list[Run]) -> None:
    shell.do(FIRST)
    result = shell.run("%train wait first --timeout 0.2")
    assert "it goes on" in str(result.error_in_exec)
    stored.finish(launched[0], Phase.CANCELLED)
    assert "was cancelled" in str(shell.run("%train wait first").error_in_exec)


def test_the_id_stands_for_a_missing_name(shell: Shell, launched: list[Run]) -> None:
    shell.do("%%train --workload sums\n")
    shell.do(FIRST)
    assert shell.do("%train list")["name"].tolist() == ["first", launched[0].id[:12]]
    assert shell.do(f"%train show {launched[0].id[:12]}") == launched[0]


def test_a_variable_in_place_of_a_name_is_told_of(shell: Shell, launched: list[Run]) -> None:
    shell.do("%%train --workload sums --into more\n")
    for command in ("watch", "wait", "show", "cancel"):
        shell.run(f"%train {command} more")
        (lines,) = shell.tracebacks
        assert "no run has the name or id 'more'" in lines[0]
        assert f"the variable more holds a run: %train {command} $more" in lines[0]
    shell.ns["less"] = 3
    shell.run("%train watch less")
    assert "variable" not in shell.tracebacks[0][0]
    assert shell.do("%train show $more") == launched[0]


def test_without_a_run_the_one_at_hand_is_meant(
    shell: Shell, launched: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    shell.run("%train watch")
    assert "there is no run yet" in shell.tracebacks[0][0]
    shell.do(FIRST)
    shell.do(FIRST.replace("first", "second"))
    first, second = launched
    shell.do("1 + 1")
    capsys.readouterr()
    assert shell.do("%train show") == second
    assert f"{second.title}, the newest" in capsys.readouterr().out
    shell.ns["first_run"] = first
    assert shell.do("first_run") == first
    capsys.readouterr()
    shell.do("%train watch")
    assert f"{first.title}, the last cell's" in capsys.readouterr().out
    assert first.id[:12] in shell.bundles[-1]["text/plain"]
    assert shell.do("%train estimate").steps == 8
    assert "%train cancel takes a run" in shell.refuse("%train cancel")


def test_the_underscore_must_be_a_run(shell: Shell, launched: list[Run]) -> None:
    shell.do("%%train --workload sums\n")
    shell.do("%train cancel _")
    assert [c["command"] for c in launched[0]._store.commands(launched[0]._key)] == ["cancel"]
    shell.do("1 + 1")
    assert "_ is no run" in shell.refuse("%train show _")


def test_other_runs_of_the_name_are_told_of(
    shell: Shell, launched: list[Run], capsys: pytest.CaptureFixture[str]
) -> None:
    again = FIRST.replace("--into", "--new --into")
    shell.do(FIRST)
    assert "still running" not in shell.bundles[0]["text/plain"]
    shell.do(again)
    old, new = launched
    assert f"another {old.title} is still running" in shell.bundles[0]["text/plain"]
    shell.do("%train cancel first")
    told = capsys.readouterr().out
    assert f"{new.title} was asked to stop" in told
    assert f"an older {old.title} is still running: %train cancel {old.id[:12]}" in told
    shell.do(f"%train cancel {old.id[:12]}")
    assert "older" not in capsys.readouterr().out
    stored.finish(old, Phase.CANCELLED)
    stored.finish(new, Phase.CANCELLED)
    shell.do(again)
    assert "still running" not in shell.bundles[0]["text/plain"]


def test_options_are_shown_by_group(shell: Shell) -> None:
    table = shell.do("%train options nbtrain/tiny")
    text, markup = repr(table), table._repr_html_()
    lines = text.splitlines()
    assert lines[0] == "options of nbtrain/tiny"
    at = next(n for n, line in enumerate(lines) if line.split()[:1] == ["num_steps"])
    assert lines[at].split(maxsplit=1)[1] == "100; allowed: 1 to 100,000"
    assert lines[at + 1].strip().startswith("Training steps to run.")
    joined = " ".join(text.split())
    assert "computed: half of group_size, rounded down" in joined
    assert "3; allowed: 0 to 100" in joined
    assert "the lowest level that thinks; null for a model without levels; allowed: null" in joined
    assert "not built" not in joined
    assert "this version" not in joined
    assert "NaN" not in text + markup
    assert "many digits" not in text
    assert text.index("\nadapter") < text.index("lora_rank") < text.index("\nbudgets")
    for info in default_client().training.list_options().models[0].options:
        assert f"<code>{info.name}</code>" in markup
    assert max(map(len, lines)) <= 100
    assert repr(shell.do("%train options")) == text
    other = repr(shell.do("%train options --mode evaluation"))
    assert "val_num_tasks" in other
    assert "  num_steps " not in other


def test_an_estimate_of_a_run(shell: Shell, launched: list[Run]) -> None:
    shell.do(FIRST)
    found = shell.do("%train estimate first")
    assert (found.trajectories, found.validation_rounds) == (64, 3)
    assert found.seconds is None
    assert "%train estimate takes a run" in shell.refuse("%train estimate first second")


def test_help_on_the_line(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.do("%train help") is None
    told = capsys.readouterr().out
    assert told.startswith("%train list")
    assert "%train cancel RUN" in told
    assert "CHECKPOINT is an id" in told


@pytest.mark.parametrize("kind", ["line", "cell"])
def test_the_help_reads_as_plain_text(shell: Shell, kind: str) -> None:
    told = str(shell.ip.find_magic("train", kind).__doc__)
    assert "``" not in told
    assert "::" not in told
    assert max(map(len, told.splitlines())) <= 104


@pytest.mark.parametrize("name", ["opne", "Inn", "Outt", "get_ipthon"])
def test_only_the_user_s_names_are_suggested(shell: Shell, name: str) -> None:
    shell.ns["rate"] = 1e-4
    for cell in (f"%%train --workload ${name}\n", f"%%train --workload sums\nseed: ${name}\n"):
        told = shell.refuse(cell)
        assert f"${name} is not defined" in told
        assert "Did you mean" not in told
    assert "Did you mean $rate" in shell.refuse("%%train\nseed: $rat\n")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("shwo first", "did you mean 'show'?"),
        ("doctor", "%train doctor is not built yet"),
        ("pause first", "%train pause is not built yet"),
        ("cancel", "%train cancel takes a run"),
        ("show a b", "found 2 words"),
        ("list first", "no more words"),
        ("show first --timeout 3", "%train show has no flag --timeout; allowed: no flags"),
        ("show first --bogus", "%train show has no flag --bogus; allowed: no flags ("),
        ("wait first --lines 3 --bogus", "has no flag --lines; allowed: --timeout ("),
        ("wait first --lines 3 --bogus", "has no flag --bogus; allowed: --timeout ("),
        ("wait first --timeout soon", "--timeout needs a number"),
        ("options --mode both", "--mode is 'both'"),
        ("show $nothing", "the name $nothing is not defined"),
        ("list --limt 3", "did you mean '--limit'?"),
    ],
)
def test_a_wrong_line_is_refused(shell: Shell, line: str, told: str) -> None:
    shown = shell.refuse(f"%train {line}")
    assert told in shown
    assert shown.startswith("refused")
    assert "nothing was started" not in shown


def test_an_unknown_run_is_told_in_a_sentence(shell: Shell) -> None:
    result = shell.run("%train show nothing")
    assert isinstance(result.error_in_exec, CellError)
    assert shell.tracebacks[0] == [str(result.error_in_exec)]


def test_help_shows_the_flags(shell: Shell) -> None:
    text = shell.ip.object_inspect("%%train")["docstring"]
    for flag in ("--workload", "--from", "--dry-run", "--into"):
        assert flag in text
    assert "%train list" in str(shell.ip.find_line_magic("train").__doc__)


def test_unloading_takes_everything_away(shell: Shell, launched: list[Run]) -> None:
    shell.do(FIRST)
    shell.do("%unload_ext nbtrain")
    assert shell.ip.find_cell_magic("train") is None
    assert not [t for t in threading.enumerate() if t.name == "nbtrain-poller"]
    shell.do("%load_ext nbtrain")
    shell.do(FIRST)


def test_a_client_of_another_home_is_another_client(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = default_client()
    assert default_client() is here
    monkeypatch.setenv("NBTRAIN_HOME", str(tmp_path / "other"))
    assert default_client() is not here
    assert isinstance(here, Client)
