"""The ragged sampler: continuous batching over any full-attention Hugging Face causal LM.

Each prompt is prefilled once, prompts together, and its keys and values are copied to the rows
of its replies; rows are kept dense and refilled, so a step costs only what is live.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from nbtrain.rollout.cache import KvStore, PromptBlock
from nbtrain.rollout.forward import CausalForward
from nbtrain.rollout.requests import check_requests, end_table
from nbtrain.rollout.rows import RowTable, close_gaps
from nbtrain.rollout.sampling import choose_rows
from nbtrain.rollout.types import Finish, Sample, SampleRequest

__all__ = ["RaggedSampler", "SamplerCounts"]

Ids = npt.NDArray[np.int64]

_PREFILL_TOKENS = 2048
"""Prompts are prefilled together up to so many tokens, padding included. Beyond that a forward
pass is no cheaper for a token, and its activations are larger."""


@dataclass(slots=True)
class SamplerCounts:
    """Work done since the sampler was made."""

    prefills: int = 0
    """Forward passes over prompts."""
    prefilled_tokens: int = 0
    """Tokens in them, padding included."""
    decodes: int = 0
    """Forward passes that decoded one token a row."""
    decoded_rows: int = 0
    """Rows in them."""


@dataclass(slots=True)
class _Prompt:
    """A prompt with requests in the queue; ``block`` holds its keys and values once prefilled."""

    ids: tuple[int, ...]
    waiting: int = 0
    block: PromptBlock | None = None
    index: int = 0


@dataclass(slots=True)
class _Queued:
    request: SampleRequest
    prompt: _Prompt
    limit: int

    @property
    def reserve(self) -> int:
        """Columns that the reply can come to need."""
        return len(self.prompt.ids) + self.limit


class RaggedSampler:
    """Samples replies of unequal length from ``model``. Implements ``rollout.types.Sampler``.

    ``slots`` bounds the replies decoded at once and ``kv_budget_bytes`` (``None``: no bound)
    the memory of their keys and values, each reply counted at its full length; the rest queue
    in order. (While buffers grow, the old ones stand beside the new for a moment.) ``eos_ids``
    all stop a reply. Prompt and reply together never exceed ``max_context`` tokens. ``pad_id``
    fills places that the model does not see.

    The model is called as it is, wrapped and unmerged, in inference and eval mode; every
    module's own mode is restored afterwards.

    Raises ``ValueError`` for an argument out of range and for a model whose layers do not all
    keep the keys and values of every token, or whose logits with this cache are not its own.
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
        self._forward = CausalForward(model, max_context, pad_id or 0)
        self._slots = slots
        self._max_context = max_context
        self._budget = math.inf
        if kv_budget_bytes is not None:
            self._budget = kv_budget_bytes // self._forward.shape.bytes_per_token
        self._is_end = end_table(
            eos_ids, self._forward.vocabulary, slots=slots, max_context=max_context
        )
        self._queue: deque[_Queued] = deque()
        self._prompts: dict[tuple[int, ...], _Prompt] = {}
        self._ids: set[int] = set()
        self._rows = RowTable()
        self._store = KvStore(self._forward.shape)
        self._last: Ids = np.zeros(0, np.int64)
        """Each row's newest token, the input of its next forward pass."""
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
        return len(self._rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes allocated for keys and values, prefilled prompts included."""
        tokens = self._prompt_tokens()
        return self._store.nbytes + tokens * self._forward.shape.bytes_per_token

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
        queued = [self._checked(request) for request in requests]
        if not self._ids:
            self._forward.refresh()
        for item in queued:
            prompt = self._prompts.setdefault(item.prompt.ids, item.prompt)
            prompt.waiting += 1
            item.prompt = prompt
        self._queue.extend(queued)
        self._ids.update(request.request_id for request in requests)

    def step(self) -> list[Sample]:
        """Sample one token for every admitted request and return those that finished.

        A newly admitted request gets its first token in the same step.
        """
        if not self._ids:
            return []
        with self._forward.inference():
            batch = self._admit()
            self._prefill(batch)
            logits = self._advance(batch)
            ids, logprobs = choose_rows(logits, self._rows.next_uniforms(), self._rows.settings)
            finished = self._rows.record(ids, logprobs, self._version, self._is_end)
            self._last = ids
            samples = [self._rows.sample(row, finish) for row, finish in finished]
            self._drop([row for row, _ in finished])
        return samples

    def cancel(self, request_ids: Iterable[int]) -> list[Sample]:
        """Stop these requests, queued or running, and return what they had sampled.

        Ids that are neither are passed over: a reply may finish just before it is cancelled.
        """
        gone = {request_id for request_id in request_ids if request_id in self._ids}
        if not gone:
            return []
        samples: list[Sample] = []
        kept: deque[_Queued] = deque()
        for item in self._queue:
            if item.request.request_id in gone:
                samples.append(Sample(item.request.request_id, [], [], [], Finish.CANCELLED))
                self._ids.discard(item.request.request_id)
                self._leave_queue(item.prompt)
            else:
                kept.append(item)
        self._queue = kept
        rows = [r for r, request in enumerate(self._rows.requests) if request.request_id in gone]
        samples += [self._rows.sample(row, Finish.CANCELLED) for row in rows]
        with self._forward.inference():
            self._drop(rows)
        return samples

    def new_policy(self, version: int) -> None:
        """The weights have changed: tokens from now on carry ``version``.

        Running replies go on from the keys and values they have; queued ones start anew.
        """
        self._version = version
        for prompt in self._prompts.values():
            prompt.block = None

    def release(self) -> None:
        """Free all memory of keys and values.

        Raises ``RuntimeError`` while replies are running, whose state it is.
        """
        if len(self._rows):
            msg = f"{len(self._rows)} replies are running; cancel or finish them first"
            raise RuntimeError(msg)
        self._store = KvStore(self._forward.shape)
        for prompt in self._prompts.values():
            prompt.block = None

    def _checked(self, request: SampleRequest) -> _Queued:
        prompt = request.prompt_ids
        limit = min(request.max_new_tokens, self._max_context - len(prompt))
        queued = _Queued(request, _Prompt(prompt), limit)
        need = queued.reserve + KvStore.SLACK + len(prompt)
        if need > self._budget:
            per_token = self._forward.shape.bytes_per_token
            msg = (
                f"request {request.request_id}: its keys and values can need {need * per_token} "
                f"bytes, more than the budget of {int(self._budget) * per_token}"
            )
            raise ValueError(msg)
        return queued

    def _admit(self) -> list[_Queued]:
        """Take from the queue what slots and memory allow."""
        batch = self._fitting()
        if not batch and not len(self._rows):
            # Nothing runs, so only leftovers of earlier replies can be in the way.
            self.release()
            batch = self._fitting()
        for item in batch:
            self._queue.popleft()
            self._admitted.append(item.request.request_id)
        return batch

    def _fitting(self) -> list[_Queued]:
        batch: list[_Queued] = []
        live = len(self._rows)
        reserve = self._rows.longest
        prompts = self._prompt_tokens() if self._budget < math.inf else 0
        fresh: set[tuple[int, ...]] = set()
        width = 0
        for item in itertools.islice(self._queue, self._slots - live):
            reserve = max(reserve, item.reserve)
            if self._budget < math.inf:
                if item.prompt.block is None:
                    fresh.add(item.prompt.ids)
                    width = max(width, len(item.prompt.ids))
                rows = (live + len(batch) + 1) * (reserve + KvStore.SLACK)
                held = max(self._store.tokens, rows) + prompts + len(fresh) * width
                if held > self._budget:
                    break
            batch.append(item)
        return batch

    def _prefill(self, batch: list[_Queued]) -> None:
        """Prefill the batch's prompts, and without a budget those soon needed along with them."""
        if all(item.prompt.block for item in batch):
            return
        soon = batch
        if self._budget == math.inf:
            soon = batch + list(itertools.islice(self._queue, self._slots))
        prompts = {id(item.prompt): item.prompt for item in soon if item.prompt.block is None}
        ordered = sorted(prompts.values(), key=lambda prompt: len(prompt.ids))
        while ordered:
            size = 1
            while size < len(ordered) and (size + 1) * len(ordered[size].ids) <= _PREFILL_TOKENS:
                size += 1
            together, ordered = ordered[:size], ordered[size:]
            block = self._forward.prefill([prompt.ids for prompt in together])
            for index, prompt in enumerate(together):
                prompt.block, prompt.index = block, index
            self.counts.prefills += 1
            self.counts.prefilled_tokens += block.tokens

    def _advance(self, batch: list[_Queued]) -> Tensor:
        """Logits of every row's next token: live rows first, then the batch as new rows."""
        logits: list[Tensor] = []
        if live := len(self._rows):
            cache, mask, positions = self._store.decode_cache(*self._bounds())
            inputs = np.stack((self._last[:, None], positions))
            ids, places = torch.from_numpy(inputs).to(self._forward.device)
            logits.append(self._forward(ids, mask, places, cache))
            self.counts.decodes += 1
            self.counts.decoded_rows += live
        # Rows of one block lie together, so that each block is copied once.
        by_block: dict[int, list[_Queued]] = {}
        for item in batch:
            by_block.setdefault(id(item.prompt.block), []).append(item)
        for items in by_block.values():
            block = items[0].prompt.block
            assert block is not None, "admitted prompts are prefilled"
            index = [item.prompt.index for item in items]
            self._rows.append(
                [item.request for item in items],
                limits=[item.limit for item in items],
                reserves=[item.reserve for item in items],
            )
            self._store.append(block, index, *self._bounds())
            logits.append(block.logits[index])
            for item in items:
                self._leave_queue(item.prompt)
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _drop(self, dead: list[int]) -> None:
        if not dead:
            return
        for row in dead:
            self._ids.discard(self._rows.requests[row].request_id)
        left = len(self._rows) - len(dead)
        holes, movers = close_gaps(len(self._rows), dead)
        if holes:
            self._last[holes] = self._last[movers]
        self._last = self._last[:left]
        self._store.drop(holes, movers, left)
        self._rows.drop(holes, movers, left)

    def _leave_queue(self, prompt: _Prompt) -> None:
        prompt.waiting -= 1
        if not prompt.waiting:
            del self._prompts[prompt.ids]

    def _prompt_tokens(self) -> int:
        """Tokens that the prefilled prompts hold memory for."""
        blocks = {id(p.block): p.block.tokens for p in self._prompts.values() if p.block}
        return sum(blocks.values())

    def _bounds(self) -> tuple[int, int]:
        """Rows and columns that the store may grow to for the live rows."""
        columns = self._rows.longest + KvStore.SLACK
        if self._budget == math.inf:
            return self._slots, columns
        rows = (int(self._budget) - self._prompt_tokens()) // columns
        return min(self._slots, rows), columns
