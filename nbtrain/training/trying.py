"""The process that samples from checkpoints: ``python -m nbtrain.training.trying``.

It answers as :mod:`nbtrain.data.serving` says. A request is ``{"id", "op": "sample",
"checkpoint", "prompts": [{"text"} or {"messages", "tools"}, …], "n", "temperature", "top_p",
"top_k", "max_tokens", "seed", "threads"}``; ``null`` settings are those of the checkpoint's run.
A base model stays loaded until another one is asked for, and the adapter on it is exchanged.
"""

from __future__ import annotations

import argparse
import gc
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nbtrain.catalog import Catalog
from nbtrain.catalog.thinking import template_arguments
from nbtrain.data.rendering import Renderer, end_ids_in
from nbtrain.data.serving import Teller, serve
from nbtrain.environments import EnvironmentPool
from nbtrain.errors import NbtrainError, Problem, Refused, first_line
from nbtrain.plan.resolved import ResolvedPlan
from nbtrain.rollout.conversation import ChatConversation, tool_schemas
from nbtrain.rollout.decoders import Decoder
from nbtrain.rollout.limits import Sampling, room, with_model_defaults
from nbtrain.rollout.tokens import decode_completion, end_ids
from nbtrain.rollout.types import Finish, Sample, SampleRequest
from nbtrain.store import Store, StoredCheckpoint, open_store
from nbtrain.training import setup
from nbtrain.training.adapted import AdaptedModel
from nbtrain.training.base_files import base_folder
from nbtrain.training.exhausted import is_exhausted
from nbtrain.training.tried_model import TriedModel, device_of

__all__ = ["Trier"]

TRYING_STREAM = 3
"""Random streams of tried replies, apart from training, validation and the start checks."""
_TOLD_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class _Prompts:
    """Prompts as ids; ``context`` bounds prompt and reply together."""

    ids: list[tuple[int, ...]]
    ends: tuple[int, ...]
    context: int


class Trier:
    """Answers requests with the base model of the last one kept."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._base: TriedModel | None = None
        self._tools: dict[str, list[dict[str, Any]]] = {}

    def answer(self, request: Mapping[str, Any], tell: Teller) -> Any:
        """The result of one request, as plain values. Raises what stops it."""
        if request.get("op") != "sample":
            msg = f"this process has no request {request.get('op')!r}"
            raise NbtrainError(msg)
        row = self._store.find_checkpoint(str(request["checkpoint"]))
        plan = ResolvedPlan.from_json(self._store.run(row.run).resolved)
        said = None
        try:
            return self._sample(request, row, plan, tell)
        except Exception as error:
            if not is_exhausted(error):
                raise
            said = first_line(error)
        # Outside of the handler, whose traceback holds on to the model's tensors
        self._forget()
        msg = (
            f"out of memory while sampling from {plan.base_model.slug}: {said}; ask for fewer "
            "replies (n) or tokens (max_tokens), or wait until other runs are over"
        )
        raise NbtrainError(msg)

    # --- the model

    def _sample(
        self, request: Mapping[str, Any], row: StoredCheckpoint, plan: ResolvedPlan, tell: Teller
    ) -> dict[str, Any]:
        if request.get("threads"):
            torch.set_num_threads(int(request["threads"]))
        if not row.weights:
            msg = f"the checkpoint {row.short_id} of step {row.step} holds no weights"
            raise NbtrainError(msg)
        device, remarks = device_of(row, plan)
        base = self._loaded(row, plan, device, tell)
        prompts = self._rendered(request["prompts"], base, plan, tell)
        sampling = _sampling(request, base.adapted, plan, prompts.context)
        sampler = base.sampler(plan, prompts.ends, prompts.context)
        requests = _requests(prompts, sampling, n=int(request["n"]), seed=int(request["seed"]))
        samples = _run(sampler, requests, tell)
        n = int(request["n"])
        replies = [
            _reply(samples[one.request_id], one, base.tokenizer, prompts, int(request["seed"]) + at)
            for one, at in zip(requests, list(range(n)) * len(prompts.ids), strict=True)
        ]
        return {
            "settings": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_tokens": sampling.max_new_tokens,
            },
            "device": device.type,
            "remarks": remarks,
            "replies": [replies[at : at + n] for at in range(0, len(replies), n)],
        }

    def _loaded(
        self, row: StoredCheckpoint, plan: ResolvedPlan, device: torch.device, tell: Teller
    ) -> TriedModel:
        """The plan's base with the checkpoint's adapter on it."""
        folder, problems = base_folder(self._store, plan)
        if folder is None or problems:
            raise Refused(problems)
        base = self._base
        if base is None or not base.serves(plan, device):
            base = None
            self._forget()
            tell(f"loading the base model {plan.base_model.slug}")
            base = self._base = TriedModel(folder, plan, device)
        if base.checkpoint_id != row.checkpoint_id:
            tell(f"loading the checkpoint of step {row.step}")
            base.put_on(row, plan)
        return base

    def _forget(self) -> None:
        """Free the memory of what is loaded."""
        self._base = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    # --- prompts

    def _rendered(
        self,
        prompts: Sequence[Mapping[str, Any]],
        base: TriedModel,
        plan: ResolvedPlan,
        tell: Teller,
    ) -> _Prompts:
        """The prompts as the run's own training renders them."""
        tokenizer, model = base.tokenizer, base.adapted.model
        if plan.method == "sft":
            ends = tuple(sorted(end_ids_in(base.folder, tokenizer)))
            context = plan.base_model.max_context
            renderer = Renderer(tokenizer, ends)
            render = _supervised(renderer)
        else:
            ends = tuple(end_ids(model.generation_config, tokenizer))
            context = setup.context_of(plan)
            raw, tools = self._work(plan, tell)
            family = model.config.model_type
            effort = plan["reasoning_effort"]
            talk = ChatConversation(
                tokenizer,
                tools=tools,
                ends=ends,
                raw=raw,
                template_kwargs=template_arguments(tokenizer.chat_template, effort, family),
            )

            def render(prompt: Mapping[str, Any]) -> tuple[int, ...]:
                return talk.prompt(prompt["text"] if "text" in prompt else prompt["messages"])

        return _Prompts(_all_rendered(prompts, render, context), ends, context)

    def _work(self, plan: ResolvedPlan, tell: Teller) -> tuple[bool, list[dict[str, Any]]]:
        """Whether prompts are raw, and the tools that the template shows to the model."""
        if plan.door == "descriptor":
            return False, []
        workload = Catalog(self._store).workload(plan.workload.workload_id)
        path = workload.environment_path
        if path is None:
            return workload.raw, []
        if workload.workload_id not in self._tools:
            tell("asking the environment for its tools")
            log = self._store.home / "trying-environment.log"
            with EnvironmentPool(path, workers=1, log_path=log) as pool:
                problem = pool.check_start()
                if problem is not None:
                    raise Refused([problem])
                tools, problems = tool_schemas(pool.contract.tools)
            if problems:
                raise Refused(problems)
            self._tools[workload.workload_id] = tools
        return workload.raw, self._tools[workload.workload_id]


