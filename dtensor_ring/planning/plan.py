"""The work of each rank at each step of the ring, and the transfers for it.

Everything here is integer arithmetic on positions. The ring above holds no mask logic and names
no layout: it runs the tiles it is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from dtensor_ring.planning.block_order import BlockOrder, Grid, Sent
from dtensor_ring.planning.changing import Changing, ChangingDocuments
from dtensor_ring.planning.demand import Cols, KeyDemand, PairwiseDemand
from dtensor_ring.planning.layout import Joined, Layout, Run, run_positions
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.mask import Documents, Mask
from dtensor_ring.planning.ranges import MAX_RANKS, as_count
from dtensor_ring.planning.route import ROUTES, Hop, Route, Transfer
from dtensor_ring.planning.run_table import ShardTable, shard_table
from dtensor_ring.planning.slices import Slices, rows_of, slices_of
from dtensor_ring.planning.strategy import Strategy, as_strategy
from dtensor_ring.planning.sweep import SortedDemand
from dtensor_ring.planning.tile import (
    FULL,
    QuerySlice,
    Tile,
    packed_tiles,
    query_slices_of,
    shard_tiles,
)


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)  # hashed by identity
class Step:
    """One iteration of the ring: `tiles` against the columns `cols` of the source's shard.

    The columns of the tiles index into `cols`, packed side by side. In the first step `cols` are
    all columns of this rank's shard; in later steps they are the columns of the source's packet.
    `runs` are those of the source's shard, see `Layout.runs`. `kept` holds what its launches need,
    which is made once: it lives as long as the step. `changing` is given if its documents change.
    """

    number: int
    source: int
    cols: Cols
    tiles: tuple[Tile, ...]
    runs: tuple[Run, ...] = ()
    changing: Changing | None = None
    kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)


class KeyOwners(NamedTuple):
    """Whose keys the ranks of a ring have after an all-to-all: those of all ranks of their group.

    Attributes:
        layout: how keys are sharded before it.
        heads: ranks of a group.
        world_size: ranks of the axis.
        seq_len: global length of the keys, in tokens.
    """

    layout: Layout
    heads: int
    world_size: int
    seq_len: int

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return self.world_size // self.heads

    def columns(self, rank: int) -> list[np.ndarray]:
        """Return the columns that each rank of a group owned, in the shard that the group has.

        >>> from dtensor_ring import ZigZag
        >>> [x.tolist() for x in KeyOwners(ZigZag(), 2, 4, 8).columns(0)]
        [[0, 3], [1, 2]]
        """
        first = rank // self.heads * self.heads
        owned = [self._positions(x) for x in range(first, first + self.heads)]
        whole = np.sort(np.concatenate(owned))
        return [np.searchsorted(whole, x) for x in owned]

    def num_tokens(self, rank: int) -> list[int]:
        """Return how many tokens each rank of a group owned, without a list of them.

        >>> from dtensor_ring import ZigZag
        >>> KeyOwners(ZigZag(), 2, 4, 8).num_tokens(0)
        [2, 2]
        """
        first = rank // self.heads * self.heads
        return [
            sum(run.length for run in self.layout.runs(x, self.world_size, self.seq_len))
            for x in range(first, first + self.heads)
        ]

    def block_table(self, rank: int, size: int) -> np.ndarray:
        """Return the block of each column of a group's shard, `(T,)`.

        Blocks of `size` tokens are counted in the shard of their owner, and those of one owner
        follow those of the ranks before it.
        """
        columns = self.columns(rank)
        table, end = np.empty(sum(map(len, columns)), dtype=np.int64), 0
        for of_owner in columns:
            table[of_owner] = end + np.arange(len(of_owner)) // size
            end += -(-len(of_owner) // size)
        return table

    def _positions(self, rank: int) -> np.ndarray:
        return run_positions(self.layout.runs(rank, self.world_size, self.seq_len))


@dataclass(frozen=True)
class Plan:
    """The work of one rank: its steps, and its messages, one hop for each step.

    `shards[i]` moves keys and values while step i computes: it is posted before the kernels of the
    step and waited for after them, so what it receives serves later steps, and later hops may
    forward it. The last one is empty. A send whose source is this rank packs these columns of its
    own shard; a send with another source forwards its packet, or a part of it.

    `sums[i]` moves sums of gradients: it is posted when step i has added its own, and waited for
    before the next one is posted, the last one at the end. The first one is empty. A sent sum is
    the sum received for that source, plus what this rank's step added. The sends of a hop split
    the columns of the sum among them. A received sum whose source is this rank is final: it holds
    gradients of its own tokens, at `cols`. Any other has the columns of the packet that this rank
    works on, and stays until this rank has added to it and sent it.

    A rank receives at most one packet of each source. On the routes of this project all ranks have
    the same number of steps, see `Route`; code that runs a plan must not rely on it.

    Attributes:
        num_local: numbers of query and of key tokens on this rank.
        owners: whose keys an all-to-all brought; `None` without one.
        runs: the runs of this rank's queries, see `Layout.runs`.
        order: the fixed order of sums; `None` if launches and ranks are summed as they come.
    """

    rank: int
    steps: tuple[Step, ...]
    shards: tuple[Hop, ...]
    sums: tuple[Hop, ...]
    num_local: tuple[int, int]
    owners: KeyOwners | None = None
    runs: tuple[Run, ...] = ()
    order: BlockOrder | None = None

    @property
    def num_steps(self) -> int:
        """Number of steps of this rank, including the first."""
        return len(self.steps)

    @cached_property
    def num_tiles(self) -> int:
        """Number of tiles of all steps; each call of an attention asks for it."""
        return sum(len(step.tiles) for step in self.steps)

    @cached_property
    def largest_packet(self) -> int:
        """Number of columns of the largest packet or sum that this rank moves, 0 without any."""
        moved = [x for hop in self.shards + self.sums for x in hop.sends + hop.receives]
        return max([x.cols.offsets[-1] for x in moved], default=0)

    @cached_property
    def num_arriving(self) -> int:
        """Number of sums for this rank's own keys and values that arrive in a backward pass."""
        return sum(x.source == self.rank for hop in self.sums for x in hop.receives)

    @property
    def num_received(self) -> int:
        """Number of tokens whose keys and values this rank receives, over all hops."""
        return sum(len(transfer.cols) for hop in self.shards for transfer in hop.receives)

    @property
    def num_bytes(self) -> int:
        """Estimated memory of the plan and of the launches built from its tiles, in bytes."""
        # A packet and the sum of its gradients share their columns; many have two indices.
        hops = self.shards + self.sums
        moved = {id(x.cols): x.cols for hop in hops for side in hop[:2] for x in side}.values()
        num_spans = sum(len(cols.spans) for cols in moved)
        num_indices = sum(len(cols) for cols in moved if len(cols.spans) > 1)
        of_steps = 1200 * len(self.steps) + 330 * self.num_tiles
        return 1024 + of_steps + 150 * num_spans + 16 * num_indices


