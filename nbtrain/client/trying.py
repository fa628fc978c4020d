"""Trying a checkpoint: replies to typed prompts, sampled in a process of its own."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtrain.client.listing import Listing
from nbtrain.client.records import Checkpoint
from nbtrain.client.warm import WarmProcess, kept
from nbtrain.errors import NbtrainError, Problem, Refused
from nbtrain.plan.fields import Option, check, counted, describe
from nbtrain.plan.options import OPTIONS
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.report.samples import ReplyView, SamplesView, samples_html, samples_text
from nbtrain.report.turns import as_turns

if TYPE_CHECKING:
    from nbtrain.store import Store, StoredCheckpoint

__all__ = [
    "Asked",
    "Sample",
    "Samples",
    "TryingProcess",
    "default_settings",
    "generate",
    "notes_on",
    "sample",
]

MOST_REPLIES = 1024
"""Of one call, all prompts together."""
SUPERVISED_TOKENS = 256
"""Most tokens of a reply of a supervised run, whose plan states none."""
SEVERAL = 0.7
"""Temperature of several replies of a supervised run, whose plan states none either."""
_SEEDS = 2**32 - MOST_REPLIES
_ENDED = {
    "stop": "ended by itself",
    "length": "cut off at its limit of tokens",
    "context": "cut off as the context was full",
}

Told = Callable[[str], None]


class TryingProcess(WarmProcess):
    """Samples from checkpoints with the engine's own decoder; one request at a time.

    It keeps the last base model loaded, and ends by itself after ``idle`` seconds without a
    request, which frees the memory. Its log is ``trying.log`` in ``home``.
    """

    module = "nbtrain.training.trying"
    called = "the process that samples"
    log_name = "trying.log"

    def __init__(
        self, home: Path, url: str, *, idle: float = 600.0, patience: float = 900.0
    ) -> None:
        from nbtrain.jobs.environment import host_environment

        environment = host_environment(os.environ, home=home, url=url)
        # A large model comes slowly from a slow disk, and gives no sign of life meanwhile
        super().__init__(
            home,
            patience=patience,
            first=patience,
            arguments=("--idle", f"{idle:g}"),
            environment=environment,
        )


def trying_process(store: Store) -> TryingProcess:
    """The one process that this Python process samples with, for a store."""
    return kept(TryingProcess, store.home, store.url)


@dataclass(frozen=True, slots=True)
class Asked:
    """How replies are sampled; the process fills ``None`` with the model's own."""

    n: int
    temperature: float
    top_p: float | None
    top_k: int | None
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Sample:
    """A sampled reply: the text of its prompt or its messages, and what the model wrote.

    ``ended`` is ``stop`` (by itself), ``length`` (at ``max_tokens``) or ``context`` (no room was
    left); ``tokens`` counts what was sampled. ``generate(prompt, seed=sample.seed)`` with the
    same settings gives this reply again.
    """

    prompt: Any
    completion: str
    ended: str
    tokens: int
    seed: int

    def to_row(self) -> dict[str, Any]:
        """The reply as one row of a table, chat messages as one text."""
        return {
            "prompt": as_turns(self.prompt),
            "completion": self.completion,
            "ended": self.ended,
            "tokens": self.tokens,
            "seed": self.seed,
        }


class Samples(Listing[Sample]):
    """Replies in the order of their prompts, ``n`` to each.

    ``settings`` are those that were used, ``notes`` what is to be known of them.
    """

    def __init__(
        self,
        items: list[Sample],
        checkpoint: Checkpoint,
        settings: Mapping[str, Any],
        notes: Sequence[str],
    ) -> None:
        super().__init__(items, ("prompt", "completion", "ended", "tokens", "seed"))
        self.checkpoint = checkpoint
        self.settings = dict(settings)
        self.notes = list(notes)

    def _view(self) -> SamplesView:
        used, n = self.settings, self.settings["n"]
        one = self.checkpoint
        prompts = [
            (replies[0].prompt, [_reply_view(reply) for reply in replies])
            for at in range(0, len(self.items), n)
            if (replies := self.items[at : at + n])
        ]
        title = (
            f"Checkpoint {one.checkpoint_id[:12]}, step {one.step_index} of run "
            f"{one.run_id[:12]}, {one.base_model_slug}"
        )
        return SamplesView(title, told_settings(used), prompts, self.notes)

    def __repr__(self) -> str:
        return samples_text(self._view())

    def _repr_html_(self) -> str:
        return samples_html(self._view())


