"""The plain sampler: any causal or image-text model that transformers can decode with a cache.

The model keeps its own default cache (windows, recurrent states, keys and values, or any mixture
of them), made by its first forward pass exactly as ``model.generate`` has it made. Each
step is the model's public ``forward`` on the newest tokens, and rows are copied and dropped by
the cache's public ``reorder_cache``. ``generate`` itself cannot be used: it runs to the end of
a batch, draws its own random numbers, and neither stops for a new policy nor lets rows go.

Replies whose prompts are equally long and that are admitted together form a batch, so nothing is
ever padded: recurrent layers would take padding into their state. A batch is a forward pass of
its own; that is what this sampler costs against the ragged one.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from nbtrain.rollout.forward import ModelCall, check_gap
from nbtrain.rollout.ragged import SamplerCounts
from nbtrain.rollout.requests import check_requests, end_table
from nbtrain.rollout.rows import RowTable, close_gaps
from nbtrain.rollout.sampling import choose_rows
from nbtrain.rollout.types import Finish, Sample, SampleRequest

__all__ = ["GenerateSampler"]

Ids = npt.NDArray[np.int64]

_PREFILL_TOKENS = 2048
"""Different prompts of one length form one batch up to so many tokens."""


@dataclass(slots=True)
class _Batch:
    """Replies with equally many tokens in one cache; ``length`` counts those of each row."""

    cache: Any
    length: int
    logits: Tensor
    """Of each row's next token, as of the last forward pass."""
    newest: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    """Each row's newest token, which the cache has not seen yet."""
    rows: RowTable = field(default_factory=RowTable)

    def keep(self, index: Sequence[int]) -> None:
        """Let these rows of the cache, in this order, be its rows."""
        self.cache.reorder_cache(torch.tensor(index, device=self.logits.device))


class _OwnCacheForward(ModelCall):
    """Calls a model with the cache that it makes by itself.

    Raises ``ValueError`` for a model that makes none which rows can be copied in and dropped
    from, or whose logits with it are not its own without.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        with self.inference():
            try:
                vocabulary = self.own_logits((0,)).shape[0]
                step = max(1, vocabulary // 7)
                ids = [place * step % vocabulary for place in range(7)]
                ours, own, sizes = self._probe([ids, ids[::-1]])
            except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as exc:
                msg = f"the model cannot be decoded with a cache of its own: {exc}"
                raise ValueError(msg) from exc
        check_gap(ours, own, self.dtype, "plain")
        self.vocabulary = vocabulary
        one, four = sizes
        self.bytes_per_token = math.ceil((four - one) / 3)
        self.bytes_per_row = max(0, one - self.bytes_per_token)

    def prefill(self, prompts: Sequence[tuple[int, ...]]) -> _Batch:
        """Run whole prompts of one length; a row for each."""
        ids = torch.tensor(prompts, device=self.device)
        return _Batch(*self._run(ids, None, 0))

    def decode(self, batch: _Batch) -> None:
        """Take the rows' newest ids in; ``logits`` are then those of the next."""
        ids = torch.from_numpy(batch.newest[:, None]).to(self.device)
        batch.cache, batch.length, batch.logits = self._run(ids, batch.cache, batch.length)

    def _run(self, ids: Tensor, cache: Any, past: int) -> tuple[Any, int, Tensor]:
        rows, columns = ids.shape
        given: dict[str, Any] = {} if cache is None else {self._cache_name: cache}
        if self._takes_positions:
            # Stated, since some models else continue from what the last batch left with them.
            places = torch.arange(past, past + columns, device=self.device)
            given["position_ids"] = places.expand(rows, -1)
        out = self._called(input_ids=ids, use_cache=True, **given, **self._extra)
        made = getattr(out, self._cache_name, None)
        if not hasattr(made, "reorder_cache"):
            msg = f"{type(out).__name__} brings no cache whose rows can be selected"
            raise ValueError(msg)
        return made, past + columns, out.logits[:, -1]

    def _probe(self, texts: list[list[int]]) -> tuple[Tensor, Tensor, tuple[int, int]]:
        """Logits after rows were copied, interrupted by another batch and dropped; the model's
        own; and the bytes of a row of one token and of four.
        """
        first, second = texts
        batch = self.prefill([tuple(first[:4]), tuple(second[:4])])
        four = _nbytes(batch.cache) // 2
        batch.keep([0, 0, 1])
        for place in (4, 5):
            batch.newest = np.array([first[place], first[place], second[place]])
            self.decode(batch)
            one = _nbytes(self.prefill([(second[place],)]).cache)
        batch.keep([2, 1])
        batch.newest = np.array([second[6], first[6]])
        self.decode(batch)
        own = torch.stack([self.own_logits(second), self.own_logits(first)])
        return batch.logits, own, (one, four)


