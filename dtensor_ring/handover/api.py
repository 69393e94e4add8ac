"""What users call: `hand_over` gives a cache to other ranks, and `HandOver` layer by layer."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any, Self

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.decode.cache import CacheLayer, ShardedCache
from dtensor_ring.decode.column_memory import ColumnMemory
from dtensor_ring.dtensor.annotation import axis_group
from dtensor_ring.dtensor.call_check import check_agreement, checked_barrier
from dtensor_ring.handover.call import device_of, handing_over
from dtensor_ring.handover.columns import ColumnMove
from dtensor_ring.handover.plan import head_span
from dtensor_ring.handover.run import Incoming, MovedPart, Outgoing, Posts, copy, fill, put
from dtensor_ring.handover.sides import HandOverPlan, Kept, Told, Wanted, planned
from dtensor_ring.quantised.kept_tokens import KINDS


def hand_over(
    source: ShardedCache | None,
    target: ShardedCache | None,
    mesh: DeviceMesh,
    *,
    heads: DeviceMesh | None = None,
) -> None:
    """Give all columns of a cache to another cache, on other ranks or in another layout.

    The ranks of the source may be others than those of the target, the same, or some of both, and
    more or fewer. Each column goes over the wire once, and one that stays on its rank not at all.
    Eight bits stay eight bits, with their scales. The source keeps its columns; `reset` frees them.

    Args:
        source: the cache on the ranks that give; `None` on others.
        target: an empty cache on the ranks that get, of as many layers; `None` on others. It will
            be as after one append step that was sharded in its layout.
        mesh: a 1-D mesh of all these ranks. All of them must call it.
        heads: for targets of tensor-parallel ranks, the 1-D mesh over whose ranks key heads are
            sharded: each gets those of its heads only. Heads that are fewer than ranks are copied.

    Raises:
        ValueError: on every rank, if caches do not fit each other, a rank of one is missing, or
            eight bits would be cut out of their blocks.
        TypeError: if an argument has a wrong type.
        RingError: on every rank, if a rank ended, raised, or did not answer in time.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> prefilled, decoding = (ShardedCache(mesh, num_layers=1) for _ in range(2))
        >>> prefilled.begin(6, dealt=True)
        >>> pair = prefilled[0].append(torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4))
        >>> hand_over(prefilled, decoding, mesh)
        >>> decoding.seq_len, decoding[0].keys.shape
        (6, torch.Size([1, 2, 6, 4]))
    """
    with HandOver(source, target, mesh, heads=heads):
        pass


SAME_HAND_OVER = "hand over the same cache"


class HandOver:
    """A hand-over whose layers are sent one by one, while the layers after them are still computed.

    Within its context, `send` sends a layer that has all its columns. The end of the context sends
    the others, and waits for all messages.

        with HandOver(cache, None, mesh, like=pair) as moving:  # on a rank of the source
            for layer in cache:
                layer.append(...)
                moving.send(layer.number)

    Args:
        source: see `hand_over`. Its last append step has begun, and may be incomplete.
        target: see `hand_over`.
        mesh: see `hand_over`.
        heads: see `hand_over`.
        like: on the ranks of the source, keys and values as each layer appends them, `(B, N, L,
            H)`, of any length; for layers that have none yet.
        seq_len: the number of first tokens that move; by default all. The last ones may be padding.

    Attributes:
        num_sent: the bytes that this rank has sent.

    Raises:
        ValueError: as `hand_over` does.
        TypeError: if an argument has a wrong type.
        RingError: as `hand_over` does.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> prefilled, decoding = (ShardedCache(mesh, num_layers=1) for _ in range(2))
        >>> pair = torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4)
        >>> prefilled.begin(6, dealt=True)
        >>> with HandOver(prefilled, decoding, mesh, like=pair) as moving:
        ...     kept = prefilled[0].append(*pair)
        ...     moving.send(0)
        >>> torch.equal(decoding[0].keys, pair[0])
        True
    """

    def __init__(
        self,
        source: ShardedCache | None,
        target: ShardedCache | None,
        mesh: DeviceMesh,
        *,
        heads: DeviceMesh | None = None,
        like: tuple[Tensor, Tensor] | None = None,
        seq_len: int | None = None,
    ) -> None:
        for name, cache in (("source", source), ("target", target)):
            if not isinstance(cache, (ShardedCache, type(None))):
                raise TypeError(f"{name} must be a ShardedCache, or None, got {cache!r}")
        if heads is not None and (type(heads) is not DeviceMesh or heads.ndim != 1):
            raise TypeError(f"heads must be a 1-D DeviceMesh, or None, got {heads!r}")
        self._group = axis_group(mesh)
        self._rank, self._device = self._group.rank(), device_of(mesh)
        self._source, self._target, self._next, self.num_sent = source, target, 0, 0
        try:
            self._told = _told(source, target, heads, like, seq_len)
        except Exception as error:  # the others would wait for this rank
            check_agreement(self._group, {"error": str(error)}, SAME_HAND_OVER)
            raise
        told = check_agreement(self._group, {"error": "none"}, SAME_HAND_OVER, self._told)
        # All ranks plan from the same list, so a cache that does not fit raises on each of them.
        self._plan = planned(told, dist.get_process_group_ranks(self._group))
        self._made = self._empty() if target is not None else []

    def __enter__(self) -> Self:
        kept = self._plan.kept
        facts = {"tokens": kept.table.seq_len, "batch": kept.batch, "kv_dtype": kept.kv_dtype}
        facts |= {"layers": len(kept.layers)}
        with ExitStack() as stack:
            self._posts: Posts = stack.enter_context(handing_over(self._group, facts, self._device))
            # A rank that only receives calls no `send`, so all of its receives are posted here.
            if self._source is None:
                for number in range(len(self._made)):
                    self._posts.post(number, self._incoming(number), [])
            # The call stays open beyond this method; an error before this line has closed it.
            self._open = stack.pop_all()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool | None:
        # The error goes through the call, which ends it on the ranks that wait for this one.
        if error is not None:
            return self._open.__exit__(kind, error, trace)
        with self._open:
            if self._source is not None:
                # Ranks of the target have posted receives for all layers, so none may be left out.
                for number in range(self._next, len(self._source)):
                    self.send(number)
        self.num_sent = self._posts.num_sent
        with checked_barrier(self._group, "the end of a hand-over", {}):
            pass  # a rank that only sends learns of others' errors here
        if self._target is not None:
            # Only now: after an error, of whatever rank, the target is as empty as before.
            _hold(self._target, self._made, self._plan)
        return None

    def send(self, number: int) -> None:
        """Send a layer that has all its columns; layers go in their order.

        Raises:
            ValueError: if it is not the next layer, or this rank has no source.
        """
        if self._source is None or number != self._next:
            raise ValueError(f"layers go in their order: {self._next} is next, got {number}")
        layer = self._source[number]
        layer._reorder()
        outgoing = []
        for move in self._plan.moves:
            if move.move.source != self._rank:
                continue
            parts = self._given(number, layer, move)
            if move.move.target == self._rank:
                copy(parts, self._taken(number, move))
            else:
                contents = [x.content for x in parts]
                outgoing.append(Outgoing(move.move.target, contents, partial(fill, parts)))
        self._posts.post(number, self._incoming(number), outgoing)
        self._next += 1

    def _given(self, number: int, layer: CacheLayer, move: ColumnMove) -> list[MovedPart]:
        pairs = zip(layer._memory, self._plan.kept.layers[number], strict=True)
        return [part for x, (shape, _) in pairs for part in move.given(x, shape[1])]

    def _incoming(self, number: int) -> list[Incoming]:
        """Return the messages of a layer that this rank gets."""
        messages = []
        for move in self._plan.moves:
            if move.move.target == self._rank != move.move.source:
                parts = self._taken(number, move)
                contents = [x.content for x in parts]
                messages.append(Incoming(move.move.source, contents, partial(put, parts)))
        return messages

    def _taken(self, number: int, move: ColumnMove) -> list[MovedPart]:
        return [part for memory in self._made[number] for part in move.taken(memory)]

    def _empty(self) -> list[list[ColumnMemory]]:
        """Return memory for what this rank gets, by layer."""
        kept, table, num_shards, _ = self._plan
        assert self._target is not None
        num_cols = table.num_local[self._target.mesh.get_local_rank()]
        return [
            [
                x.empty(
                    head_span(self._told.heads, num_shards, x.shape[1]),
                    num_cols,
                    self._device,
                    kept.kv_dtype,
                    kind,
                )
                for x, kind in zip(pair, KINDS, strict=True)
            ]
            for pair in kept.layers
        ]


def _told(
    source: ShardedCache | None,
    target: ShardedCache | None,
    heads: DeviceMesh | None,
    like: tuple[Tensor, Tensor] | None,
    seq_len: int | None,
) -> Told:
    """Return what this rank tells the others."""
    kept = None if source is None else Kept.of(source, like, seq_len)
    wanted = None if target is None else Wanted.of(target, heads)
    return Told(kept, wanted, 0 if heads is None or target is None else heads.get_local_rank())


def _hold(cache: ShardedCache, made: list[list[ColumnMemory]], plan: HandOverPlan) -> None:
    """Let a cache hold what it got."""
    cache._appends.take_over(plan.table, plan.kept.batch, plan.kept.order)
    for layer, memory in zip(cache, made, strict=True):
        layer._memory, layer.capacities = tuple(memory), plan.table.num_local
