"""How evenly layouts shard what is seen, by closed forms of the work, and by counting."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, chain, pairwise, takewhile
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtensor_ring import (
    Balanced,
    Contiguous,
    Mask,
    Striped,
    ZigZag,
    describe_schedule,
    sequence_runs,
)
from dtensor_ring.balanced import balanced as costs
from dtensor_ring.balanced.balanced import (
    TOKEN,
    TOLERANCE,
    _by_blocks,
    balanced_partition,
    busiest_load,
    cost,
    ring_cost,
    ring_makespan,
)
from dtensor_ring.balanced.work import AttentionWork, Partition, areas, exact_table, visible_pairs
from dtensor_ring.lab.schedule import Schedule
from dtensor_ring.ops.boundaries import run_table
from dtensor_ring.planning.layout import Run, shard_length
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.run_table import RunTable
from dtensor_ring.planning.slices import UNBOUNDED, Slices
from dtensor_ring.planning.tile import FULL
from tests.planning.test_mask import masks
from tests.planning.test_plan import documents_of
from tests.pool import Pool
from tests.rings import Ring
from tests.slices import shown, slices

CAUSAL = Mask.causal()


def areas_by_rank(ring: Ring) -> list[list[int]]:
    """By rank, then step."""
    return [[sum(t.area for t in step.tiles) for step in p.steps] for p in ring.plans()]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_zigzag_is_balanced_under_causal(world_size: int, chunk: int) -> None:
    by_rank = areas_by_rank(Ring(ZigZag(), world_size, 2 * world_size * chunk, CAUSAL))
    for steps in zip(*by_rank, strict=True):
        assert len(set(steps)) == 1, "all ranks work the same at each step"


@settings(deadline=None)
@given(world_size=st.integers(1, 8), seq_len=st.integers(1, 200))
def test_zigzag_is_near_balance_at_any_length(world_size: int, seq_len: int) -> None:
    totals = [sum(steps) for steps in areas_by_rank(Ring(ZigZag(), world_size, seq_len, CAUSAL))]
    padded = Contiguous().padded_length(seq_len, world_size)
    # A rank's halves differ by one token at most: W-1 diagonals of a shard. Padding that is not
    # there saves at most one row and column per rank.
    assert max(totals) - sum(totals) / world_size <= 1.5 * padded


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shard", [1, 2, 7])
def test_striped_is_balanced_within_a_diagonal(world_size: int, shard: int) -> None:
    by_rank = areas_by_rank(Ring(Striped(), world_size, world_size * shard, CAUSAL))
    for steps in zip(*by_rank, strict=True):
        assert max(steps) - min(steps) <= shard, "one diagonal of a tile"
    totals = [sum(steps) for steps in by_rank]
    assert max(totals) - min(totals) == (world_size - 1) * shard


def test_areas_sum_to_all_visible_pairs() -> None:
    for layout in (Contiguous(), Striped(), ZigZag()):
        total = sum(chain.from_iterable(areas_by_rank(Ring(layout, 4, 64, CAUSAL))))
        assert total == 64 * 65 // 2, layout


@st.composite
def balanced(draw: st.DrawFn) -> Balanced:
    world_size, seq_len = draw(st.integers(1, 5)), draw(st.integers(0, 60))
    mask, block = draw(masks(st.integers(0, 20))), draw(st.integers(1, 12))
    documents = draw(st.none() | documents_of(seq_len, draw(st.integers(1, 6)), st.integers(1, 3)))
    return Balanced(mask, seq_len, world_size, documents, block)


def runs_of(layout: Balanced | ZigZag, ring: Balanced) -> list[tuple[Run, ...]]:
    return [layout.runs(rank, ring.world_size, ring.seq_len) for rank in range(ring.world_size)]


def positions_of(layout: Balanced | ZigZag, ring: Balanced) -> list[list[int]]:
    sizes = ring.world_size, ring.seq_len
    return [sorted(layout.positions(rank, *sizes)) for rank in range(ring.world_size)]


def loads_of(layout: Balanced | ZigZag, ring: Balanced) -> list[int]:
    """Visible pairs by rank, as the plans count them."""
    by_rank = areas_by_rank(Ring(layout, ring.world_size, ring.seq_len, ring.mask, ring.cu_seqlens))
    return [sum(steps) for steps in by_rank]


@settings(deadline=None)
@given(balanced())
def test_every_position_is_held_once_in_few_runs(layout: Balanced) -> None:
    sharded, sizes = positions_of(layout, layout), (layout.world_size, layout.seq_len)
    assert sorted(chain.from_iterable(sharded)) == list(range(layout.seq_len))
    assert [len(tokens) for tokens in sharded] == [
        shard_length(rank, *sizes) for rank in range(layout.world_size)
    ]
    for runs in runs_of(layout, layout):
        assert len(runs) <= layout.max_runs
        ends = [run.start + run.length for run in runs]
        neighbours = zip(ends, runs[1:], strict=False)
        assert all(end < run.start for end, run in neighbours), f"not joined, in order: {runs}"


@settings(deadline=None)
@given(balanced())
def test_runs_come_back_as_they_were_sent(layout: Balanced) -> None:
    runs = sequence_runs(layout)
    assert runs.shape == (layout.world_size, layout.max_runs, 2)
    assert runs.dtype == torch.int32
    with torch.device("meta"):
        assert sequence_runs(layout).device.type == "cpu", "whatever the default is"
    sizes = layout.world_size, layout.seq_len
    received = [run_table(runs).runs(rank, *sizes) for rank in range(layout.world_size)]
    assert received == runs_of(layout, layout)


def test_the_shape_of_the_runs_does_not_depend_on_the_documents() -> None:
    layouts = [Balanced(CAUSAL, 60, 3, (0, end, 60), block=4) for end in range(0, 61, 7)]
    assert {tuple(sequence_runs(layout).shape) for layout in layouts} == {(3, 10, 2)}
    assert len({str(sequence_runs(layout)) for layout in layouts}) > 1


@settings(deadline=None)
@given(balanced())
def test_even_or_no_less_so_than_zigzag(layout: Balanced) -> None:
    before, after = loads_of(ZigZag(), layout), loads_of(layout, layout)
    assert sum(before) == sum(after)
    is_even = max(after) * layout.world_size <= sum(after) * (1 + 1 / TOLERANCE)
    assert is_even or max(after) <= max(before)


@settings(deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 4))
def test_any_slices_are_sharded(data: st.DataObject, world_size: int, block: int) -> None:
    found = data.draw(slices((18, 18), data.draw(st.integers(0, 3))))
    runs = balanced_partition(found, world_size, 18, block, 2 * -(-18 // block)).runs(world_size)
    layout = RunTable(tuple(tuple((run.start, run.length) for run in row) for row in runs))
    assert layout.runs(0, world_size, 18) == runs[0], "the table has checked them"


EVEN = {
    "causal": Balanced(CAUSAL, 64, 4, block=4),
    "causal, within a twentieth": Balanced(CAUSAL, 199, 5, block=1),
    "full, uneven": Balanced(Mask.full(), 64, 2, block=5),
    "a document for each chunk": Balanced(CAUSAL, 64, 4, range(0, 65, 8), block=2),
    "nothing to see": Balanced(CAUSAL, 64, 4, (0,), block=1),
}


@pytest.mark.parametrize("layout", EVEN.values(), ids=list(EVEN))
def test_zigzag_where_that_is_even(layout: Balanced) -> None:
    assert positions_of(layout, layout) == positions_of(ZigZag(), layout)


def test_a_window_is_sharded_contiguously() -> None:
    """As even as zigzag, and half as much travels."""
    layout = Balanced(Mask.sliding(16), 1024, 4)
    assert positions_of(layout, layout) == positions_of(Contiguous(), layout)


DOCUMENTS = {
    "some": ([1, 3, 4, 7, 40, 900, 950, 1000, 4000, 9000, 9500, 12000, 13000, 16384], 4),
    "many": (range(0, 16385, 128), 8),
    "one long": ([100, 200, 9000, 9300, 9400, 9900, 10500, 11300, 12000, 12100, 16000, 16384], 4),
    "one of all": ([16384], 8),
    "few, on more ranks": ([3000, 8000, 9000, 16384], 16),
    "rows that differ": ([[0, 5000, 16384], [0, 16384, 16384], [0, 100, 300]], 4),
}


def schedule_of(ends: Any, world_size: int) -> Schedule:
    return describe_schedule("balanced", CAUSAL, 16384, world_size, ends)


@pytest.mark.parametrize(("ends", "world_size"), DOCUMENTS.values(), ids=list(DOCUMENTS))
def test_documents_are_sharded_evenly(ends: Any, world_size: int) -> None:
    rows = ends if isinstance(ends[0], list) else [0, *ends]
    assert schedule_of(rows, world_size).imbalance <= 1 + 1 / TOLERANCE


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("world_size", [4, 8])
def test_ranks_wait_little_for_lognormal_documents(world_size: int, seed: int) -> None:
    """Their long ones are sharded over neighbours, in the order in which the ring brings keys."""
    chance = random.Random(seed)
    ends = accumulate(round(100 * chance.lognormvariate(0, 1)) + 1 for _ in range(200))
    documents = [0, *takewhile(lambda end: end < 16384, ends), 16384]
    schedule = schedule_of(documents, world_size)
    assert schedule.imbalance <= 1 + 1 / TOLERANCE
    assert schedule.makespan <= 1.4
    assert 4 * sum(schedule.received) < 16384 * (world_size - 1)
    assert sum(schedule.received) <= 1.1 * needed(schedule, documents)


@pytest.mark.parametrize(
    ("seed", "first", "chosen"), [(6, 1.48, 1.0), (15, 1.18, 1.05), (19, 1.44, 1.0)]
)
def test_less_waiting_may_pay_for_more_tokens(seed: int, first: float, chosen: float) -> None:
    """The first partition into blocks that is even lets ranks wait longer than a later one."""
    chance = random.Random(seed)
    ends = accumulate(round(1500 * chance.lognormvariate(0, 2)) + 1 for _ in range(400))
    documents = [0, *takewhile(lambda end: end < 2**18, ends), 2**18]
    layout = Balanced(CAUSAL, 2**18, 8, documents)
    work = AttentionWork(layout._seen)
    found = {}
    for partition in _by_blocks(work, layout.block_length, 8, 2**18):
        makespan, _ = ring_cost(work, partition, 8)
        if 8 * busiest_load(work, partition, 8) <= work.total * (1 + 1 / TOLERANCE):
            found[cost(work, partition, 8)] = round(8 * makespan / work.total, 2)
    assert next(iter(found.values())) == first
    assert found[min(found)] == chosen
    schedule = describe_schedule(layout, CAUSAL, 2**18, 8, documents)
    assert round(schedule.makespan, 2) == chosen


@pytest.mark.parametrize("world_size", [4, 8, 16])
def test_of_a_document_on_all_ranks_moves_what_is_needed(world_size: int) -> None:
    """Early pieces are seen all around the ring, late ones by the next ranks only."""
    documents = [*range(0, 1500, 100), 12786, *range(12800, 16385, 128)]
    schedule = schedule_of(documents, world_size)
    assert schedule.imbalance <= 1 + 1 / TOLERANCE
    assert sum(schedule.received) <= 1.1 * needed(schedule, documents)


def needed(schedule: Schedule, ends: list[int]) -> int:
    """Positions that ranks see and do not hold, from the definition of causal documents."""
    first, total = np.zeros(schedule.seq_len, dtype=int), 0
    for begin, end in pairwise(ends):
        first[begin:end] = begin
    for rank in range(len(schedule.plans)):
        held = schedule.layout.positions(rank, len(schedule.plans), schedule.seq_len)
        last = {first[query]: query for query in held}  # of each document; it sees most
        total += sum(query + 1 - begin for begin, query in last.items()) - len(held)
    return total


UNEVEN = Balanced(CAUSAL, 240, 3, ((0, 10, 160, 240), (0, 3, 4, 200)), block=8)


def test_every_rank_shards_the_same(pool: Pool) -> None:
    """Each in a process of its own, hence with other hash seeds."""
    assert positions_of(UNEVEN, UNEVEN) != positions_of(ZigZag(), UNEVEN)
    assert pool.run(3, runs_of, UNEVEN, UNEVEN) == [runs_of(UNEVEN, UNEVEN)] * 3


def test_boundaries_may_be_a_tensor_or_a_sequence() -> None:
    rows = [list(row) for row in UNEVEN.cu_seqlens]
    for bounds in (rows, torch.tensor(rows), torch.tensor(rows).int()):
        other = replace(UNEVEN, cu_seqlens=bounds)
        assert (other, hash(other)) == (UNEVEN, hash(UNEVEN))
    single = Balanced(CAUSAL, 240, 3, torch.tensor([0, 10, 240]))
    assert single == Balanced(CAUSAL, 240, 3, (0, 0, 10, 240, 240)), "without empty documents"
    assert (
        single == Balanced(CAUSAL, 240, 3, [[0, 10, 240]]) == Balanced(CAUSAL, 240, 3, (0, 10, 240))
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block": 0}, "block must be from 1 to .*, got 0"),
        ({"block": -8}, "block must be from 1 to .*, got -8"),
        ({"cu_seqlens": (0, 241)}, r"at or before the sequence length 240, got \[0, 241\]"),
        ({"cu_seqlens": [[0, 9], [1, 9]]}, r"cu_seqlens must start at 0, .*, got \[1, 9\]"),
        ({"world_size": 0}, "world_size must be from 1 to 65,536, got 0"),
        ({"seq_len": -1}, "seq_len must be from 0 to 1,099,511,627,776, got -1"),
        ({"seq_len": 2**40, "block": 256}, "4,294,967,296 blocks of 256 tokens, at most 8,388,608"),
    ],
    ids=str,
)
def test_refusals(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(UNEVEN, **wrong)


def test_refuses_a_name_for_a_mask() -> None:
    with pytest.raises(TypeError, match=r"mask must be a Mask, such as .*, got 'causal'"):
        Balanced("causal", 16, 2)  # pyrefly: ignore[bad-argument-type]


@pytest.mark.parametrize(("world_size", "seq_len"), [(4, 240), (3, 120)])
def test_shards_no_other_batch(world_size: int, seq_len: int) -> None:
    message = f"for 240 tokens on 3 ranks, it cannot shard {seq_len} tokens over {world_size}; make"
    with pytest.raises(ValueError, match=message):
        UNEVEN.runs(0, world_size, seq_len)


# Work of ranges of queries, and its closed form, against pairs that are counted one by one.

SEQ_LEN = 16


def counted(given: Slices) -> np.ndarray:
    """Pairs that each query sees, over all rows."""
    zeros = np.zeros(SEQ_LEN, dtype=np.int64)
    return sum((shown(table, (SEQ_LEN, SEQ_LEN)).sum(1) for table in given), zeros)


@given(st.data())
def test_areas_of_ranges(data: st.DataObject) -> None:
    found = data.draw(slices((SEQ_LEN, SEQ_LEN), data.draw(st.integers(0, 3))))
    edges = np.array(sorted(data.draw(st.lists(st.integers(0, SEQ_LEN), min_size=2))))
    work, queries = AttentionWork(found), counted(found)
    expected = [queries[begin:end].sum() for begin, end in pairwise(edges)]
    assert work.areas(edges[:-1], edges[1:]).tolist() == expected
    assert work.total == queries.sum()


@given(st.data())
def test_units_see_nothing_of_one_another(data: st.DataObject) -> None:
    found = data.draw(slices((SEQ_LEN, SEQ_LEN), data.draw(st.integers(0, 2))))
    units = AttentionWork(found).units(SEQ_LEN, data.draw(st.integers(1, 6)))
    assert [0, *units.ends] == [*units.begins, SEQ_LEN]
    queries = counted(found)
    numbers = np.repeat(np.arange(len(units.ends)), units.ends - units.begins)
    assert units.areas.tolist() == [queries[numbers == n].sum() for n in range(len(units.ends))]
    for table in found:
        query, key = np.nonzero(shown(table, (SEQ_LEN, SEQ_LEN)))
        assert (numbers[query] == numbers[key]).all()


def documents(*ends: int) -> Slices:
    """Causal ones."""
    bounds = [0, *ends]
    return Slices.of_tables([[(a, b, a, b, UNBOUNDED, 0) for a, b in pairwise(bounds)]])


UNITS = {
    "documents": (documents(5, 7, 16), 1, [5, 7, 16]),
    "short ones that begin in one block": (documents(5, 6, 7, 8, 9, 16), 4, [5, 8, 9, 16]),
    "what no slice covers": (documents(5, 7), 1, [5, 7, 16]),
    "a window that reaches less far than its slice": (
        Slices([(8, 12)], [(0, 12)], [(2, 0)]), 1, [6, 12, 16],
    ),
    "rows that differ": (
        Slices.of_tables([*documents(4, 16), *documents(8)]), 1, [16],
    ),
    "nothing": (Slices.of_tables([[]]), 1, [16]),
}  # fmt: skip


@pytest.mark.parametrize(("given_slices", "block", "ends"), UNITS.values(), ids=list(UNITS))
def test_units(given_slices: Slices, block: int, ends: list[int]) -> None:
    assert AttentionWork(given_slices).units(SEQ_LEN, block).ends.tolist() == ends


@given(st.data())
def test_parts_have_equal_areas(data: st.DataObject) -> None:
    found = data.draw(slices((SEQ_LEN, SEQ_LEN), 1))
    work = AttentionWork(found)
    units = work.units(SEQ_LEN, 1)
    num_parts = np.array([data.draw(st.integers(1, 4)) for _ in units.ends])
    queries = counted(found)
    rows = zip(units.begins, units.ends, units.areas, work.cuts(units, num_parts), strict=True)
    for begin, end, area, edges in rows:
        assert (edges[0], edges[-1]) == (begin, end)
        for part, edge in enumerate(edges[1:-1], 1):
            goal = area * part // (len(edges) - 1)
            assert queries[begin:edge].sum() >= goal, "enough"
            assert edge == begin or queries[begin : edge - 1].sum() < goal, "and no token more"


# The closed form of the cost against plans, and against pairs that are counted one by one.

COST_LEN = 14


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Slices, int, list[int]]:
    """Slices, ranks, and the owner of each position."""
    world_size = draw(st.integers(1, 4))
    owners = [r for r in range(world_size) for _ in range(shard_length(r, world_size, COST_LEN))]
    found = draw(slices((COST_LEN, COST_LEN), draw(st.integers(1, 2)), 5))
    return found, world_size, draw(st.permutations(owners))


def partition_of(owners: list[int]) -> Partition:
    return Partition.of([(at, at + 1, owner) for at, owner in enumerate(owners)])


def num_received(found: Slices, owners: list[int]) -> int:
    """Tokens of one row: any row may need them."""
    pairs = sum(shown(table, (COST_LEN, COST_LEN)) for table in found)
    held = np.array(owners)
    return sum(int((pairs[held == rank].any(0) & (held != rank)).sum()) for rank in set(owners))


def schedule(found: Slices, world_size: int, partition: Partition) -> Schedule:
    """Of the plans, around the ring."""
    runs, seq_len = partition.runs(world_size), int(partition.ends[-1])
    layout = RunTable(tuple(tuple((run.start, run.length) for run in row) for row in runs))
    plans = tuple(
        plan(layout, FULL, rank, world_size, seq_len, strategy="around", slices=found)
        for rank in range(world_size)
    )
    return Schedule(layout, FULL, seq_len, None, plans)


@settings(deadline=None)
@given(sharded())
def test_cost_is_that_of_the_plans(case: tuple[Slices, int, list[int]]) -> None:
    found, world_size, owners = case
    work, partition = AttentionWork(found), partition_of(owners)
    planned = schedule(found, world_size, partition)
    loads = [sum(steps) for steps in planned.areas]
    assert busiest_load(work, partition, world_size) == max(loads)
    travels = TOKEN * len(found) * num_received(found, owners)
    makespan = round(planned.makespan * sum(loads) / world_size)
    assert cost(work, partition, world_size) == world_size * makespan + travels
    with patch.object(costs, "MAX_PAIRS", -1):
        assert cost(work, partition, world_size) == world_size * max(loads) + travels


WAITS = {
    "for whom it sends to": ([(2, 2, 4), (2, 0, 1), (1, 2, 2)], 16 + 8),
    "for whom it receives from": ([(0, 0, 4), (1, 2, 2)], 16 + 8),
    "for nobody, where nothing is sent": ([(2, 2, 4), (1, 0, 1), (1, 2, 2)], 16),
}
"""Three ranks of 4 tokens: who sees whose keys, by how many queries; the makespan, in pairs."""


@pytest.mark.parametrize(("seen", "makespan"), WAITS.values(), ids=list(WAITS))
def test_ranks_wait(seen: list[tuple[int, int, int]], makespan: int) -> None:
    """Around the ring: what comes from two ranks back passes the rank between, a step later."""
    ranges = [((4 * q, 4 * q + count), (4 * k, 4 * k + 4)) for q, k, count in seen]
    found = Slices(*zip(*ranges, strict=True), [(None, None)] * len(ranges))
    viewers, sources, counts = np.array(seen).T
    assert ring_makespan(viewers, sources, 4 * counts, 3) == makespan
    planned = schedule(found, 3, partition_of([0] * 4 + [1] * 4 + [2] * 4))
    assert round(planned.makespan * sum(map(sum, planned.areas)) / 3) == makespan


def test_partition_joins_neighbours() -> None:
    partition = Partition.of([(4, 6, 0), (0, 2, 1), (2, 4, 1), (3, 3, 0)])
    assert [x.tolist() for x in partition] == [[0, 4], [4, 6], [1, 0]]
    assert partition.max_runs == 1
    assert [x.tolist() for x in Partition.of([])] == [[], [], []]
    assert Partition.of([]).max_runs == 0


# Closed forms against pairs that are counted one by one.

SIZES = (12, 15)
"""Queries and keys."""


@given(st.data(), st.integers(0, 3))
def test_pairs_are_those_that_are_shown(data: st.DataObject, num_rows: int) -> None:
    given_slices = data.draw(slices(SIZES, num_rows))
    begin, end = sorted(data.draw(st.tuples(st.integers(0, 14), st.integers(0, 14))))
    expected = sum(int(shown(table, SIZES)[begin:end].sum()) for table in given_slices)
    assert visible_pairs(given_slices, (begin, end)) == expected


@given(st.data())
def test_each_slice_has_a_range_of_its_own(data: st.DataObject) -> None:
    table = data.draw(slices(SIZES, 1)).tables[0]
    ends = st.lists(st.integers(0, 14), min_size=len(table), max_size=len(table))
    begins, ends = (np.array(data.draw(ends), dtype=np.int64) for _ in range(2))
    found = areas(table, begins, ends)
    for row, begin, end, area in zip(table, begins, ends, found, strict=True):
        assert area == shown(row[None], SIZES)[begin:end].sum(), "none if the range is empty"


@pytest.mark.parametrize("bits", [20, 28, 29, 30, 31, 40])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_no_square_overflows(bits: int, num_rows: int) -> None:
    n = 2**bits
    causal = Slices.of_tables([[[0, n, 0, n, UNBOUNDED, 0]]] * num_rows)
    full = Slices.of_tables([[[0, n, 0, n, UNBOUNDED, UNBOUNDED]]] * num_rows)
    assert visible_pairs(causal, (0, n)) == num_rows * n * (n + 1) // 2
    assert visible_pairs(full, (5, 2**40 + 5)) == num_rows * n * (n - 5)
    assert exact_table(causal).dtype == (object if bits > 28 else np.int64)