def generate(
    checkpoint: Checkpoint,
    prompts: Any,
    n: int = 1,
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    max_tokens: int | None = None,
    seed: int | None = None,
    told: Told | None = None,
) -> Samples:
    """What the model at ``checkpoint`` answers.

    Parameters
    ----------
    checkpoint
        With weights; one of the client's listings.
    prompts
        A text (one user turn, or the raw text where the run's prompts are raw), a list of chat
        messages, or a list of such texts and chats.
    n
        Replies to each prompt; 1,024 in all at most.
    temperature, top_p, top_k
        By default as the run samples its training replies. A supervised run samples none: its one
        reply is then greedy, the likeliest as its loss knows it, and several come at 0.7, since
        greedy ones would all be equal.
    max_tokens
        Most tokens of a reply, by default the run's own limit of one turn (supervised: 256); the
        context bounds it in any case.
    seed
        Equal seeds give equal replies; by default a new one, which the replies tell.
    told
        Gets a sentence now and then while it works; by default only the start of the process is
        told, on stderr.

    Raises
    ------
    Refused
        With everything that is wrong with the arguments, or prompts that cannot be rendered or
        leave no room.
    NotFound
        When the checkpoint or its workload is gone.
    NbtrainError
        When it holds no weights, its files are damaged, the base model is not on this machine or
        memory runs out.
    """
    store = checkpoint._store
    if store is None:
        msg = "this checkpoint knows no store; client.training.checkpoints.get(id) gives one"
        raise NbtrainError(msg)
    row = store.find_checkpoint(checkpoint.checkpoint_id)
    plan = ResolvedPlan.from_json(store.run(row.run).resolved)
    raw, environment = _work(store, plan)
    problems: list[Problem] = []
    given = _prompts(prompts, raw=raw, problems=problems)
    stated = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
    asked = _asked(plan, {"n": n, "max_tokens": max_tokens, **stated}, len(given), problems)
    if asked is None:
        raise Refused(problems)
    wanted = [{"text": one} if isinstance(one, str) else {"messages": one} for one in given]
    found = sample(store, row, plan, wanted, asked, told)
    items = [
        Sample(prompt, reply["text"], reply["ended"], reply["tokens"], reply["seed"])
        for prompt, replies in zip(given, found["replies"], strict=True)
        for reply in replies
    ]
    notes = notes_on(plan, greedy=temperature is None and plan.method == "sft", n=asked.n)
    if environment:
        notes.append("The workload has an environment: only the first reply is sampled.")
    notes += _sentences(found["remarks"])
    settings = {"n": asked.n, "seed": asked.seed, **found["settings"]}
    return Samples(items, checkpoint, settings, notes)


def sample(
    store: Store,
    row: StoredCheckpoint,
    plan: ResolvedPlan,
    prompts: Sequence[Mapping[str, Any]],
    asked: Asked,
    told: Told | None,
) -> dict[str, Any]:
    """Ask the process: ``replies`` by prompt, the ``settings`` used, and ``remarks``."""
    from nbtrain.jobs.environment import available_cores, rank_threads

    if not row.weights:
        msg = f"the checkpoint {row.short_id} of step {row.step} holds no weights to sample from"
        raise NbtrainError(msg)
    stated = os.environ.get("OMP_NUM_THREADS")
    threads = rank_threads(plan.to_json(), stated=stated, cores=available_cores())
    request = {
        "op": "sample",
        "checkpoint": row.checkpoint_id,
        "prompts": list(prompts),
        "threads": threads,
        **{name: getattr(asked, name) for name in Asked.__slots__},
    }
    found: dict[str, Any] = trying_process(store).request(request, told, starting=told)
    return found


def told_settings(used: Mapping[str, Any]) -> str:
    """The settings in one line."""
    heat = used["temperature"]
    parts = ["greedy" if not heat else f"temperature {heat:g}"]
    if heat and used["top_p"] < 1:
        parts.append(f"top_p {used['top_p']:g}")
    if heat and used["top_k"] > 0:
        parts.append(f"top_k {used['top_k']}")
    parts.append(f"at most {counted(used['max_tokens'], 'token')}")
    if heat:
        last = used["seed"] + used["n"] - 1
        parts.append(f"seed {used['seed']}" + (f" to {last}" if used["n"] > 1 else ""))
    return ", ".join(parts)


def told_end(ended: str, tokens: int) -> str:
    """How a reply ended, in words."""
    return f"{_ENDED[ended]}, {tokens:,} tokens" if tokens != 1 else f"{_ENDED[ended]}, 1 token"


