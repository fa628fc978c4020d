"""The vLLM sampler: vLLM's engine in this process, the policy as numbered LoRA versions.

vLLM holds the base weights a second time and reads the adapter from disk.
"""

from __future__ import annotations

import hashlib
import shutil
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtrain.rollout.requests import check_request
from nbtrain.rollout.types import Finish, Sample, SampleRequest
from nbtrain.rollout.vllm_engine import VllmEngine

__all__ = ["VllmSampler"]


@dataclass(slots=True)
class _Adapter:
    """A policy version on disk. ``live`` counts the requests that it samples."""

    version: int
    number: int
    folder: Path
    handle: Any
    live: int = 0


@dataclass(slots=True)
class _Running:
    name: str
    sample: Sample
    adapter: _Adapter


class VllmSampler:
    """Samples with vLLM. Implements ``rollout.types.Sampler``.

    A reply is sampled to its end by the policy version under which it left the queue: running
    requests stay bound to their adapter when a new policy comes, and their tokens carry the
    version that sampled them. (The ragged sampler changes running replies over.) Each new
    version is saved by ``save_adapter(folder)``, as PEFT saves it, to a new folder in
    ``adapter_folder``, which is deleted once nothing is sampled by it any more.

    Each request's seed is a hash of its stream. Ids agree with no other sampler's, and what else
    is decoded can tip a draw.

    A request counts as admitted from its first token. ``slots`` and ``max_context`` are at most
    the engine's.

    Raises ``ValueError`` for an argument out of range.
    """

    def __init__(
        self,
        engine: VllmEngine,
        *,
        eos_ids: Collection[int],
        save_adapter: Callable[[Path], None],
        adapter_folder: Path,
        slots: int | None = None,
        max_context: int | None = None,
    ) -> None:
        self._of = engine
        self._slots = engine.slots if slots is None else slots
        self._max_context = engine.max_context if max_context is None else max_context
        if not 1 <= self._slots <= engine.slots:
            msg = f"slots is {slots}; allowed: 1 to {engine.slots}"
            raise ValueError(msg)
        if not 2 <= self._max_context <= engine.max_context:
            msg = f"max_context is {max_context}; allowed: 2 to {engine.max_context}"
            raise ValueError(msg)
        self._ends = frozenset(eos_ids)
        for eos in self._ends:
            if not 0 <= eos < engine.vocabulary:
                msg = f"end id {eos} is outside the vocabulary of {engine.vocabulary}"
                raise ValueError(msg)
        self._save = save_adapter
        self._folder = adapter_folder
        self._queue: deque[SampleRequest] = deque()
        self._running: dict[int, _Running] = {}
        self._by_name: dict[str, _Running] = {}
        self._version = 0
        self._current: _Adapter | None = None
        self._admitted: list[int] = []

    @property
    def pending(self) -> int:
        """Requests queued or running."""
        return len(self._queue) + len(self._running)

    def admitted(self) -> list[int]:
        """Requests whose first token has come since the last call."""
        new, self._admitted = self._admitted, []
        return new

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests; they are admitted in order as slots and memory allow.

        Raises ``ValueError``, and queues none, when a request id is taken, a prompt is empty,
        leaves no room for a token or holds an unknown id, a parameter is out of range, or the
        engine's log-probs would not be right for a request.
        """
        taken = {request.request_id for request in self._queue} | self._running.keys()
        for request in requests:
            if request.request_id in taken:
                msg = f"request id {request.request_id} is taken"
                raise ValueError(msg)
            taken.add(request.request_id)
            check_request(request, self._max_context, self._of.vocabulary)
            refusal = self._of.scoring.refusal(request)
            if refusal is not None:
                msg = f"request {request.request_id}: {refusal}"
                raise ValueError(msg)
        self._queue.extend(requests)

    def step(self) -> list[Sample]:
        """Sample one token for every admitted request and return those that finished.

        Raises ``RuntimeError`` when vLLM gives up on a request.
        """
        if not self.pending:
            return []
        while self._queue and len(self._running) < self._slots:
            self._start(self._queue.popleft())
        finished = []
        for output in self._of.engine.step():
            running = self._by_name.get(output.request_id)
            if running is not None and self._take(running, output):
                self._leave(running)
                finished.append(running.sample)
        return finished

    def cancel(self, request_ids: Iterable[int]) -> list[Sample]:
        """Stop these requests, queued or running, and return what they had sampled.

        Ids that are neither are passed over: a reply may finish just before it is cancelled.
        """
        gone = set(request_ids)
        queued = [request.request_id for request in self._queue if request.request_id in gone]
        self._queue = deque(r for r in self._queue if r.request_id not in gone)
        stopped = [self._running[i] for i in gone if i in self._running]
        if stopped:
            self._of.engine.abort_request([running.name for running in stopped])
        for running in stopped:
            running.sample.finish = Finish.CANCELLED
            self._leave(running)
        empty = [Sample(i, [], [], [], Finish.CANCELLED) for i in queued]
        return empty + [running.sample for running in stopped]

    def new_policy(self, version: int) -> None:
        """The weights have changed: requests that start from now on carry ``version``."""
        self._version = version
        old, self._current = self._current, None
        if old is not None:
            self._drop_unused(old)

    def _start(self, request: SampleRequest) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        greedy = request.temperature == 0
        scaled = self._of.scoring.scaled is not None
        settings = SamplingParams(
            temperature=1.0 if scaled else request.temperature,
            top_p=1.0 if greedy else request.top_p,
            top_k=-1 if greedy else request.top_k,
            max_tokens=min(request.max_new_tokens, self._max_context - len(request.prompt_ids)),
            seed=_seed(request.stream),
            stop_token_ids=sorted(self._ends),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        adapter = self._adapter()
        name = str(next(self._of.numbers))
        self._of.engine.add_request(
            name,
            {"prompt_token_ids": list(request.prompt_ids)},
            settings,
            lora_request=adapter.handle,
        )
        adapter.live += 1
        sample = Sample(request.request_id, [], [], [], Finish.LENGTH)
        running = _Running(name, sample, adapter)
        self._running[request.request_id] = self._by_name[name] = running

    def _take(self, running: _Running, output: Any) -> bool:
        """Keep the tokens of an output; whether it was the request's last."""
        sample = running.sample
        new = output.outputs[0]
        if new.token_ids and not sample.token_ids:
            self._admitted.append(sample.request_id)
        for token, scores in zip(new.token_ids, new.logprobs or (), strict=True):
            sample.token_ids.append(token)
            sample.logprobs.append(scores[token].logprob)
            sample.versions.append(running.adapter.version)
        if not output.finished:
            return False
        if new.finish_reason not in ("stop", "length"):
            msg = f"vLLM ended request {sample.request_id} with {new.finish_reason!r}"
            raise RuntimeError(msg)
        sample.finish = Finish.STOP if sample.token_ids[-1] in self._ends else Finish.LENGTH
        return True

    def _leave(self, running: _Running) -> None:
        del self._running[running.sample.request_id], self._by_name[running.name]
        running.adapter.live -= 1
        self._drop_unused(running.adapter)

    def _adapter(self) -> _Adapter:
        """The current policy's adapter, saved when its first request starts."""
        if self._current is None:
            from vllm.lora.request import LoRARequest

            number = next(self._of.numbers)
            folder = self._folder / f"policy-{self._version}-{number}"
            self._save(folder)
            handle = LoRARequest(f"policy-{number}", number, str(folder))
            self._current = _Adapter(self._version, number, folder, handle)
        return self._current

    def _drop_unused(self, adapter: _Adapter) -> None:
        if not adapter.live and adapter is not self._current:
            self._of.engine.remove_lora(adapter.number)
            shutil.rmtree(adapter.folder)


def _seed(stream: Sequence[int]) -> int:
    """63 bits from a stream, as vLLM takes."""
    digest = hashlib.shake_128(",".join(map(str, stream)).encode()).digest(8)
    return int.from_bytes(digest, "big") >> 1
