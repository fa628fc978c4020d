"""What of a descriptor this machine and this version can honour."""

from __future__ import annotations

from collections.abc import Iterator

from nbtrain.errors import Problem
from nbtrain.plan.descriptor.draft import Draft
from nbtrain.plan.fields import show


def refusals(draft: Draft) -> Iterator[Problem]:
    """Problems of the execution settings with the machine, and what only verl could honour."""
    yield from _verl(draft)
    yield from _devices(draft)
    machine = draft.refs.machine
    precision, memory = "model.precision", "execution.hostMemoryGiB"
    quantised = draft.supervised and draft[precision] == "INT4"
    if quantised and draft.fine(precision) and not machine.int4:
        message = f"{draft.said(precision)} needs bitsandbytes, which is not installed"
        yield draft.problem(precision, message, "BF16", "pip install bitsandbytes")
    wanted, has = draft[memory], machine.memory_gib
    if wanted is not None and has is not None and draft.fine(memory) and wanted > has:
        message = f"{draft.said(memory)} is more than this machine's {has:,.1f}"
        yield draft.problem(memory, message, f"at most {has:,.1f}", "Leave it out")


def take_profile(draft: Draft) -> None:
    """An unstated device profile is this machine's."""
    name = "execution.deviceProfile"
    if draft[name] is None or draft.origins[name] == "inherited":
        draft.values[name] = draft.refs.machine.device_profile
        draft.origins[name] = "computed"


def _verl(draft: Draft) -> Iterator[Problem]:
    for name, one in draft.fields.items():
        if not one.by_verl or name.startswith("engineSettings."):
            continue
        if draft[name] is None or not draft.fine(name):
            continue
        if draft.supervised and name == "execution.rollout.memoryShare":
            message = f"{draft.said(name)}: a supervised run has no rollout engine"
        else:
            message = f"{draft.said(name)} needs verl, which is not built yet"
        yield draft.problem(name, message, hint="Leave it out")


def _devices(draft: Draft) -> Iterator[Problem]:
    machine = draft.refs.machine
    profile, gpus, apart = (f"execution.{k}" for k in ("deviceProfile", "gpus", "rolloutGpus"))
    if draft[profile] != machine.device_profile and draft.fine(profile):
        message = f"{draft.said(profile)} is not here: this machine's is {machine.device_profile}"
        yield draft.problem(profile, message, machine.device_profile, "Leave it out")
    if draft.fine(apart) and draft[apart] > 0:
        message = f"{draft.said(apart)} is not supported: rollouts run on the training devices"
        hint = "Leave it out, and count every device in execution.gpus"
        yield draft.problem(apart, message, "0", hint)
    if draft.fine(gpus) and 0 < machine.gpus < draft[gpus]:
        message = f"{draft.said(gpus)} is more than the {machine.gpus} of this machine"
        yield draft.problem(gpus, message, f"1 to {show(machine.gpus)}")
