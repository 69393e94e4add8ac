"""Random attentions over rings: their masks, documents, slices, layouts and options."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from dtensor_ring import Balanced, Mask
from dtensor_ring.planning.route import ROUTES
from dtensor_ring.planning.run_table import RunTable, as_layout
from dtensor_ring.transport.transport import TransferPolicy
from tests.rings import Case, Ring
from tests.slices import slices

LONGEST = 200
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 4e-2}


def bounds_of(seq_len: int, num_ends: int) -> st.SearchStrategy[tuple[int, ...]]:
    ends = st.lists(st.integers(0, seq_len), min_size=num_ends, max_size=num_ends)
    return ends.map(lambda ends: (0, *sorted(ends)))


@st.composite
def documents_of(draw: st.DrawFn, seq_len: int, batch: int, num_ends: int) -> tuple:
    """For the whole batch, or by row."""
    num_rows = draw(st.sampled_from(sorted({1, batch})))
    return tuple(draw(bounds_of(seq_len, num_ends)) for _ in range(num_rows))


@st.composite
def masks(draw: st.DrawFn) -> Mask:
    bound = st.none() | st.integers(0, 10) | st.integers(0, LONGEST)
    right = draw(st.sampled_from([0, 0, None]) | bound)
    cut = draw(st.sampled_from(["", "", "chunk", "prefix"]))
    counts = {cut: draw(st.integers(1, 40))} if cut else {}
    return Mask(draw(bound), right, **counts)


@st.composite
def turns(draw: st.DrawFn, ring: Ring) -> Ring:
    """The queries from some position on, against all keys; both are on any ranks."""
    begin = draw(st.integers(0, ring.seq_len - 1))
    keys = draw(run_tables(ring.world_size, 0, ring.seq_len))
    queries = draw(run_tables(ring.world_size, begin, ring.seq_len))
    return replace(ring, layout=queries, key_layout=keys, begin=begin)


@st.composite
def run_tables(draw: st.DrawFn, world_size: int, begin: int, end: int) -> RunTable:
    """Positions in a few runs, on any ranks."""
    cuts = draw(st.lists(st.integers(begin, end), max_size=8))
    edges = sorted({begin, *cuts, end})
    owners = [draw(st.integers(0, world_size - 1)) for _ in edges[1:]]
    owned = list(zip(owners, pairwise(edges), strict=True))
    return RunTable(
        [[(a, b - a) for owner, (a, b) in owned if owner == rank] for rank in range(world_size)]
    )


@st.composite
def rings(draw: st.DrawFn, layout: str, world_size: int, batch: int) -> Ring:
    """A ring of that layout; four of five have slices, one in twenty is cross attention."""
    found = draw(seen_by_rings(layout, world_size, batch))
    return replace(found, strategy=draw(st.sampled_from([*ROUTES, *among_groups(world_size)])))


def among_groups(world_size: int) -> list[str]:
    """Strategies that exchange tokens for heads: over all ranks, or groups of each size."""
    sizes = [n for n in range(2, world_size) if world_size % n == 0]
    return ["ulysses", *(f"ulysses:{n}+{way}" for n in sizes for way in ("ring", "all_gather"))]


@st.composite
def seen_by_rings(draw: st.DrawFn, layout: str, world_size: int, batch: int) -> Ring:
    lengths, kind = st.integers(1, LONGEST), draw(st.sampled_from(range(20)))
    if layout == "striped":
        lengths = st.integers(1, LONGEST // world_size).map(lambda n: n * world_size)
    seq_len, num_ends = draw(lengths), draw(st.integers(1, 8))
    block = draw(st.integers(1, 20)) if layout == Balanced.name else None
    if kind < 16:
        num_rows = draw(st.sampled_from(sorted({1, batch})))
        given = draw(slices((seq_len, seq_len), num_rows, max_size=40))
        sharded = Balanced(None, seq_len, world_size, None, block, given) if block else layout
        return Ring(as_layout(sharded), world_size, seq_len, Mask.full(), slices=given)
    documents = draw(st.none() | documents_of(seq_len, batch, num_ends))
    if kind < 19 or block:
        mask = draw(masks())
        sharded = Balanced(mask, seq_len, world_size, documents, block) if block else layout
        return Ring(as_layout(sharded), world_size, seq_len, mask, documents)
    key_seq_len = draw(lengths)
    key_documents = documents and draw(documents_of(key_seq_len, batch, num_ends))
    keys = key_seq_len, key_documents
    return Ring(as_layout(layout), world_size, seq_len, Mask.full(), documents, *keys)


@st.composite
def cases(draw: st.DrawFn, layout: str, world_size: int, with_turns: bool) -> Case:
    few, many = [(2, 2), (4, 2), (3, 1)], [(8, 4), (9, 3)]
    heads = draw(st.sampled_from(few if world_size <= 4 else few + many))
    batch = draw(st.integers(1, 3))
    options = {
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.5])),
        "extent": draw(st.sampled_from([0, 0, 0, 1, 6, 40])),
        "grad_lse": draw(st.sampled_from([False, False, True])),
        "head_dims": draw(st.sampled_from([(8, 8), (8, 8), (8, 4), (4, 12)])),
    }
    special = options["softcap"] or options["extent"] or len(set(options["head_dims"])) > 1
    ring = draw(rings(layout, world_size, batch))
    if with_turns and ring.key_seq_len is None and draw(st.integers(0, 3)) == 0:
        ring = draw(turns(ring))
    sinks = st.lists(st.floats(-3, 3, width=32), min_size=heads[0], max_size=heads[0])
    dtype = draw(st.sampled_from(list(TOLERANCES)))
    return Case(
        ring,
        dtype,
        heads,
        batch=batch,
        policy=TransferPolicy(
            kv_dtype=draw(st.sampled_from([None, None, None, "int8", "fp8"])),
            grad_dtype=draw(st.sampled_from([torch.float32, dtype])),
            num_parts=draw(st.sampled_from([None, 1, 3, 8])),
        ),
        kernel=draw(st.sampled_from([None, "reference"] + ([] if special else ["cpu_flash"]))),
        sinks=tuple(draw(st.just([]) | sinks)),
        **options,
    )


def examples(number: int) -> int:
    """So many of a hypothesis test with `--all-cases`, and half as many without."""
    return number * settings().max_examples // 100


def different(
    strategy: st.SearchStrategy[Case], wanted: int, seed: int | None = None
) -> list[Case]:
    """That many different ones: they go to the workers in batches.

    Args:
        strategy: draws one.
        wanted: how many.
        seed: another one draws others; without one they are the same in every run.
    """
    found: dict[Case, None] = {}

    @settings(
        max_examples=wanted + wanted // 2,  # hypothesis repeats some
        deadline=None,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(case: Case) -> None:
        found[case] = None

    draw = collect if seed is None else seeded(seed)(collect)
    draw()
    assert len(found) >= wanted, f"{len(found)} different ones, not {wanted}: take another seed"
    return list(found)[:wanted]