@cached_bytes(2**28, lambda plan: plan.num_bytes)
def plan(
    layout: Layout,
    mask: Mask,
    rank: int,
    world_size: int,
    seq_len: int,
    documents: Documents | None = None,
    key_seq_len: int | None = None,
    key_documents: Documents | None = None,
    strategy: Strategy | str = Strategy.default,
    slices: Slices | None = None,
    key_layout: Layout | None = None,
    block: int | None = None,
) -> Plan:
    """Plan the work of one rank.

    If the strategy has an all-to-all, the plan covers what comes after it: a rank then has all
    tokens of its group, and exchanges keys and values with those ranks of other groups that have
    the same heads.

    Planning time is proportional to the runs of all ranks and the documents (for layouts whose
    runs have gaps, to the pairs of runs), and to the tiles of this rank. Caches keep at most
    256 MiB of plans, and 64 MiB each of needs, runs and boundaries.

    Args:
        layout: how the tokens are sharded.
        mask: what a query sees.
        rank: this rank's index on the ring.
        world_size: ranks on the ring.
        seq_len: global length, in tokens.
        documents: boundaries; a query sees keys of its own document only, and tokens after the
            last boundary see nothing.
        key_seq_len: global length of keys and values, for cross attention.
        key_documents: boundaries of the keys: query document d sees key document d.
        strategy: how the attention is made parallel, see `as_strategy`.
        slices: what a query sees, in place of mask and documents.
        key_layout: how the keys are sharded, if not like the queries. Both are positions of one
            sequence, and the queries may be only its end.
        block: tokens of a block, for a fixed order of sums, see Note [Fixed order]; `None` for the
            order that sends and launches least.

    Raises:
        ValueError: if a layout cannot shard the length or violates the contract of `Layout.runs`,
            the documents are not boundaries, cross attention has a mask that is not full, slices
            do not fit the sequences or are given with a mask or documents, the strategy is
            unknown, or a shard begins or ends within a block.
    """
    seq_lens = seq_len, seq_len if key_seq_len is None else key_seq_len
    slices = checked_slices(mask, world_size, seq_lens, documents, key_documents, slices)
    strategy = as_strategy(strategy, world_size)
    inputs = plan_inputs((layout, key_layout or layout), world_size, seq_lens, slices, strategy)
    # Ranks that exchange tokens for heads are one member of the ring.
    group, member = divmod(rank, strategy.heads)
    route = ROUTES[strategy.route](group, inputs.demand)
    planned = _planned(route, inputs) if block is None else _ordered(route, inputs, block)
    if isinstance(documents, ChangingDocuments):
        found = documents.steps(planned.steps, planned.runs, block is not None)
        planned = replace(planned, steps=found)
    if strategy.heads == 1:
        return planned
    owners = KeyOwners(key_layout or layout, strategy.heads, world_size, seq_lens[1])
    return _among(planned, member, owners)


