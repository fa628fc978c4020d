"""What a run took over from its parent, in sentences made from the resolved plans alone."""

from __future__ import annotations

from nbtrain.plan.descriptor.table import fields_of
from nbtrain.plan.fields import show
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.resolved import ResolvedPlan, Setting
from nbtrain.plan.schedule import learning_rate, schedule_of

__all__ = ["anew", "certificate", "inherited", "notes"]


def notes(plan: ResolvedPlan, parent: ResolvedPlan | None) -> list[str]:
    """What the cell says about a run with a parent, and the plan's hints."""
    told = [inherited(plan), anew(plan, parent), certificate(plan, parent)]
    return [note for note in told if note] + [f"hint: {hint}" for hint in plan.hints]


def inherited(plan: ResolvedPlan) -> str | None:
    """Which values came from the parent; ``None`` without one.

    Inherited values that equal the option's fixed default are counted, not listed.
    """
    if plan.parent is None:
        return None
    names = [s for s in plan.settings.values() if s.origin == "inherited"]
    telling = [s for s in names if not _is_default(s, plan)]
    listed = ", ".join(f"{s.name} {show(s.value)}" for s in telling)
    rest = len(names) - len(telling)
    text = (
        f"goes on from checkpoint {plan.parent.checkpoint_id[:12]} "
        f"(step {plan.parent.step} of run {plan.parent.run_id[:12]})"
    )
    if listed:
        text += f"; inherited: {listed}"
    if rest:
        text += f"{' and' if listed else '; inherited:'} {rest} options at their defaults"
    return text


def anew(plan: ResolvedPlan, parent: ResolvedPlan | None) -> str | None:
    """The values that nobody stated and that are not the parent's; ``None`` without any.

    Such are options computed anew, and those that a run has for itself.
    """
    if parent is None:
        return None
    before = parent.settings
    found = [
        f"{s.name} {show(s.value)} ({s.origin}, {show(before[s.name].value)} before)"
        for s in plan.settings.values()
        if s.origin not in ("stated", "inherited")
        and s.name in before
        and s.value != before[s.name].value
    ]
    return f"not inherited: {', '.join(found)}" if found else None


def _is_default(setting: Setting, plan: ResolvedPlan) -> bool:
    """Whether it is the fixed default of the door that the plan came through."""
    option = OPTIONS.get(setting.name)
    if plan.door == "descriptor":
        name = "setting" if plan.method == "sft" else "rl_setting"
        own = (f.option for f in fields_of(plan.method) if getattr(f, name) == setting.name)
        option = next(own, option)
    if option is None or option.compute is not None:
        return False
    default = option.default
    # BF16 in the document is bf16 among settings
    return bool(setting.value == (default.lower() if isinstance(default, str) else default))


def certificate(plan: ResolvedPlan, parent: ResolvedPlan | None) -> str | None:
    """From which step to which, how many updates, and the learning rate before and after.

    ``None`` without a parent. ``parent`` is the parent run's plan, for the rate before.
    """
    if plan.parent is None:
        return None
    steps = plan.total_steps - plan.start_step
    after = learning_rate(plan.start_step + 1, **schedule_of(plan.options, plan.total_steps))
    text = f"step {plan.start_step} to {plan.total_steps}, {steps} updates, "
    if plan["load_weights_only"]:
        return f"{text}learning rate {_rate(after)} (weights only: fresh optimizer and schedule)"
    if parent is None or plan.parent.step == 0:
        return f"{text}learning rate {_rate(after)}"
    before = learning_rate(plan.parent.step, **schedule_of(parent.options, parent.total_steps))
    return f"{text}learning rate {_rate(before)} before, {_rate(after)} after"


def _rate(value: float) -> str:
    return show(float(f"{value:.4g}"))
