"""The words of ``%train`` beyond watching and waiting, in a real shell on real stores."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import stored
from shells import Shell

from nbtrain.client import Checkpoint, Run, default_client
from nbtrain.errors import NbtrainError
from nbtrain.notebook.refusals import CellError
from nbtrain.notebook.verbs import FLAGS, NOT_YET, USE, VERBS, help_of, overview
from nbtrain.plan.phases import Phase

FIRST = "%%train --workload sums --name first --into run\nnum_steps: 8\nbatch_size: 2\n"


@pytest.fixture
def trained(shell: Shell, launched: list[Run]) -> Run:
    """A run with two steps, two complete rounds and three checkpoints, which is over."""
    shell.do(FIRST)
    (run,) = launched
    stored.train(run)
    for number in (1, 2):
        stored.step(run, number)
    for number, reward in ((0, 0.1), (1, 0.5), (2, 0.4)):
        stored.validate(run, number, reward)
        stored.save(run, number)
    stored.finish(run)
    return run


def test_every_word_stands_in_help_use_and_suggestions() -> None:
    for name in VERBS:
        assert f"%train {name}" in overview()
        assert re.search(rf"\b{name}\b", USE)
        assert VERBS[name].help in help_of(name).replace("\n", " ")
    assert not VERBS.keys() & set(NOT_YET)
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)
    for verb in VERBS.values():
        assert verb.least <= verb.most
        assert bool(verb.words) == bool(verb.most)
        assert all(flag in FLAGS for flag in verb.flags), "one meaning to a flag"


@pytest.mark.parametrize("name", NOT_YET)
def test_what_the_client_does_not_have_is_refused_by_name(shell: Shell, name: str) -> None:
    assert f"%train {name} is not built yet" in shell.refuse(f"%train {name} first")


@pytest.mark.parametrize(
    "name", ["metrics", "rewards", "losses", "validation", "groups", "trajectories"]
)
def test_tables_are_the_run_s_own(shell: Shell, trained: Run, name: str) -> None:
    pd.testing.assert_frame_equal(shell.do(f"%train {name} first"), getattr(trained, name))


def test_plan_texts_and_log(shell: Shell, trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert repr(shell.do("%train plan first")) == repr(trained.plan)
    assert len(shell.do("%train texts first --step 1")) == len(trained.texts(step=1))
    (trained.folder / "logs").mkdir(parents=True, exist_ok=True)
    (trained.folder / "logs" / "rank-0.log").write_text("".join(f"line {n}\n" for n in range(90)))
    capsys.readouterr()
    shell.do("%train log first --lines 3")
    assert capsys.readouterr().out == "line 87\nline 88\nline 89\n"
    shell.do("%train log first --lines 0")
    assert capsys.readouterr().out == ""
    shell.do("%train log first --lines 900")
    assert capsys.readouterr().out.endswith("line 88\nline 89\n")
    shell.do("%train log $run")
    assert len(capsys.readouterr().out.splitlines()) == 40
    assert "--lines needs a whole number" in shell.refuse("%train log first --lines 2.5")


def test_checkpoints_are_ranked_with_interval_and_ties(shell: Shell, trained: Run) -> None:
    table = shell.do("%train checkpoints first")
    assert list(table.columns[:7]) == [
        "rank", "step_index", "held_out_reward", "mark", "low", "high", "tie",
    ]  # fmt: skip
    assert table["step_index"].tolist() == [1, 2, 0]
    assert table["rank"].dropna().tolist() == list(range(1, table["rank"].count() + 1))
    assert table["mark"].str.startswith("best").tolist() == [True, False, False]
    assert "validation_loss" not in table
    assert set(table["checkpoint_id"].str.len()) == {12}


def test_notes_are_changed(shell: Shell, trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    shell.do("%train annotate first --description 'it''s flat' --config-name r8")
    assert (trained.description, trained.config_name) == ("it's flat", "r8")
    assert "description, config_name noted" in capsys.readouterr().out
    assert "needs --description TEXT" in shell.refuse("%train annotate first")
    shell.do("%train annotate first --description ''")
    shell.do("%train annotate first --config-name=")
    assert (trained.description, trained.config_name) == (None, None)
    assert "needs a value, found an empty one" in shell.refuse("%train texts first --step ''")


def test_a_report_is_named_after_the_run(
    shell: Shell, trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    shell.do("%train report first")
    assert capsys.readouterr().out == f"wrote {tmp_path / 'first.html'}\n"
    assert "<html" in (tmp_path / "first.html").read_text()[:200]
    shell.do("%train report first 'my reports.html'")
    assert (tmp_path / "my reports.html").is_file()


def test_tables_and_adapters_are_exported(
    shell: Shell, trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    shell.do("%train export first tables --format csv")
    assert re.match(r"wrote \d+ files into tables: ", capsys.readouterr().out)
    assert list((tmp_path / "tables").glob("*.csv"))
    told = shell.refuse("%train export first other --format docx")
    assert "docx" in told
    exported: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        Checkpoint, "export", lambda c, folder: exported.append((c, folder)) or Path(folder)
    )
    best = trained.checkpoint_list()[1]
    shell.do(f"%train export {best.checkpoint_id[:10]} adapter")
    assert exported == [(best, "adapter")]
    assert "wrote the adapter of step 1 into adapter" in capsys.readouterr().out
    told = shell.refuse(f"%train export {best.checkpoint_id[:10]} adapter --format csv")
    assert "--format is of a run's tables" in told
    assert "%train export takes RUN|CHECKPOINT FOLDER" in shell.refuse("%train export first")


def test_runs_are_compared_with_runs_and_checkpoints_with_checkpoints(
    shell: Shell, launched: list[Run], trained: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.do(FIRST.replace("first", "second").replace("--into run", "--into other"))
    table = shell.do("%train compare first $other").to_frame()
    assert len(table) > 0
    one, two, *_ = trained.checkpoint_list()
    shell.ns["one"] = one
    compared: list[Any] = []
    checkpoints = default_client().training.checkpoints
    monkeypatch.setattr(
        checkpoints, "compare", lambda *pair, tasks, told: compared.append((*pair, tasks))
    )
    shell.do(f"%train compare $one {two.checkpoint_id[:10]} --tasks 3")
    assert compared == [(one, two, 3)]
    told = shell.refuse("%train compare first $one")
    assert "first is a run, $one is not: like is compared with like" in told
    assert "\n" + " " * (4 + 21) + "^" in told
    assert "two checkpoints are compared, found 3" in shell.refuse("%train compare $one $one $one")
    assert "--tasks is of two checkpoints" in shell.refuse("%train compare first second --tasks 2")
    result = shell.run("%train compare first thrid")
    assert "nor is it a checkpoint's id" in str(result.error_in_exec)
    assert shell.refuse("%train compare first").splitlines()[1] == (
        "%train compare takes A B …, found 1 word (line 1, column 16)"
    )


def test_a_checkpoint_is_asked(shell: Shell, trained: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def generate(checkpoint: Checkpoint, prompts: Any, told: Any, **how: Any) -> None:
        asked.append((checkpoint.step_index, prompts, how))

    monkeypatch.setattr(Checkpoint, "generate", generate)
    best = trained.best()
    shell.ns.update(best=best, chat=[{"role": "user", "content": "2 + 2?"}])
    short = best.checkpoint_id[:8]
    shell.do(f'%train sample {short} "What is 51 + 48?" --n 4 --temperature 0.5 --max-tokens 9')
    shell.do("%train sample $best one two --seed 3")
    shell.do("%train sample $best $chat")
    step = best.step_index
    assert asked == [
        (step, ["What is 51 + 48?"], {"n": 4, "temperature": 0.5, "max_tokens": 9}),
        (step, ["one", "two"], {"seed": 3}),
        (step, shell.ns["chat"], {}),
    ]
    for ref in ("first", "$run"):
        told = shell.refuse(f"%train sample {ref} hello")
        assert "is a run, and one of its checkpoints is needed" in told
        assert "\n" + " " * (4 + 14) + "^" in told
    assert isinstance(shell.run("%train sample abcd hello").error_in_exec, CellError)


@pytest.mark.parametrize("line", ["sample $one hello", "compare $one $two"])
def test_what_takes_long_tells_in_one_output_how_far_it_is(
    shell: Shell, trained: Run, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    one, two, *_ = trained.checkpoint_list()
    shell.ns.update(one=one, two=two)
    fails: list[Exception] = []

    def slow(*_: Any, told: Any, **__: Any) -> str:
        told("loading <the model>")
        told("sampling")
        if fails:
            raise fails[0]
        return "what came"

    monkeypatch.setattr(Checkpoint, "generate", slow)
    monkeypatch.setattr(type(default_client().training.checkpoints), "compare", slow)

    def shown() -> list[str]:
        outputs = [o for o in shell.ip.display_pub.outputs if "display_id" in o["transient"]]
        assert len({output["transient"]["display_id"] for output in outputs}) == 1
        assert [output["update"] for output in outputs] == [False, True, True]
        assert "loading &lt;the model&gt;" in outputs[0]["data"]["text/html"]
        return [output["data"]["text/plain"] for output in outputs]

    assert shell.do(f"%train {line}") == "what came"
    first, second, last = shown()
    assert one.checkpoint_id[:12] in first
    assert first.endswith(": loading <the model>")
    assert second.endswith(": sampling")
    assert ": done in 0.0 s" in last
    fails.append(NbtrainError("there is no memory left"))
    assert shell.run(f"%train {line}").error_in_exec is not None
    assert shown()[-1].endswith(": stopped")
    monkeypatch.setattr(Checkpoint, "generate", lambda *_, **__: "at once")
    monkeypatch.setattr(type(default_client().training.checkpoints), "compare", lambda *_, **__: 1)
    shell.do(f"%train {line}")
    assert not shell.bundles  # nothing was told, so nothing is shown


def test_settings_that_the_client_refuses_stand_under_their_flag(
    shell: Shell, trained: Run
) -> None:
    shell.ns["best"] = trained.best()
    told = shell.refuse("%train sample $best hello --temperature 9")
    assert "    %train sample $best hello --temperature 9\n" + " " * (4 + 40) + "^" in told


def test_single_options_and_single_words_are_explained(
    shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    table = repr(shell.do("%train options learning_rate nbtrain/tiny batch_size"))
    assert "learning_rate" in table
    assert "batch_size" in table
    assert "num_steps" not in table
    assert "epochs" in repr(shell.do("%train options epochs --method sft"))
    told = shell.refuse("%train options nbtrain/tiny learnig_rate")
    assert "there is no option learnig_rate" in told
    for line, mistyped, meant in [
        ("num_stepz", "num_stepz", "num_steps"),
        ("nbtrain/tiny num_step", "num_step", "num_steps"),
        ("learning_rate val_num_task", "val_num_task", "val_num_tasks"),
        ("epoch --method sft", "epoch", "epochs"),
    ]:
        told = shell.refuse(f"%train options {line}")
        assert f"there is no option {mistyped}, did you mean {meant!r}?" in told
        column = f"%train options {line}".index(mistyped) + 1
        assert f"(line 1, column {column})" in told
    told = shell.refuse("%train options zzzz nun_steps")
    assert "there is no option zzzz; no base model is called 'zzzz'" in told
    assert "did you mean 'num_steps'?" in told
    told = shell.refuse("%train options nbtrain/tiny zzzz")
    assert "there is no option zzzz, and nbtrain/tiny names the base model" in told
    shell.do("%train help sample")
    assert "--max-tokens N" in capsys.readouterr().out
    assert "did you mean 'sample'?" in shell.refuse("%train help smaple")


@pytest.mark.parametrize("value", [5, ["a"], pd.DataFrame({"a": [1]}), b"x", None])
def test_names_of_what_is_meant_by_no_word_are_refused_in_a_sentence(
    shell: Shell, trained: Run, value: Any
) -> None:
    shell.ns["odd"] = value
    for line in [
        'sample $odd "x"', "export $odd x", "compare $odd $odd", "compare first $odd", "show $odd",
        "cancel $odd", "help $odd", "options $odd", "options num_steps $odd", "datasets $odd",
        "workloads $odd", "models $odd", "bundles $odd", "base-models $odd", "report first $odd",
    ]:  # fmt: skip
        result = shell.run(f"%train {line}")
        assert isinstance(result.error_in_exec, NbtrainError), line
        (lines,) = shell.tracebacks
        assert not any("Traceback" in told for told in lines), line
    assert "%train has no '$odd'" in shell.refuse("%train help $odd")


def test_an_interrupted_line_is_told_in_a_word(
    shell: Shell, trained: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    shell.ns["best"] = trained.best()
    monkeypatch.setattr(Checkpoint, "generate", interrupted)
    result = shell.run('%train sample $best "hello"')
    assert type(result.error_in_exec) is KeyboardInterrupt
    assert shell.tracebacks == [["interrupted"]]


def test_registered_things_are_listed(shell: Shell) -> None:
    models = shell.do("%train base-models")
    assert models["base_model_slug"].tolist() == ["nbtrain/tiny"]
    assert shell.do("%train base-models nbtrain/tiny").slug == "nbtrain/tiny"
    assert len(shell.do("%train bundles")) == 0


def test_a_supervised_run_has_losses_and_no_groups(
    shell: Shell, home: Path, launched: list[Run]
) -> None:
    run = stored.create_supervised(default_client())
    stored.train(run)
    stored.loss(run, 1, 2.0)
    stored.finish(run, Phase.COMPLETED)
    assert len(shell.do(f"%train losses {run.id[:12]}")) == 1
    result = shell.run(f"%train groups {run.id[:12]}")
    assert "has no groups: it is supervised" in str(result.error_in_exec)
    assert "validation_loss" in shell.do(f"%train checkpoints {run.id[:12]}")