class PlanInputs(NamedTuple):
    """What the plans of all ranks of a ring begin with; its ranks are groups of an all-to-all.

    Attributes:
        queries: how the queries are sharded.
        keys: how the keys are sharded.
        slices: what queries see.
        demand: what ranks see of one another.
    """

    queries: ShardTable
    keys: ShardTable
    slices: Slices
    demand: KeyDemand


def plan_inputs(
    layouts: tuple[Layout, Layout],
    world_size: int,
    seq_lens: tuple[int, int],
    slices: Slices,
    strategy: Strategy,
) -> PlanInputs:
    """Return what the plans of all ranks begin with; caches keep it.

    Args:
        layouts: of queries and of keys.
        world_size: ranks of the axis.
        seq_lens: global lengths of queries and of keys, in tokens.
        slices: what queries see, checked.
        strategy: how the attention is made parallel.
    """
    queries, keys = (
        shard_table(layout_of_groups(side, strategy), world_size // strategy.heads, num_tokens)
        for side, num_tokens in zip(layouts, seq_lens, strict=True)
    )
    # Cached, because a printed schedule plans every rank of one attention.
    return PlanInputs(queries, keys, slices, _demand(queries, keys, slices))


def layout_of_groups(layout: Layout, strategy: Strategy) -> Layout:
    """Return the layout after the all-to-all, with one shard for each group of ranks."""
    return layout if strategy.heads == 1 else Joined(layout, strategy.heads)


def _among(planned: Plan, member: int, owners: KeyOwners) -> Plan:
    """Turn the plan of a group into the plan of one member, with ranks counted along the axis."""

    def on_axis(group: int) -> int:
        # Ranks have the same heads only if they have the same number within their groups.
        return group * owners.heads + member

    def moved(side: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        return tuple(Transfer(on_axis(x.source), x.cols, on_axis(x.peer)) for x in side)

    shards, sums = (
        tuple(Hop(moved(x.sends), moved(x.receives), tuple(map(on_axis, x.releases))) for x in hops)
        for hops in (planned.shards, planned.sums)
    )
    steps = tuple(replace(step, source=on_axis(step.source)) for step in planned.steps)
    order = planned.order
    if order is not None:
        order = replace(order, owners={on_axis(x): own for x, own in order.owners.items()})
    return replace(
        planned,
        rank=on_axis(planned.rank),
        steps=steps,
        shards=shards,
        sums=sums,
        owners=owners,
        order=order,
    )


def checked_slices(
    mask: Mask,
    world_size: int,
    seq_lens: tuple[int, int],
    documents: Documents | None = None,
    key_documents: Documents | None = None,
    slices: Slices | None = None,
) -> Slices:
    """Check the arguments of an attention, and return what its queries see as slices.

    Raises:
        ValueError: if there is no rank, a length is negative, boundaries or slices do not fit the
            sequences, cross attention has a mask that is not full, or slices are given with a mask
            or documents.
    """
    seq_len, key_seq_len = seq_lens
    check_documents(world_size, seq_len, documents)
    check_documents(world_size, key_seq_len, key_documents, "key_cu_seqlens")
    if slices is not None:
        if mask != FULL or documents is not None or key_documents is not None:
            raise ValueError(
                f"slices say all that is seen, so they come without mask ({mask}), cu_seqlens and "
                "key_cu_seqlens; Slices.documents(cu_seqlens, mask) makes slices of those"
            )
        slices.check(seq_len, key_seq_len)
        return slices
    if seq_len != key_seq_len or key_documents is not None:
        _check_cross(mask, seq_lens, documents, key_documents)
    return slices_of(mask, seq_lens, documents, key_documents)


@cached_bytes(2**26, lambda demand: demand.num_bytes)
def _demand(queries: ShardTable, keys: ShardTable, slices: Slices) -> KeyDemand:
    """Return the columns that ranks see of one another; all plans of one attention share them."""
    # Runs without gaps can be sorted and searched; others have to be compared.
    is_dense = queries.stride == keys.stride == 1
    return (SortedDemand if is_dense else PairwiseDemand)(queries, keys, slices)


def _planned(route: Route, inputs: PlanInputs) -> Plan:
    """Return the steps and hops of a route, with the tiles that its rank computes."""
    queries, keys, slices, _ = inputs
    rank, sources = route.rank, route.sources
    shards = [route.shards(number) for number in range(len(sources))]
    # Building tiles is most of the work, so skip sources of which this rank sees nothing.
    seen = {rank, *route.demand.seen_by(rank)}
    # This rank receives at most one packet of a source, so no entry overwrites another.
    cols = {x.source: x.cols for hop in shards for x in hop.receives}
    cols[rank] = Cols.union([(0, keys.num_local(rank))])
    own = own_slices(queries.shards[rank], slices)
    steps = []
    for number, source in enumerate(sources):
        resident, tiles = cols.get(source, Cols()), ()
        if source in seen:
            tiles = resident_tiles(own, keys.shards[source], resident)
        steps.append(Step(number, source, resident, tiles, keys.shards[source]))
    sums = tuple(route.sums(number) for number in range(len(sources)))
    num_local = queries.num_local(rank), keys.num_local(rank)
    own_runs, released = queries.shards[rank], _released(rank, steps, shards)
    return Plan(rank, tuple(steps), released, sums, num_local, runs=own_runs)


def _ordered(route: Route, inputs: PlanInputs, block: int) -> Plan:
    """Return the steps and hops of a route with sums in a fixed order, see Note [Fixed order]."""
    queries, keys, slices, demand = inputs
    rank, grid = route.rank, Grid(block, queries, keys, slices)
    plan = _planned(route, inputs)
    own, of_others = own_slices(grid.query_runs[rank], slices), demand.seen_by(rank)
    # Demand lists keys of other ranks only, so this rank's own are added.
    seen = [plan.steps[0].cols, *(of_others.get(x.source, Cols()) for x in plan.steps[1:])]
    pieces = tuple(
        grid.pieces(own, step.source, step.cols, cols)
        for step, cols in zip(plan.steps, seen, strict=True)
    )
    sources = [step.source for step in plan.steps]
    # Two ranks of one distance meet at one step, on every route.
    peers, by_rank = [(2 * rank - x) % demand.world_size for x in sources], demand.seen_of(rank)
    away = [grid.sent(rank, x, cols) for x, cols in zip(sources, seen, strict=True)]
    home = [grid.sent(x, rank, by_rank.get(x, Cols())) for x in peers]
    away[0] = home[0] = Sent()  # the gradients of the own keys stay here
    sizes = [grid.sizes(x, cols) for x, cols in zip(sources, seen, strict=True)]
    order = grid.order(rank, pieces, sizes, away, home)
    steps = tuple(
        replace(step, tiles=tuple(tile for piece in of_step for tile in piece.tiles))
        for step, of_step in zip(plan.steps, pieces, strict=True)
    )
    sums = tuple(
        Hop(
            (Transfer(source, sent.cols, source),) if sent.parts else (),
            (Transfer(rank, got.cols, peer),) if got.parts else (),
        )
        for source, peer, sent, got in zip(sources, peers, away, home, strict=True)
    )
    return replace(plan, steps=steps, sums=sums, order=order)


OwnSlices = list[tuple[int | None, list[QuerySlice]]]


def own_slices(runs: tuple[Run, ...], slices: Slices) -> OwnSlices:
    """Return the queries of a shard by batch row, cut by slices; `None` stands for all rows."""
    return [(batch, query_slices_of(runs, table)) for batch, table in rows_of(slices)]


def resident_tiles(own: OwnSlices, key_runs: tuple[Run, ...], resident: Cols) -> tuple[Tile, ...]:
    """Return the tiles of a step.

    Args:
        own: the queries of the rank, see `own_slices`.
        key_runs: the runs of the source.
        resident: columns of the source's shard that the rank has.
    """
    # Kernels get the packet, not the whole shard, so tiles index into its columns.
    return tuple(
        tile
        for batch, pieces in own
        for tile in packed_tiles(shard_tiles(pieces, key_runs, batch), resident)
    )


def _released(rank: int, steps: Sequence[Step], shards: Sequence[Hop]) -> tuple[Hop, ...]:
    """Add to each hop the sources whose packets this rank no longer needs after it."""
    # A packet is needed until the last step that computes on it and the last hop that forwards it.
    # Packets still resident after the last step are freed with all buffers.
    last: dict[int, int] = {}  # source: the last step that uses its packet
    for number, (step, hop) in enumerate(zip(steps, shards, strict=True)):
        used = [x.source for side in (hop.sends, hop.receives) for x in side]
        last |= dict.fromkeys([*used, *([step.source] if step.tiles else [])], number)
    # The rank's own shard is not a packet, so no hop releases it.
    last.pop(rank, None)
    over: list[list[int]] = [[] for _ in steps]
    for source, number in last.items():
        over[number].append(source)
    *others, final = (
        hop._replace(releases=tuple(sources)) for hop, sources in zip(shards, over, strict=True)
    )
    return *others, final._replace(releases=())


def check_documents(
    world_size: int, seq_len: int, documents: Documents | None, name: str = "cu_seqlens"
) -> None:
    """Refuse boundaries that do not fit the sequence, and sizes that are out of range."""
    as_count("world_size", world_size, 1, MAX_RANKS)
    as_count(name.replace("cu_seqlens", "seq_len"), seq_len)
    if documents is not None:
        documents.check(seq_len, name)


def _check_cross(
    mask: Mask,
    seq_lens: tuple[int, int],
    documents: Documents | None,
    key_documents: Documents | None,
) -> None:
    """Refuse a mask or documents that cross attention cannot have."""
    if mask != Mask.full():
        raise ValueError(
            f"{seq_lens[0]} query and {seq_lens[1]} key tokens, or documents of their own, are "
            f"cross attention, which has no diagonal: it takes Mask.full() only, got {mask}"
        )
    if any(rows is not None and not len(rows) for rows in (documents, key_documents)):
        return  # an empty batch has no boundaries to count
    counts = [None if rows is None else rows.arrays[0].size for rows in (documents, key_documents)]
    if counts[0] != counts[1]:
        raise ValueError(
            f"cross attention of documents ({seq_lens[0]} query, {seq_lens[1]} key tokens) needs "
            "as many boundaries in cu_seqlens as in key_cu_seqlens, "
            f"got {counts[0] or 'none'} and {counts[1] or 'none'}"
        )
