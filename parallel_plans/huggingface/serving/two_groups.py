"""A continuous batch of two groups: some ranks prefill prompts, and other ranks decode.

All ranks keep the tables of both pools, so all know what moves. A step prefills on the first group
and decodes on the second one at the same time. The blocks of a layer are sent when the layer has
written them, while later layers are computed. At the end of the step, the ranks that do not decode
hear which tokens were chosen, and what is proposed for the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import BlockPool, RingError, SequenceAxis
from dtensor_ring.extension import (
    BlockCopy,
    MovedTokens,
    PagedHandOver,
    axis_group,
    check_agreement,
    copy_whole,
    end_calls,
    group_beside,
    moving_blocks,
)
from parallel_plans.huggingface.serving.continuous_batch import (
    SAME_REQUESTS,
    ContinuousBatch,
    install_generate_batch,
)
from parallel_plans.huggingface.serving.drafts import propose_all
from parallel_plans.huggingface.serving.pooled_forward import (
    PooledForward,
    check_servable,
    check_whole_weights,
)
from parallel_plans.huggingface.serving.served_request import ServedRequest, TokenChoice, extend_all
from parallel_plans.huggingface.serving.serving_options import ServingOptions
from parallel_plans.huggingface.serving.state_slots import StateSlots
from parallel_plans.huggingface.serving.told_tokens import ToldTokens
from parallel_plans.huggingface.serving.two_pools import TwoPoolScheduler
from parallel_plans.huggingface.sharding.sharding import Sharding


def install_batches(model: Any, plan_of: Callable[[Any], Any]) -> None:
    """Make continuous batching of this model run over a sharded pool, or over one of each group.

    `plan_of` returns a plan for a stock `assistant_model`.
    """
    install_generate_batch(model, plan_of)
    plain = vars(model).get("init_continuous_batching")
    if plain is None:  # it does not generate
        return

    def init_continuous_batching(
        self: Any,
        generation_config: Any = None,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
        *,
        prefill: DeviceMesh | None = None,
        decode: DeviceMesh | None = None,
    ) -> ContinuousBatch:
        """Return a batch that requests can join; with both groups, a `TwoGroupBatch`."""
        if prefill is None and decode is None:
            return plain(generation_config, continuous_batching_config, workload_hints)
        check_servable(self)
        options = ServingOptions.of(continuous_batching_config, self.device)
        sharding = self.context_parallel_sharding
        return TwoGroupBatch(
            self,
            sharding,
            generation_config=generation_config,
            options=options,
            plan_of=plan_of,
            prefill=prefill,
            decode=decode,
        )

    model.init_continuous_batching = MethodType(init_continuous_batching, model)


class RequestsHandedBack(RingError):
    """A step of two groups failed; requests that have not started are handed back.

    Attributes:
        not_started: their prompts, by id. They waited when the step began: add them to another
            batch.
    """

    def __init__(self, error: RingError, not_started: dict[str, list[int]]) -> None:
        place = {x: getattr(error, x) for x in ("ring", "direction", "step", "source", "peer")}
        text = f"{error}. Requests that have not started: {', '.join(not_started) or 'none'}"
        super().__init__(text, **place, seconds=error.seconds)
        self.not_started = not_started


Chunks = list[tuple[ServedRequest, int]]


# Note [Drafts of two groups]: the ranks that decode propose tokens at the end of a step, for
# requests that go on: all ranks make room for them before the next step. So the first step of a
# request has no draft, whoever else is in the batch.
#
# One step; all ranks meet at its begin and at its end:
#     first group     layer 0, layer 1, ... of prompts        hears tokens
#     messages                 blocks of layer 0, of 1, ...
#     second group    decodes, chooses tokens, proposes       tells tokens
class TwoGroupBatch(ContinuousBatch):
    """A `ContinuousBatch` whose prompts are prefilled by some ranks, and decoded by others.

    Args:
        model: see `ContinuousBatch`; its plan is over all ranks of both groups.
        sharding: see `ContinuousBatch`.
        generation_config: see `ContinuousBatch`.
        options: sizes of each pool and of steps.
        prefill: the mesh of the ranks that prefill.
        decode: the mesh of the ranks that decode; a rank may do both.

    Raises:
        ValueError: on every rank, if the model cannot be served so, or a group has ranks that the
            plan does not have.
    """

    def __init__(
        self,
        model: Any,
        sharding: Sharding,
        generation_config: Any,
        options: ServingOptions,
        plan_of: Callable[[Any], Any],
        prefill: Any,
        decode: Any,
    ) -> None:
        self._is_allocated = False
        group = axis_group(sharding.axis.mesh)
        self._beside = group_beside(group)
        self._ranks = _ranks_of(prefill, decode, group, self._beside)
        check_whole_weights(model)
        self._axes = [_axis(sharding.axis, mesh) for mesh in (prefill, decode)]
        self._forwards: list[PooledForward | None] = [None, None]
        super().__init__(model, sharding, generation_config, options, plan_of)
        self._drafters.axis_of_drafts = self._axes[1] or sharding.axis

    @property
    def num_bytes(self) -> int:
        """Return the bytes of keys, values and states on this rank, in both pools."""
        return sum(x.num_bytes for x in self._forwards if x is not None)

    @property
    def prefill_pool(self) -> BlockPool | None:
        """Return the pool of the ranks that prefill; `None` before `pool` is made."""
        return None if self._parts is None else self._two_pools.prefill_pool

    @property
    def _two_pools(self) -> TwoPoolScheduler:
        scheduler = self._scheduler
        assert isinstance(scheduler, TwoPoolScheduler)
        return scheduler

    def step(self) -> list[Any]:
        """Compute the next tokens of some requests, see `ContinuousBatch.step`.

        Raises:
            RequestsHandedBack: on every rank but one that raised itself, if a rank of any group
                ended, raised, or drifted apart.
        """
        not_started = self._not_started()
        try:
            return super().step()
        except BaseException as error:
            # A rank that left one group early may be waited for in another one.
            for group in (self._beside, *(axis_group(x.mesh) for x in self._axes if x)):
                end_calls(group, error)
            if isinstance(error, RingError):
                raise RequestsHandedBack(error, not_started) from error
            raise

    def _not_started(self) -> dict[str, list[int]]:
        """Return the prompts of requests that wait, and for which nothing was computed."""
        if self._parts is None:
            return {}
        waiting = [x for x in self._two_pools.waiting if not x.new_tokens]
        return {y.request_id: y.prompt for x in waiting for y in (x, *x.siblings)}

    def _made(self, num_blocks: int) -> tuple[TwoPoolScheduler, Any]:
        options, sizes = self._options, [len(ranks) for ranks in self._ranks]
        each = [num_blocks, num_blocks]
        if options.num_blocks is None:  # that of the smaller group: both have room for as much
            each = [-(-num_blocks * min(sizes) // size) for size in sizes]
        pool = BlockPool if self._sharding.passing is None else StateSlots
        pools = self._pool(each[0], sizes[0]), pool(each[1], options.page_size, sizes[1])
        with torch.no_grad():
            self._sharding.agree(self._model, {})  # on the weights
        for number, (axis, pool) in enumerate(zip(self._axes, pools, strict=True)):
            if axis is not None:
                self._forwards[number] = PooledForward(self._model, self._sharding, pool, axis)
        scheduler = TwoPoolScheduler(
            pools[0],
            pools[1],
            max_tokens=options.max_batch_tokens,
            max_requests=options.max_requests_per_batch,
        )
        return scheduler, self._forwards[1]

    def _need(self, choice: TokenChoice, size: int | None = None) -> int:
        return super()._need(choice, size or min(map(len, self._ranks)))

    def _too_long(self, choice: TokenChoice) -> str | None:
        scheduler = self._two_pools
        pools = scheduler.prefill_pool, scheduler.pool
        for pool, ranks in zip(pools, self._ranks, strict=True):
            error = self._error_of_length(choice, pool, self._need(choice, len(ranks)))
            if error is not None:
                return error
        return None

    def _compute(self, scheduler: Any, forward: Any) -> None:
        scheduler.counts.steps += 1
        scheduler.admit()
        self._move_states()  # of prompts that the first pool had already
        copies, requests = scheduler.grow(), scheduler.decoding[:]
        chunks = scheduler.chunks()
        moved = scheduler.moved(chunks)
        ahead = bool(chunks) and not self._is_allocated
        if ahead:  # the ranks that decode learn here what the others keep
            self._prefill(chunks, None)
            self._allocate()
        told = ToldTokens(requests, self._drafters.share, self._model.device)
        with self._moving(moved, chunks, requests) as moving:
            self._prefill([] if ahead else chunks, moving)
            ends = self._decode(requests, copies, moving, told)
        # Ranks that decode have committed their tokens already; this one hears of them now.
        if ends is None:
            ends, drafts = told.note()
            scheduler.decoded(requests)
            for request, draft in zip(requests, drafts, strict=True):
                request.draft = draft
        scheduler.prefilled(chunks)
        self._move_states()
        self._end_requests(requests, ends)

    def _move_states(self) -> None:
        """Give the states of prompts that are done to the second group; all ranks decide alike."""
        scheduler = self._two_pools
        first, second = (None if x is None else x.states for x in self._forwards)
        for states, pool in ((first, scheduler.prefill_pool), (second, scheduler.pool)):
            if states is None and isinstance(pool, StateSlots):
                pool.take_copies()  # other ranks make them
        if requests := scheduler.arriving():
            given = None if first is None else first.of([scheduler.source(x) for x in requests])
            found = copy_whole(given, second is not None, self._sharding.axis.mesh)
            if second is not None and found is not None:
                second.take([x.held for x in requests], found)
            scheduler.arrived()

    def _moving(
        self, moved: list[MovedTokens], chunks: Chunks, requests: Sequence[ServedRequest]
    ) -> AbstractContextManager[PagedHandOver]:
        """Return the context of a step, in which blocks and tokens travel."""
        scheduler = self._two_pools
        caches = [None if x is None else x.memory.cache for x in self._forwards]
        facts = {
            "step": scheduler.counts.steps,
            "prompts": [(x.request_id, number) for x, number in chunks],
            "requests": [x.request_id for x in requests],
        }
        pools = scheduler.prefill_pool, scheduler.pool
        return moving_blocks(
            self._beside,
            self._model.device,
            moved,
            pools,
            self._ranks,
            (caches[0], caches[1]),
            facts,
        )

    def _prefill(self, chunks: Chunks, moving: PagedHandOver | None) -> None:
        """Compute tokens of prompts, and send each layer as soon as it has them."""
        forward, scheduler = self._forwards[0], self._two_pools
        if forward is None:
            return
        if chunks:
            forward.memory.written = None if moving is None else moving.send
            try:
                forward.run([(scheduler.source(x), number) for x, number in chunks], [])
            finally:
                forward.memory.written = None
        # A step without new tokens may still move those of earlier steps.
        elif moving is not None:
            for layer in range(forward.memory.num_layers):
                moving.send(layer)

    def _allocate(self) -> None:
        """Allocate the second pool as the first group keeps keys; all ranks meet here once."""
        first, second = self._forwards
        kind = None if first is None else first.memory.kind
        told = check_agreement(self._beside, {}, SAME_REQUESTS, kind)
        found = next((x for x in told if x is not None), None)  # none without attention
        if second is not None and second.memory.cache is None and found is not None:
            second.memory.allocate(found, self._model.device)
        self._is_allocated = True

    def _decode(
        self,
        requests: Sequence[ServedRequest],
        copies: Sequence[BlockCopy],
        moving: PagedHandOver,
        told: ToldTokens,
    ) -> list[bool] | None:
        """Choose the next tokens of requests, and propose those after them.

        Returns:
            Whether each request ends; `None` on ranks that do not decode, which will hear it.
        """
        if not requests:
            return []
        forward, decoding = self._forwards[1], self._ranks[1]
        if forward is None:
            moving.posts.hear(decoding[0], told.message)
            return None
        forward.copy(copies)
        ends = extend_all(requests, forward.run([], [x.held for x in requests]))
        if forward.states is not None:
            forward.states.keep([len(x.tokens) - 1 - x.held.num_written for x in requests])
        self._two_pools.decoded(requests)
        left = [x for x, has_ended in zip(requests, ends, strict=True) if not has_ended]
        propose_all(left, self._drafters.share, self._unit)
        # All ranks that decode have the same tokens, so one of them tells the others.
        if self._beside.rank() == decoding[0]:
            told.write(ends)
            others = {*range(self._beside.size())} - {*decoding}
            moving.posts.tell(sorted(others), told.message)
        return ends


def _axis(axis: SequenceAxis, mesh: DeviceMesh) -> SequenceAxis | None:
    """Return an axis over a group that runs attention as the plan's does; `None` on other ranks."""
    if mesh.get_coordinate() is None:
        return None
    return SequenceAxis(mesh, axis.layout, kernel=axis.kernel, policy=axis.policy)


