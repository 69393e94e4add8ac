"""Decides what each step of a continuous batch computes.

All ranks hold the same requests and the same pool, so all ranks decide alike without a message.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

from dtensor_ring import BlockPool, OutOfBlocks
from dtensor_ring.extension import BlockCopy, PooledSequence
from parallel_plans.huggingface.serving.served_request import ServedRequest
from parallel_plans.huggingface.serving.state_slots import KnownStates


@dataclass
class ServingCounts:
    """What the steps of a continuous batch did so far.

    Attributes:
        steps: the number of steps.
        prefilled: tokens of prompts that were computed; again, if their request gave way.
        cached: tokens of prompts that were taken from the pool.
        decoded: tokens that were computed after a prompt's, and kept: one of each request in a
            step, and those of its draft that were right.
        preempted: how often a request gave way.
        proposed: tokens of drafts.
        accepted: those of them that were right.
    """

    steps: int = 0
    prefilled: int = 0
    cached: int = 0
    decoded: int = 0
    preempted: int = 0
    proposed: int = 0
    accepted: int = 0


AGE = attrgetter("number")


# Note [Preemption]: a preempted request loses its blocks, not its tokens: it waits again, and its
# keys are computed a second time, except the blocks that are still in the pool. The youngest is
# preempted first, and the pool is large enough for any single request. So the oldest one always
# advances, and all of them end. After that nobody joins until a request has ended, else the
# preempted one would come back at once.
#
# Note [Drafts]: in a step, a request's sequence has the tokens of its draft, too. After the step it
# is cut back to those that were right, and only those are committed: no other request can share, or
# wait for, a block with a token that was wrong.
#
# Note [Prefixes]: a request waits while another one computes full blocks that both begin with. Then
# it takes them from the pool, so each shared block is computed and kept once. If layers have
# states, the other one's step ends where this one leaves it, see Note [Known states] in
# `state_slots.py`.
#
# The way of a request:
#     add          room              prompt is done
#     waiting  ->  prefilling   ->   decoding   ->   output
#        ^             |                |
#        +-------------+----------------+    gives way, or a step failed
class Scheduler:
    """Keeps the requests of a continuous batch by what they do: wait, prefill or decode.

    Args:
        pool: the pool of their blocks.
        max_tokens: the largest number of tokens of a step.
        max_requests: the largest number of requests that hold blocks.

    Attributes:
        states: the pool in which prompts are prefilled, if layers have states.
    """

    def __init__(self, pool: BlockPool, max_tokens: int, max_requests: int) -> None:
        self.pool, self.counts = pool, ServingCounts()
        self.waiting: list[ServedRequest] = []
        self.prefilling: list[ServedRequest] = []
        self.decoding: list[ServedRequest] = []
        self._max_tokens, self._max_requests = max_tokens, max_requests
        self.states = pool if isinstance(pool, KnownStates) else None
        self._is_held = False  # see Note [Preemption]

    @property
    def num_active(self) -> int:
        """Return the number of requests that hold blocks."""
        return len(self.prefilling) + len(self.decoding)

    def add(self, request: ServedRequest) -> None:
        """Let a request wait, in the order of age."""
        insort(self.waiting, request, key=AGE)

    def admit(self) -> None:
        """Let waiting requests begin, the oldest first, as long as there is room."""
        if self._is_held and self.num_active:
            return
        self._is_held = False
        self._admit_waiting()
        self._begin_to_decode()  # all of a prompt may be in the pool already

    def _admit_waiting(self) -> None:
        for request in self.waiting[:]:
            if self.num_active >= self._max_requests:
                return
            tokens = request.written()
            if self._is_being_prefilled(tokens):
                continue
            try:
                self.counts.cached += self._hold(request, tokens)
            except OutOfBlocks:
                return  # younger requests that are shorter do not overtake it
            self.waiting.remove(request)
            insort(self.prefilling, request, key=AGE)

    def _hold(self, request: ServedRequest, tokens: array[int]) -> int:
        """Take the blocks of a request, and return how many of its tokens are cached."""
        request.sequence = self.pool.add(tokens)
        return request.sequence.num_cached

    def _is_being_prefilled(self, tokens: array[int]) -> bool:
        """Return whether another request writes a full block that these tokens begin with."""
        block = self.pool.dealing.block
        for request in self.prefilling:
            theirs = request.held.tokens
            # Only a whole block is shared, so waiting for less is of no use.
            end = (self._num_written(request) // block + 1) * block  # of the block that is next
            if end <= min(len(tokens), len(theirs)) and tokens[:end] == theirs[:end]:
                if self.states is not None:
                    self.states.expect(self.source(request), tokens)
                return True
        return False

    def source(self, request: ServedRequest) -> PooledSequence:
        """Return the sequence of a request in the pool in which it is prefilled."""
        return request.held

    def _num_written(self, request: ServedRequest) -> int:
        """Return how many tokens of a prompt are done."""
        return request.held.num_written

    def chunks(self) -> list[tuple[ServedRequest, int]]:
        """Return the requests that prefill in this step, and how many tokens of each."""
        # Tokens that are decoded come first; prompts share what is left of a step.
        chosen, left = [], self._max_tokens - self._num_decoded()
        for request in self.prefilling:
            sequence = self.source(request)
            num_tokens = min(len(sequence) - sequence.num_written, left)
            if num_tokens and self.states is not None:
                num_tokens = self.states.num_until(sequence, num_tokens)
            if num_tokens:
                chosen.append((request, num_tokens))
                left -= num_tokens
        return chosen

    def _num_decoded(self) -> int:
        """Return how many tokens of a step are not of prompts."""
        return sum(1 + len(x.drafted) for x in self.decoding)

    def prefilled(self, chunks: Iterable[tuple[ServedRequest, int]]) -> None:
        """Commit what was computed. Requests with all of their prompt decode in the next step."""
        for request, num_tokens in chunks:
            self.pool.commit(request.held, request.held.num_written + num_tokens)
            self.counts.prefilled += num_tokens
        self._begin_to_decode()

    def _begin_to_decode(self) -> None:
        for request in self.prefilling[:]:
            if self._num_written(request) == len(request.held):
                self.prefilling.remove(request)
                insort(self.decoding, request, key=AGE)
                self._fork(request)

    def _fork(self, request: ServedRequest) -> None:
        """Let the other samples of a prompt share all of its blocks; without room they wait."""
        for sibling in request.take_siblings():
            if self.num_active < self._max_requests:
                sibling.sequence = self.pool.fork(request.held)
                insort(self.decoding, sibling, key=AGE)
            else:
                self.add(sibling)

    def grow(self) -> list[BlockCopy]:
        """Take blocks for the next token and draft of all that decode; the youngest are preempted.

        Returns:
            The blocks to copy before anything is written.
        """
        copies: list[BlockCopy] = []
        for request in self.decoding[:]:
            while request.sequence is not None:  # it has not given way to an older one
                try:
                    new = [request.last_token, *request.drafted]
                    copies += self.pool.append(request.sequence, new)
                    break
                except OutOfBlocks:
                    # It may be the request itself, whose loop ends then.
                    self.preempt(max(self.prefilling + self.decoding, key=AGE))
        return copies

    def decoded(self, requests: Iterable[ServedRequest]) -> None:
        """Commit the tokens of `grow` that were right, and give the room of the others back."""
        for request in requests:
            # The last token is not computed yet.
            length, before = len(request.tokens) - 1, request.held.num_written
            if length < len(request.held):
                self.pool.crop(request.held, length)
            self.pool.commit(request.held)
            num_accepted = length - before - 1
            self.counts.decoded += 1 + num_accepted
            self.counts.proposed += len(request.drafted)
            self.counts.accepted += num_accepted
            request.learn(num_accepted)

    def preempt(self, request: ServedRequest) -> None:
        """Take the blocks of a request, which waits again."""
        self.remove(request)
        self.add(request)
        self._is_held = True
        self.counts.preempted += 1

    def remove(self, request: ServedRequest) -> None:
        """Forget a request that ended or was cancelled, and give its blocks back."""
        for requests in (self.waiting, self.prefilling, self.decoding):
            if request in requests:
                requests.remove(request)
        if request.sequence is not None:
            self.pool.free(request.sequence)
            request.sequence = None
        self._is_held = False

    def cancel(self, request: ServedRequest) -> None:
        """Forget a request; the next sample of its prompt takes its place before a fork."""
        siblings, request.is_cancelled = request.take_siblings(), True
        self.remove(request)
        if siblings:
            # The oldest sample left computes the prompt for the others.
            siblings[0].siblings = siblings[1:]
            self.add(siblings[0])

    def release(self) -> None:
        """Take the blocks of all requests, which wait again: a step has failed."""
        for request in self.prefilling + self.decoding:
            self.preempt(request)
            request.draft = None  # the step may have used it