class GenerateSampler:
    """Samples replies with the model's own cache. Implements ``rollout.types.Sampler``.

    Takes what :class:`~nbtrain.rollout.ragged.RaggedSampler` takes, any attention included, and
    gives the same ids and log-probs. ``kv_budget_bytes`` bounds the memory of the caches, each
    reply counted at its full length as if no window forgot anything; the rest queue in order.
    (A cache that grows or loses rows stands beside its successor for a moment.) ``pad_id`` is
    not needed: nothing is padded.

    Queued requests of one prompt that follow one another are admitted all at once or, where they
    are more than the slots, ``slots`` at a time: one prefill and one batch for a group, though
    slots stand empty until there is room. Finished rows leave the cache at once, at the cost of
    one copy of what remains.

    Raises ``ValueError`` for an argument out of range, and for a model that brings no cache
    whose rows can be copied and dropped, or whose logits with it are not its own.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        slots: int,
        eos_ids: Collection[int],
        pad_id: int | None = None,
        max_context: int,
        kv_budget_bytes: int | None = None,
    ) -> None:
        self._forward = _OwnCacheForward(model)
        self._slots = slots
        self._max_context = max_context
        self._budget = math.inf if kv_budget_bytes is None else kv_budget_bytes
        self._is_end = end_table(
            eos_ids, self._forward.vocabulary, slots=slots, max_context=max_context
        )
        self._queue: deque[SampleRequest] = deque()
        self._ids: set[int] = set()
        self._batches: list[_Batch] = []
        self._version = 0
        self._admitted: list[int] = []
        self.counts = SamplerCounts()

    @property
    def pending(self) -> int:
        """Requests queued or running."""
        return len(self._ids)

    @property
    def running(self) -> int:
        """Requests that hold a slot."""
        return sum(len(batch.rows) for batch in self._batches)

    @property
    def kv_bytes(self) -> int:
        """Bytes that the caches hold."""
        return sum(_nbytes(batch.cache) for batch in self._batches)

    def admitted(self) -> list[int]:
        """Requests that got a slot since the last call."""
        new, self._admitted = self._admitted, []
        return new

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests; they are admitted in order as slots and memory allow.

        Raises ``ValueError``, and queues none, when a request id is taken, a prompt is empty,
        leaves no room for a token or holds an unknown id, a parameter is out of range, or a
        request alone exceeds the memory budget.
        """
        check_requests(requests, self._ids, self._max_context, self._forward.vocabulary)
        for request in requests:
            if (need := self._need(request)) > self._budget:
                msg = (
                    f"request {request.request_id}: its cache can need {need} bytes, more than "
                    f"the budget of {self._budget}"
                )
                raise ValueError(msg)
        if not self._ids:
            self._forward.refresh()
        self._queue.extend(requests)
        self._ids.update(request.request_id for request in requests)

    def step(self) -> list[Sample]:
        """Sample one token for every admitted request and return those that finished.

        A newly admitted request gets its first token in the same step.
        """
        if not self._ids:
            return []
        samples: list[Sample] = []
        with self._forward.inference():
            for batch in self._batches:
                self._forward.decode(batch)
                self.counts.decodes += 1
                self.counts.decoded_rows += len(batch.rows)
            self._batches += self._new_batches()
            for batch in self._batches:
                samples += self._choose(batch)
            self._batches = [batch for batch in self._batches if len(batch.rows)]
        return samples

    def cancel(self, request_ids: Iterable[int]) -> list[Sample]:
        """Stop these requests, queued or running, and return what they had sampled.

        Ids that are neither are passed over: a reply may finish just before it is cancelled.
        """
        gone = self._ids.intersection(request_ids)
        queued = [request for request in self._queue if request.request_id in gone]
        samples = [Sample(r.request_id, [], [], [], Finish.CANCELLED) for r in queued]
        self._queue = deque(r for r in self._queue if r.request_id not in gone)
        with self._forward.inference():
            for batch in self._batches:
                requests = batch.rows.requests
                dead = [row for row, r in enumerate(requests) if r.request_id in gone]
                samples += [batch.rows.sample(row, Finish.CANCELLED) for row in dead]
                self._drop(batch, dead)
        self._batches = [batch for batch in self._batches if len(batch.rows)]
        self._ids -= gone
        return samples

    def new_policy(self, version: int) -> None:
        """The weights have changed: tokens from now on carry ``version``.

        Running replies go on from the cache they have; queued ones start anew.
        """
        self._version = version

    def release(self) -> None:
        """Free all memory of caches: nothing to do, none outlives its replies.

        Raises ``RuntimeError`` while replies are running, whose state it is.
        """
        if self.running:
            msg = f"{self.running} replies are running; cancel or finish them first"
            raise RuntimeError(msg)

    def _limit(self, request: SampleRequest) -> int:
        return min(request.max_new_tokens, self._max_context - len(request.prompt_ids))

    def _need(self, request: SampleRequest) -> int:
        """Bytes that the request's row can come to."""
        tokens = len(request.prompt_ids) + self._limit(request)
        return self._forward.bytes_per_row + tokens * self._forward.bytes_per_token

    def _admit(self) -> list[SampleRequest]:
        """Take whole groups from the queue while slots and memory allow."""
        admitted: list[SampleRequest] = []
        free = self._slots - self.running
        running = [r for batch in self._batches for r in batch.rows.requests]
        room = self._budget - sum(map(self._need, running)) if self._queue else 0
        while self._queue:
            group = self._next_group()
            if not (running or admitted):
                # Nothing else will make room: as many of the group as there is memory for.
                while sum(map(self._need, group)) > room:
                    group.pop()
            free -= len(group)
            room -= sum(map(self._need, group))
            if free < 0 or room < 0:
                break
            admitted += group
            for request in group:
                self._queue.popleft()
                self._admitted.append(request.request_id)
        return admitted

    def _next_group(self) -> list[SampleRequest]:
        """The requests at the head of the queue that have its first prompt, up to ``slots``."""
        prompt = self._queue[0].prompt_ids
        group: list[SampleRequest] = []
        for request in itertools.islice(self._queue, self._slots):
            if request.prompt_ids != prompt:
                break
            group.append(request)
        return group

    def _new_batches(self) -> Iterator[_Batch]:
        """Prefill what is admitted now, equally long prompts together."""
        by_length: dict[int, list[SampleRequest]] = {}
        for request in self._admit():
            by_length.setdefault(len(request.prompt_ids), []).append(request)
        for length, requests in by_length.items():
            together = max(1, _PREFILL_TOKENS // length)
            prompts = list(dict.fromkeys(request.prompt_ids for request in requests))
            for first in range(0, len(prompts), together):
                chosen = {p: row for row, p in enumerate(prompts[first : first + together])}
                yield self._new_batch(chosen, [r for r in requests if r.prompt_ids in chosen])

    def _new_batch(
        self, prompts: dict[tuple[int, ...], int], requests: list[SampleRequest]
    ) -> _Batch:
        batch = self._forward.prefill(list(prompts))
        self.counts.prefills += 1
        self.counts.prefilled_tokens += len(prompts) * batch.length
        index = [prompts[request.prompt_ids] for request in requests]
        if index != list(range(len(prompts))):
            batch.keep(index)
            batch.logits = batch.logits[index]
        limits = [self._limit(request) for request in requests]
        batch.rows.append(requests, limits, [batch.length + limit for limit in limits])
        return batch

    def _choose(self, batch: _Batch) -> list[Sample]:
        """Sample every row's next token; those that finish leave the cache."""
        rows = batch.rows
        ids, logprobs = choose_rows(batch.logits, rows.next_uniforms(), rows.settings)
        batch.newest = ids
        finished = rows.record(ids, logprobs, self._version, self._is_end)
        samples = [rows.sample(row, finish) for row, finish in finished]
        self._ids.difference_update(sample.request_id for sample in samples)
        self._drop(batch, [row for row, _ in finished])
        return samples

    def _drop(self, batch: _Batch, dead: list[int]) -> None:
        if not dead:
            return
        left = len(batch.rows) - len(dead)
        holes, movers = close_gaps(len(batch.rows), dead)
        batch.rows.drop(holes, movers, left)
        index = list(range(left))
        for hole, mover in zip(holes, movers, strict=True):
            index[hole] = mover
        batch.newest = batch.newest[index]
        if left:
            batch.keep(index)


def _nbytes(value: Any, depth: int = 4) -> int:
    """Bytes of the tensors in a cache, wherever its layers keep them."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(_nbytes(each, depth) for each in value.values())
    if isinstance(value, list | tuple):
        return sum(_nbytes(each, depth) for each in value)
    if depth and hasattr(value, "__dict__"):
        return sum(_nbytes(each, depth - 1) for each in vars(value).values())
    return 0