def _ranks_of(
    prefill: Any, decode: Any, group: dist.ProcessGroup, beside: dist.ProcessGroup
) -> tuple[list[int], list[int]]:
    """Return the ranks of both groups, counted in the group beside that of the plan.

    Raises:
        ValueError: on every rank, if ranks give others, or one is not in the group.
        TypeError: on every rank, if one is no mesh.
    """
    given = {"prefill": prefill, "decode": decode}
    # Compare first: late ranks would take an error of earlier ranks for a failure.
    check_agreement(group, {name: _described(mesh) for name, mesh in given.items()}, SAME_REQUESTS)
    known, found = dist.get_process_group_ranks(beside), list[list[int]]()
    for name, mesh in given.items():
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise TypeError(f"{name} must be a 1-D DeviceMesh, got {mesh!r}; give both groups")
        ranks = mesh.mesh.tolist()
        if missing := sorted({*ranks} - {*known}):
            raise ValueError(
                f"{name} has the ranks {missing}, which the plan of the model does not have: it "
                f"is over {known}; apply it over a mesh of all ranks of both groups"
            )
        found.append([known.index(rank) for rank in ranks])
    return found[0], found[1]


def _described(mesh: Any) -> str:
    """Describe a group for other ranks."""
    return str(mesh.mesh.tolist()) if isinstance(mesh, DeviceMesh) else type(mesh).__name__
