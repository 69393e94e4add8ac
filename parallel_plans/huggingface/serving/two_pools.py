"""Decides what each step of two groups computes, and which blocks move between their pools.

A request has a sequence in each pool while its prompt is prefilled: the first group computes it,
and blocks that are full, and at the end the last one, move to the second group, which decodes. Then
its blocks in the first pool are given back; they stay there for prompts with the same beginning.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from dtensor_ring import BlockPool, OutOfBlocks
from dtensor_ring.extension import MovedTokens, PooledSequence
from parallel_plans.huggingface.serving.scheduler import Scheduler
from parallel_plans.huggingface.serving.served_request import ServedRequest
from parallel_plans.huggingface.serving.state_slots import KnownStates


# Note [Two prefixes]: each pool keeps the blocks of prompts that came before. A token is computed
# unless the first pool has it, and moves unless the second one has it.
#
# Note [States that move]: the states after a prompt go to the second group at once, when the first
# one has computed the whole prompt. Until then the request keeps its sequence in the first pool.
class TwoPoolScheduler(Scheduler):
    """Keeps the requests of two groups; `pool` is that of the second one.

    Args:
        prefill_pool: the pool of the ranks that prefill.
        pool: the pool of the ranks that decode.
        max_tokens: the largest number of tokens that a step prefills, and that it decodes.
        max_requests: the largest number of requests that hold blocks.
    """

    def __init__(
        self, prefill_pool: BlockPool, pool: BlockPool, max_tokens: int, max_requests: int
    ) -> None:
        super().__init__(pool, max_tokens, max_requests)
        self.prefill_pool = prefill_pool
        self.states = prefill_pool if isinstance(prefill_pool, KnownStates) else None
        self._sources: dict[int, PooledSequence] = {}  # by number of their request

    def source(self, request: ServedRequest) -> PooledSequence:
        return self._sources[request.number]

    def _num_written(self, request: ServedRequest) -> int:
        found = super()._num_written(request)
        # A state is known once the first group has computed the whole prompt.
        return found if self.states is None else min(found, self.source(request).num_written)

    def _num_decoded(self) -> int:
        return 0  # by other ranks, at the same time

    def moved(self, chunks: Iterable[tuple[ServedRequest, int]]) -> list[MovedTokens]:
        """Return the tokens that move in this step, if these are prefilled in it."""
        new = {request.number: num_tokens for request, num_tokens in chunks}
        moves = []
        for request in self.prefilling:
            source, begin = self.source(request), request.held.num_written
            end = self._end(source, source.num_written + new.get(request.number, 0))
            if end > begin:
                moves.append(MovedTokens(source, request.held, begin, end))
        return moves

    def prefilled(self, chunks: Iterable[tuple[ServedRequest, int]]) -> None:
        """Commit what was computed, and what has moved. Whole prompts decode in the next step."""
        for request, num_tokens in chunks:
            source = self.source(request)
            self.prefill_pool.commit(source, source.num_written + num_tokens)
            self.counts.prefilled += num_tokens
        for request in self.prefilling:
            source = self.source(request)
            end = self._end(source, source.num_written)
            self.pool.commit(request.held, max(end, request.held.num_written))
        self._begin_to_decode()

    def remove(self, request: ServedRequest) -> None:
        """Forget a request that ended or was cancelled, and give its blocks back."""
        super().remove(request)
        self._free_source(request)

    def _end(self, source: PooledSequence, num_written: int) -> int:
        """Return where what can move ends: full blocks, and the last one with the whole prompt."""
        rest = num_written % self.pool.dealing.block
        return num_written if num_written == len(source) else num_written - rest

    def _hold(self, request: ServedRequest, tokens: array[int]) -> int:
        source = self.prefill_pool.add(tokens)
        try:
            super()._hold(request, tokens)
        # Both pools hold a request, or none does.
        except OutOfBlocks:
            self.prefill_pool.free(source)
            raise
        self._sources[request.number] = source
        return source.num_cached

    def _begin_to_decode(self) -> None:
        super()._begin_to_decode()
        if self.states is None:
            self.arrived()

    def arriving(self) -> list[ServedRequest]:
        """Return the requests that decode, and whose states are in the first group alone."""
        return [x for x in self.decoding if x.number in self._sources]

    def arrived(self) -> None:
        """Give back what requests that decode have in the first pool."""
        for request in self.arriving():
            self._free_source(request)

    def _free_source(self, request: ServedRequest) -> None:
        source = self._sources.pop(request.number, None)
        if source is not None:
            self.prefill_pool.free(source)
