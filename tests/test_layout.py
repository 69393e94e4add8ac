"""Layouts deal every position once, in the shard sizes of DTensor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dtensor_ring import Balanced, Mask
from dtensor_ring.layout import (
    LAYOUTS,
    Contiguous,
    Layout,
    Run,
    RunTable,
    Striped,
    ZigZag,
    as_layout,
    shard_length,
)

NUM_RUNS = {"contiguous": 1, "striped": 1, "zigzag": 2}  # of equal length, at a padded length


@st.composite
def dealings(draw: st.DrawFn) -> tuple[Layout, int, int]:
    """A layout, a world size, and a length that the layout deals to it."""
    layout = draw(st.sampled_from(list(LAYOUTS.values())))
    world_size, seq_len = draw(st.integers(1, 6)), draw(st.integers(0, 60))
    if isinstance(layout, Striped):
        seq_len -= seq_len % world_size
    return layout, world_size, seq_len


def positions(layout: Layout, world_size: int, seq_len: int) -> list[list[int]]:
    return [layout.positions(rank, world_size, seq_len) for rank in range(world_size)]


@pytest.mark.parametrize(
    ("layout", "world_size", "seq_len", "expected"),
    [
        (Contiguous(), 2, 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (Contiguous(), 4, 5, [[0, 1], [2, 3], [4], []]),
        (Striped(), 3, 6, [[0, 3], [1, 4], [2, 5]]),
        (ZigZag(), 2, 8, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (ZigZag(), 3, 9, [[0, 1, 8], [2, 3, 7], [4, 5, 6]]),
        (ZigZag(), 4, 5, [[0, 4], [1, 3], [2], []]),
        (ZigZag(), 1, 3, [[0, 1, 2]]),
        (ZigZag(), 2, 0, [[], []]),
        (RunTable((((0, 2), (6, 2)), ((2, 4), (0, 0)))), 2, 8, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (RunTable((((3, 2),), ((0, 1), (2, 1)), ((1, 1),))), 3, 5, [[3, 4], [0, 2], [1]]),
        (RunTable(((), ())), 2, 0, [[], []]),
    ],
)
def test_positions(
    layout: Layout, world_size: int, seq_len: int, expected: list[list[int]]
) -> None:
    assert positions(layout, world_size, seq_len) == expected


@given(dealings())
def test_positions_partition_the_sequence_as_torch_chunk_does(
    dealing: tuple[Layout, int, int],
) -> None:
    _, world_size, seq_len = dealing
    dealt = positions(*dealing)
    assert sorted(chain.from_iterable(dealt)) == list(range(seq_len))
    sizes = [len(chunk) for chunk in torch.arange(seq_len).chunk(world_size)]
    sizes += [0] * (world_size - len(sizes))
    assert [len(shard) for shard in dealt] == sizes
    assert [shard_length(rank, world_size, seq_len) for rank in range(world_size)] == sizes


@given(dealings())
def test_no_run_is_empty(dealing: tuple[Layout, int, int]) -> None:
    layout, world_size, seq_len = dealing
    for rank in range(world_size):
        assert all(run.length > 0 for run in layout.runs(rank, world_size, seq_len))


@given(
    run=st.builds(Run, st.integers(0, 30), st.integers(1, 12), st.integers(1, 5)),
    begin=st.integers(0, 100),
    length=st.integers(0, 40),
)
def test_run_indices(run: Run, begin: int, length: int) -> None:
    inside = [i for i in range(run.length) if run.position(i) in range(begin, begin + length)]
    assert list(range(*run.indices(begin, begin + length))) == inside


@pytest.mark.parametrize("name", LAYOUTS)
@given(seq_len=st.integers(0, 60), world_size=st.integers(1, 6))
def test_padded_length_is_the_next_even_one(name: str, seq_len: int, world_size: int) -> None:
    padded = LAYOUTS[name].padded_length(seq_len, world_size)
    num_chunks = NUM_RUNS[name] * world_size
    assert padded == next(n for n in range(seq_len, 200) if n % num_chunks == 0)
    runs = [LAYOUTS[name].runs(rank, world_size, padded) for rank in range(world_size)]
    lengths = [run.length for shard in runs for run in shard]
    assert lengths == [padded // num_chunks] * (num_chunks if padded else 0)


def test_striped_says_which_length_to_pad_to() -> None:
    message = (
        "the striped layout needs a sequence length that is a multiple of the 4 ranks of the "
        "ring, got 10; pad it to 12 tokens or use zigzag or contiguous"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Striped().runs(0, 4, 10)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ((((0, 2),), ((3, 2),)), "runs must hold each position once, not so position 2"),  # a gap
        ((((1, 2),), ((3, 2),)), "each position once, not so position 0"),
        ((((0, 3),), ((2, 3),)), "each position once, not so position 3"),  # an overlap
        ((((0, 2),), ((0, 2),)), "each position once, not so position 2"),
        ((((-2, 4),),), "each position once, not so position 0"),
        ((((0, 4), (4, -2)),), "each position once, not so position 4"),
        ((((2, 1), (0, 1)), ((1, 1),)), "runs of a rank must be in ascending order"),
        ((((0, 3),), ((3, 5),)), r"runs must give the ranks \[4, 4\] tokens, got \[3, 5\]"),
        ((((0, 1),), ((1, 2),)), r"runs must give the ranks \[2, 1\] tokens, got \[1, 2\]"),
        ((((0, 2),), ()), r"runs must give the ranks \[1, 1\] tokens, got \[2, 0\]"),
    ],
)
def test_runs_that_deal_no_sequence(
    table: tuple[tuple[tuple[int, int], ...], ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RunTable(table)


@pytest.mark.parametrize(("world_size", "seq_len"), [(3, 4), (1, 4), (2, 5), (2, 2)])
def test_runs_of_another_sequence_or_ring(world_size: int, seq_len: int) -> None:
    message = f"runs deal 4 tokens to 2 ranks, not {seq_len} tokens to {world_size}; make a layout"
    with pytest.raises(ValueError, match=message):
        RunTable((((0, 2),), ((2, 2),))).runs(0, world_size, seq_len)


BELONGS_TO_BATCH = "the balanced layout belongs to one batch, so it is passed with it"


@dataclass(frozen=True)
class Impostor(Contiguous):
    """Not a layout of ours, in spite of its name."""

    shift: int = 1


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_as_layout(layout: Layout) -> None:
    assert as_layout(layout) == as_layout(layout.name) == layout


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ("ring", ValueError, "unknown layout 'ring'; known layouts: contiguous, striped, zigzag"),
        (Impostor(), ValueError, r"unknown layout Impostor\(shift=1\); known layouts: contiguous,"),
        ("balanced", ValueError, BELONGS_TO_BATCH),
        (Balanced(Mask.causal(), 8, 2), ValueError, BELONGS_TO_BATCH),
        (RunTable(()), ValueError, BELONGS_TO_BATCH),
        (2, TypeError, "a layout is a Layout or its name, got int"),
        (None, TypeError, "a layout is a Layout or its name, got NoneType"),
    ],
)
def test_as_layout_refuses(wrong: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        as_layout(wrong)  # type: ignore[arg-type]