def notes_on(plan: ResolvedPlan, *, greedy: bool, n: int) -> list[str]:
    """Why the temperature is what it is, where the run's plan does not say."""
    if not greedy:
        return []
    if n == 1:
        return ["A supervised run states no temperature: this is the likeliest reply."]
    return [
        f"A supervised run states no temperature: several replies are sampled at {SEVERAL:g}, "
        "as greedy ones would be equal."
    ]


def _reply_view(reply: Sample) -> ReplyView:
    return ReplyView(reply.completion, told_end(reply.ended, reply.tokens))


def _sentences(remarks: Sequence[str]) -> list[str]:
    return [f"{remark[:1].upper()}{remark[1:]}." for remark in remarks]


# --- arguments -----------------------------------------------------------------------------------


def _work(store: Store, plan: ResolvedPlan) -> tuple[bool, bool]:
    """Whether prompts are raw texts, and whether there is an environment."""
    if plan.door == "descriptor":
        return False, False
    from nbtrain.catalog import Catalog

    workload = Catalog(store).workload(plan.workload.workload_id)
    return workload.raw, workload.environment_path is not None


def _prompts(prompts: Any, *, raw: bool, problems: list[Problem]) -> list[Any]:
    """The prompts as a list of texts and of lists of messages."""
    from nbtrain.catalog.rows import read_rows

    alone = isinstance(prompts, str | Mapping)
    if not alone and (not isinstance(prompts, Sequence) or isinstance(prompts, bytes | bytearray)):
        to_list = getattr(prompts, "tolist", None)  # a pandas or NumPy column
        listed = to_list() if callable(to_list) else None
        if not isinstance(listed, list):
            message = f"prompts is {describe(prompts)}"
            allowed = "a text, a list of chat messages, or a list of these"
            problems.append(Problem("prompts", message, describe(prompts), allowed))
            return []
        prompts = listed
    if not alone and prompts and all(isinstance(one, Mapping) for one in prompts):
        alone = True
    given = [prompts] if alone else list(prompts)
    rows, wrong = read_rows([{"prompt": one} for one in given], field="prompts", raw=raw)
    problems += [replace(problem, field="prompts") for problem in wrong]
    return [row.get("prompt") for row in rows]


def _asked(
    plan: ResolvedPlan, stated: Mapping[str, Any], prompts: int, problems: list[Problem]
) -> Asked | None:
    """The settings with the plan's defaults filled in; ``None`` where there are problems."""
    context = plan.base_model.max_context
    limit = replace(
        OPTIONS["max_output_tokens_per_turn"], name="max_tokens", max=context, within_context=False
    )
    options = [
        Option("n", "integer", "", "sampling", 1, min=1, max=MOST_REPLIES),
        limit,
        *(OPTIONS[name] for name in ("temperature", "top_p", "top_k")),
        replace(OPTIONS["seed"], max=_SEEDS - 1),
    ]
    values: dict[str, Any] = {}
    for option in options:
        value = stated[option.name]
        if value is None and option.name != "n":
            values[option.name] = None
            continue
        values[option.name], problem = check(option, value)
        if problem is not None:
            problems.append(problem)
    if problems:
        return None
    if values["n"] * prompts > MOST_REPLIES:
        message = f"{prompts:,} prompts with n {values['n']:,} are too many replies"
        found = values["n"] * prompts
        problems.append(Problem("n", message, found, f"{MOST_REPLIES:,} replies in all"))
        return None
    seed = secrets.randbelow(_SEEDS) if values["seed"] is None else values["seed"]
    asked = default_settings(plan, n=values["n"], seed=seed)
    return replace(asked, **{name: value for name, value in values.items() if value is not None})


def default_settings(plan: ResolvedPlan, *, n: int, seed: int, prefix: str = "") -> Asked:
    """As the run samples its training replies, or with ``val_`` those of its validation."""
    if plan.method == "sft":
        most = min(SUPERVISED_TOKENS, plan.base_model.max_context)
        return Asked(n, 0.0 if n == 1 else SEVERAL, None, None, most, seed)
    heat, p, k = (plan[f"{prefix}{name}"] for name in ("temperature", "top_p", "top_k"))
    turn, whole = (plan[f"{prefix}max_output_tokens_per_{per}"] for per in ("turn", "trajectory"))
    return Asked(n, heat, p, k, min(turn, whole), seed)
