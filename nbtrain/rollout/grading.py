"""Between groups and graders: what is asked, and what an answer means for each trajectory."""

from __future__ import annotations

from nbtrain.rewards.contract import GradeRequest, GroupGrades
from nbtrain.rollout.types import Group, TerminationReason
from nbtrain.rollout.underway import Open

__all__ = ["apply_grades", "grade_request", "time_for_grading"]

_NO_GRADE = (TerminationReason.ERROR, TerminationReason.STALE, TerminationReason.CANCELLED)
_OUT_OF_TIME = (TerminationReason.TIMEOUT, *_NO_GRADE)
_LEAST_SECONDS = 0.01


def grade_request(one: Open, *, chat: bool, environments: bool) -> GradeRequest:
    """A group whose trajectories have all ended, as graders get it.

    With ``environments``, completions are lists of messages and the environments' states come
    along, empty where one failed.
    """
    trajectories = one.group.trajectories
    return GradeRequest(
        prompt=one.task.prompt,
        completions=[
            (t.messages or [{"role": "assistant", "content": t.completion}])
            if environments
            else t.completion
            for t in trajectories
        ],
        columns=one.task.columns,
        raw=not chat,
        task_id=one.task.task_id,
        environments=[rollout.state for rollout in one.rollouts] if environments else None,
    )


def time_for_grading(one: Open, most: float) -> float | None:
    """Seconds until the last trajectory that could still train is out of time.

    ``None`` where graders are held to ``most`` before that. One that is over its time already
    does not take the others' away.
    """
    lefts = [r.left for r in one.rollouts if r.trajectory.reason not in _OUT_OF_TIME]
    left = max(lefts, default=most)
    return None if left >= most else max(left, _LEAST_SECONDS)


def apply_grades(group: Group, grades: GroupGrades, *, limit: float | None = None) -> None:
    """Write the graders' verdicts onto a group's trajectories, one grade per trajectory.

    A failed grade leaves the reward ``None``; a finished trajectory whose grading failed ended
    for ERROR, or for TIMEOUT where its own limit cut the grading short; one whose reward function
    returned ``None`` stays ENV_DONE without a grade. What an ERROR or a cancelled trajectory
    might have earned by chance is not recorded.
    """
    for trajectory, grade in zip(group.trajectories, grades.grades, strict=True):
        trajectory.terms = dict(grade.terms)
        if trajectory.reason in _NO_GRADE:
            trajectory.terms = dict.fromkeys(grade.terms)
            continue
        trajectory.reward = grade.reward
        trajectory.error = grade.error or trajectory.error
        failed = grade.reward is None and grade.kind != "missing"
        if failed and trajectory.reason is TerminationReason.ENV_DONE:
            late = grade.kind == "timeout" and limit is not None
            trajectory.reason = TerminationReason.TIMEOUT if late else TerminationReason.ERROR
