"""The grid of blocks and the tree over it."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from dtensor_ring import Contiguous, Mask, Striped, WholeBlocks, ZigZag
from dtensor_ring.planning.block_order import Tree, block_of, has_whole_blocks, nodes_of
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.plan import plan


@pytest.mark.parametrize("leaves", [[0], [5], [0, 1, 2], [1, 3, 4, 9], list(range(16))])
def test_a_tree_joins_alike_whatever_comes_first(leaves: list[int]) -> None:
    chance, found = Random(0), set()
    for _ in range(20):
        order = chance.sample(leaves, len(leaves))
        tree: Tree[str] = Tree(leaves, lambda first, second: f"({first} {second})")
        for leaf in order:
            tree.add((0, leaf), str(leaf))
        found.add(tree.result)
    assert len(found) == 1


@pytest.mark.parametrize("num_parts", [1, 2, 3, 5])
def test_nodes_of_parts_join_to_the_whole(num_parts: int) -> None:
    leaves = [0, 1, 2, 4, 5, 8, 9, 10, 11, 13]
    whole: Tree[str] = Tree(leaves, lambda first, second: f"({first} {second})")
    for leaf in leaves:
        whole.add((0, leaf), str(leaf))
    joined: Tree[str] = Tree(leaves, lambda first, second: f"({first} {second})")
    for number in range(num_parts):
        own = leaves[number::num_parts]
        part: Tree[str] = Tree(leaves, lambda first, second: f"({first} {second})")
        for leaf in own:
            part.add((0, leaf), str(leaf))
        assert sorted(part.kept) == nodes_of(own, leaves)
        for node, value in part.kept.items():
            joined.add(node, value)
    assert joined.result == whole.result


def test_blocks_depend_on_the_length_alone() -> None:
    assert [block_of([n]) for n in (1, 255, 256, 512, 1 << 14, 1 << 16, 1 << 24)] == [
        *(16, 16, 16, 32, 1024, 4096, 4096)
    ]


CUT: list[tuple[Layout, int, bool]] = [
    (Contiguous(), 64, True),
    (Contiguous(), 60, False),
    (ZigZag(), 64, True),
    (ZigZag(), 48, False),
    (Striped(), 64, False),
    (WholeBlocks(8), 61, True),
    (WholeBlocks(16), 61, True),
    (WholeBlocks(4), 52, False),
]


@pytest.mark.parametrize(("layout", "seq_len", "is_whole"), CUT)
def test_shards_of_whole_blocks(layout: Layout, seq_len: int, is_whole: bool) -> None:
    assert has_whole_blocks(layout, 4, seq_len, 8) == is_whole
    if not is_whole:
        with pytest.raises(ValueError, match="needs shards of whole blocks of 8 tokens"):
            [plan(layout, Mask.causal(), rank, 4, seq_len, block=8) for rank in range(4)]


def test_whole_blocks_are_dealt_once() -> None:
    for case in product([0, 1, 7, 8, 9, 61, 64, 100], [1, 2, 3, 4, 8]):
        _check_dealt(*case)


def _check_dealt(seq_len: int, world_size: int) -> None:
    layout = WholeBlocks(8)
    held = [layout.positions(rank, world_size, seq_len) for rank in range(world_size)]
    assert sorted(x for own in held for x in own) == list(range(seq_len))
    owners = {x // 8: rank for rank, own in enumerate(held) for x in own}
    assert all(owners[x // 8] == rank for rank, own in enumerate(held) for x in own)
    padded = layout.padded_length(seq_len, world_size)
    assert len({len(layout.positions(x, world_size, padded)) for x in range(world_size)}) == 1
    dealt = layout.dealt_length(seq_len, world_size)
    lengths = range(seq_len, dealt)
    assert all(layout.positions(x, world_size, dealt) for x in range(world_size))
    assert not any(all(layout.runs(x, world_size, n) for x in range(world_size)) for n in lengths)


@pytest.mark.parametrize("strategy", ["ring", "around", "direct", "all_gather"])
@pytest.mark.parametrize("mask", [Mask.causal(), Mask.full(), Mask.sliding(11)])
def test_ranks_agree_on_what_they_send(strategy: str, mask: Mask) -> None:
    layout, bounds = WholeBlocks(8), None
    plans = [plan(layout, mask, x, 3, 100, bounds, strategy=strategy, block=8) for x in range(3)]
    for one in plans:
        assert one.order is not None
        for number, hop in enumerate(one.sums):
            for transfer in hop.sends:
                there = plans[transfer.peer]
                assert there.order is not None
                (received,) = there.sums[number].receives
                assert (received.peer, received.cols) == (one.rank, transfer.cols)
                assert there.order.arriving[number].parts == one.order.departing[number].parts
    # The pieces of all ranks are those of one rank, each once.
    alone = plan(Contiguous(), mask, 0, 1, 100, bounds, block=8)
    assert alone.order is not None
    pairs = sorted(piece.blocks for piece in alone.order.pieces[0])
    found = [x.blocks for one in plans if one.order for step in one.order.pieces for x in step]
    assert sorted(found) == pairs