# --- prompts and settings -------------------------------------------------------------------------


def _supervised(renderer: Renderer) -> Any:
    def render(prompt: Mapping[str, Any]) -> tuple[int, ...]:
        messages = prompt.get("messages") or [{"role": "user", "content": prompt["text"]}]
        talk = renderer.conversation({"messages": messages, "tools": prompt.get("tools")})
        text = renderer.text(talk.messages, talk.tools, prompt=True)
        # The template writes the special tokens itself.
        return tuple(renderer.tokenizer(text, add_special_tokens=False)["input_ids"])

    return render


def _all_rendered(
    prompts: Sequence[Mapping[str, Any]], render: Any, context: int
) -> list[tuple[int, ...]]:
    """Every prompt as ids. Raises ``Refused`` with all that cannot be a prompt."""
    found: list[tuple[int, ...]] = []
    problems = []
    for number, prompt in enumerate(prompts, 1):
        which = f"prompt {number}" if len(prompts) > 1 else "the prompt"
        try:
            ids = render(prompt)
        except Exception as error:  # templates are programs: anything may come out of one
            said = f"{which} cannot be rendered: {first_line(error)}"
            problems.append(Problem("prompts", said))
            continue
        if not 0 < len(ids) < context:
            said = f"{which} has {len(ids):,} tokens, which leaves no room for a reply"
            said = said if ids else f"{which} has no tokens"
            allowed = f"1 to {context - 1:,} tokens"
            problems.append(Problem("prompts", said, len(ids), allowed))
        found.append(ids)
    if problems:
        raise Refused(problems)
    return found


def _sampling(
    request: Mapping[str, Any], adapted: AdaptedModel, plan: ResolvedPlan, context: int
) -> Sampling:
    """The settings that were asked for, the model's own where top-p or top-k is ``null``."""
    most = min(int(request["max_tokens"]), context - 1)
    sampling = Sampling(most, most, context, temperature=float(request["temperature"]))
    return with_model_defaults(
        sampling, top_p=request["top_p"], top_k=request["top_k"], model=adapted.generation_defaults
    )


def _requests(prompts: _Prompts, sampling: Sampling, *, n: int, seed: int) -> list[SampleRequest]:
    """``n`` for each prompt, in order. A reply's random stream follows from its own seed alone,
    which is ``seed`` and its number: it can be had again by itself.
    """
    return [
        SampleRequest(
            number * n + at,
            ids,
            room(sampling, held=len(ids), sampled=0),
            (seed + at, TRYING_STREAM),
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
        )
        for number, ids in enumerate(prompts.ids)
        for at in range(n)
    ]


def _run(sampler: Decoder, requests: Sequence[SampleRequest], tell: Teller) -> dict[int, Sample]:
    """Every request's reply."""
    try:
        sampler.submit(requests)
    except ValueError as error:
        msg = f"these replies cannot be sampled: {error}"
        raise NbtrainError(msg) from error
    done: dict[int, Sample] = {}
    told = -math.inf
    try:
        while sampler.pending:
            done |= {sample.request_id: sample for sample in sampler.step()}
            tell.check()
            if time.monotonic() - told > _TOLD_SECONDS:
                told = time.monotonic()
                tell(f"{len(done):,} of {len(requests):,} replies")
    finally:
        sampler.cancel([one.request_id for one in requests if one.request_id not in done])
        # Replies depend in their last bits on what stands in the buffers beside them: empty
        # ones give the same for the same question.
        sampler.release()
    return done


def _reply(
    sample: Sample, request: SampleRequest, tokenizer: Any, prompts: _Prompts, seed: int
) -> dict[str, Any]:
    ended = "stop"
    if sample.finish is not Finish.STOP:
        full = len(request.prompt_ids) + len(sample.token_ids) >= prompts.context
        ended = "context" if full else "length"
    return {
        "text": decode_completion(tokenizer, sample.token_ids, prompts.ends),
        "tokens": len(sample.token_ids),
        "ended": ended,
        "seed": seed,
    }


def main() -> None:
    """Serve stdin and stdout; the store is the one of the environment."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--idle", type=float, default=600.0, help="seconds without a request")
    options = parser.parse_args()
    serve(Trier(open_store()).answer, idle=options.idle)


if __name__ == "__main__":
    main()
