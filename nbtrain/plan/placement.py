"""What of a plan depends on the machine: which sampler decodes, and how many ranks there are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nbtrain.errors import Problem
from nbtrain.plan.fields import show
from nbtrain.plan.registry import BaseModelInfo, MachineInfo
from nbtrain.plan.resolved import Setting
from nbtrain.plan.statements import Statements

_NO_VLLM = 'It comes with an extra: pip install "nbtrain[vllm]"'


def choose_sampler(
    setting: Setting, model: BaseModelInfo, machine: MachineInfo, *, ranks: int
) -> Setting:
    """The setting of ``sampler`` with ``auto`` replaced by what it stands for here.

    The embedded model and GGUF files stay with what comes along: vLLM gains nothing on the one
    and reads few of the others. It runs in one rank only.
    """
    if setting.value != "auto":
        return setting
    if machine.gpus and machine.vllm and ranks == 1 and model.kind not in ("embedded", "gguf"):
        return Setting("sampler", "vllm", "computed", "a GPU and vLLM are here")
    if model.sampler == "generate":
        return Setting("sampler", "generate", "computed", "its architecture's cache needs it")
    note = "vLLM is not installed" if machine.gpus and not machine.vllm else None
    return Setting("sampler", model.sampler, "computed", note)


def refusals(
    settings: Mapping[str, Setting],
    found: Statements,
    model: BaseModelInfo | None,
    machine: MachineInfo,
) -> Iterator[Problem]:
    """Problems of ``sampler`` and ``gpus`` with the model and the machine."""

    def place(name: str) -> Problem:
        setting, statement = settings[name], found.options.get(name)
        origin = "" if setting.origin == "stated" else f" ({setting.origin})"
        where = statement.where if statement else None
        return Problem(name, f"{name} {show(setting.value)}{origin}", setting.value, where=where)

    sampler = settings["sampler"].value
    if "sampler" not in found.bad:
        if sampler == "vllm" and not machine.vllm:
            yield _told(place("sampler"), "needs vLLM, which is not installed", hint=_NO_VLLM)
        if sampler == "vllm" and settings["gpus"].value > 1:
            told = f"runs in one rank, and gpus is {settings['gpus'].value}"
            yield _told(place("sampler"), told, hint="State gpus: 1, or another sampler")
        if sampler == "ragged" and model is not None and model.sampler != "ragged":
            told = f"cannot hold the cache of {model.slug}"
            allowed = f"{model.sampler} or vllm" if machine.vllm else model.sampler
            yield _told(place("sampler"), told, allowed, "Leave it out: auto picks what fits")
    if "gpus" not in found.bad and 0 < machine.gpus < settings["gpus"].value:
        told = f"is more than the {machine.gpus} of this machine"
        yield _told(place("gpus"), told, f"1 to {machine.gpus}" if machine.gpus > 1 else "1")


def _told(
    problem: Problem, message: str, allowed: str | None = None, hint: str | None = None
) -> Problem:
    return Problem(
        problem.field, f"{problem.message} {message}", problem.found, allowed, problem.where, hint
    )


def notes(settings: Mapping[str, Setting], machine: MachineInfo) -> Iterator[tuple[str, str]]:
    """(option, note) for values that the machine explains."""
    ranks = settings["gpus"].value
    if ranks > 1 and not machine.gpus:
        yield "gpus", f"{ranks} CPU ranks: this machine has no GPU"
