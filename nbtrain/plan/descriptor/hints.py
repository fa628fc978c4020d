"""What a descriptor states that will work, but probably not as wanted."""

from __future__ import annotations

from collections.abc import Iterator

from nbtrain.plan.descriptor.draft import Draft
from nbtrain.plan.descriptor.parent import start_step
from nbtrain.plan.descriptor.terms import OF_GRADER, STRICT, Reward
from nbtrain.plan.fields import show


def hints(draft: Draft, reward: Reward, total: int) -> Iterator[str]:
    """Sentences, the most general first; ``total`` is the step at which the run ends."""
    for name in draft.zeros:
        if draft[name] is not None:
            yield f"{draft.called(name)} {draft.notes[name]}"
    if not draft.smoke:
        yield from _saving(draft, total)
    if draft.stated("grader") and reward.origin != OF_GRADER:
        yield "grader is recorded and shown: this version evaluates nothing with it yet"
    if draft.supervised:
        yield from _supervised(draft, total)
    else:
        yield from _reinforcement(draft, reward)


def _saving(draft: Draft, total: int) -> Iterator[str]:
    every, keep = "execution.saveEvery", "execution.keepAdapters"
    apart, start = draft[every], start_step(draft)
    if apart is not None and (total - 1) // apart > start // apart:
        return
    what = f"{draft.called(every)} is off"
    if apart is not None:
        what = f"{draft.said(every)} saves nothing before the end, at step {show(total)}"
    yield f"{what}: an interrupted run has nothing to restart from"
    if draft.stated(keep):
        yield f"{draft.said(keep)} changes nothing: there is one checkpoint, at the end"


def _left_out(draft: Draft) -> Iterator[str]:
    """What is stated, and a smoke check does without."""
    steps = f"smoke.maxSteps {show(draft['smoke.maxSteps'])}"
    ends = f"ends when its rows are known, after {steps} at the latest"
    for name, does in (
        ("data.validationDataset", "validates nothing"),
        ("training.validationFrequencySteps", "validates nothing"),
        ("training.epochs", ends),
        ("training.maxSteps", ends),
    ):
        if draft.stated(name) and draft[name]:
            yield f"{draft.said(name)} is left out: a smoke check {does}"


def _supervised(draft: Draft, total: int) -> Iterator[str]:
    dataset, validation = draft.refs.dataset, draft.refs.validation
    epochs, most = "training.epochs", "training.maxSteps"
    if draft.smoke and dataset is not None and draft["smoke.sliceSize"] > dataset.rows:
        rows = f"the {show(dataset.rows)} rows of the dataset"
        yield f"smoke.sliceSize {show(draft['smoke.sliceSize'])} is more than {rows}: all are taken"
    calls, turns = "loss.trainOnToolCalls", "loss.assistantTurns"
    tools = dataset is not None and "tools" in dataset.facts
    if draft[calls] and draft[turns] == "last" and (tools or draft.stated(calls)):
        yield (
            f"{draft.called(calls)} changes nothing with {draft.called(turns)} last: a message "
            "with calls is never the last one; state all to train on them"
        )
    if not draft.smoke and draft[most] > total and draft.origins[most] != "small":
        each = -(-total // draft[epochs])
        yield (
            f"{draft.said(most)} is not reached: {draft.said(epochs)} end the run at step "
            f"{show(total)}; state {draft.called(epochs)}: {-(-draft[most] // each)} to reach it"
        )
    if draft["data.packing"]:
        yield f"{draft.called('data.packing')} puts several rows into one sequence: a step has more"
    if draft.smoke:
        yield from _left_out(draft)
        return
    every = "training.validationFrequencySteps"
    if validation is None and draft.stated(every):
        name = draft.called("data.validationDataset")
        yield f"{draft.called(every)} evaluates nothing: there is no {name}"
    if validation is not None and draft[every] > total:
        yield (
            f"{draft.said(every)} is more than the {show(total)} updates of the run: it is "
            "evaluated at the end alone"
        )


def _reinforcement(draft: Draft, reward: Reward) -> Iterator[str]:
    prompts, gpus = "rlHyperparams.promptsPerStep", "execution.gpus"
    if draft["rlHyperparams.temperature"] == 0:
        yield "rlHyperparams.temperature 0 is greedy: every group ties, so nothing is learned"
    if draft[prompts] % draft[gpus]:
        yield (
            f"{draft.said(prompts)} is no multiple of {draft.said(gpus)}: devices get unequal "
            "numbers of prompts. Set it to a multiple"
        )
    if draft.rows < draft[prompts]:
        yield (
            f"{draft.said(prompts)} is more than the {show(draft.rows)} rows of the dataset: a "
            "step samples some of them more than once"
        )
    kinds = [term["kind"] for term in reward.terms]
    if draft.refs.warm_start is None and kinds and all(kind in STRICT for kind in kinds):
        yield (
            f"a reward of {' and '.join(kinds)} alone gives a model that is never right no signal, "
            "since all of a group score zero: add a format term, or start from a supervised "
            "adapter with warmStartModelId"
        )
    dataset = draft.refs.dataset
    count, line = dataset.facts.get("unanswered", (0, 0)) if dataset is not None else (0, 0)
    by_answer = any(
        term["kind"] == "json-label-match" or term.get("column") == "answer"
        for term in reward.terms
    )
    if count and by_answer and dataset is not None and "answer" not in dataset.columns:
        yield (
            f"{show(count)} rows of the dataset (the first on line {show(line)}) end without an "
            "answer to compare with: their completions stay ungraded"
        )
