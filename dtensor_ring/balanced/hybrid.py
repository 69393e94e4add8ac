"""What layouts cost models in which some layers carry a state along the sequence.

Such layers need neighbouring tokens on each rank, in order. A layout that deals them so leaves the
causal mask of attention uneven; with any other one tokens are dealt anew around these layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dtensor_ring.balanced.balanced import TOKEN, WHOLE, ring_cost
from dtensor_ring.balanced.packing import Partition
from dtensor_ring.balanced.work import Work
from dtensor_ring.planning.all_to_all import exchange_of
from dtensor_ring.planning.layout import Contiguous, Joined, Layout
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.plan import checked_slices
from dtensor_ring.planning.ranges import MAX_RANKS, as_count
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.strategy import Strategy, as_strategy

PAIR = 4096 / TOKEN / (32 * 128)
"""Bytes that travel while a rank computes one pair, by number of its query; see `TOKEN`."""


class Hybrid(NamedTuple):
    """A model with both kinds of layers."""

    stateful: int
    """Layers with a state."""
    attention: int
    """Layers with attention."""
    hidden_size: int
    """Numbers of a token between layers."""
    heads: tuple[int, int] = (32, 8)
    """Of queries, and of keys and values."""
    head_dim: int = 128
    itemsize: int = 2
    """Bytes of a number."""


@dataclass(frozen=True)
class HybridCost:
    """What a layout costs in one forward of one row, in bytes, of all ranks together."""

    layout: str
    relayouts: int
    """That travel to deal tokens anew around layers with a state; backward they do so again."""
    keys: int
    """Of keys and values that ranks see and others hold; a ring passes a few more on."""
    waiting: int
    """That could travel while ranks wait for the one with most of the mask."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.relayouts + self.keys + self.waiting


@dataclass(frozen=True)
class HybridComparison:
    """What each layout costs a hybrid model. Printed, it is a table."""

    hybrid: Hybrid
    seq_len: int
    world_size: int
    rows: tuple[HybridCost, ...]

    @property
    def best(self) -> str:
        """The layout that costs least; of equal ones, that without relayouts."""
        return min(self.rows, key=lambda row: (row.total, row.relayouts)).layout

    def __str__(self) -> str:
        lines = [
            f"{self.hybrid.stateful} layers with a state, {self.hybrid.attention} with attention: "
            f"{self.seq_len} tokens on {self.world_size} ranks, MB of a forward",
            "layout       relayouts  keys and values   waiting     total",
        ]
        for row in self.rows:
            numbers = (x / 1e6 for x in (row.relayouts, row.keys, row.waiting, row.total))
            lines.append("{:<10}{:>12.1f}{:>17.1f}{:>10.1f}{:>10.1f}".format(row.layout, *numbers))
        return "\n".join([*lines, f"least: {self.best}"])


def compare_hybrid_layouts(
    hybrid: Hybrid, mask: Mask, seq_len: int, world_size: int, strategy: str | None = None
) -> HybridComparison:
    """What each layout costs a model with layers that carry a state.

    Args:
        hybrid: its layers, and the sizes of its tensors.
        mask: of layers with attention.
        seq_len: global length, in tokens; it is padded as the layouts need it.
        world_size: ranks of the axis.
        strategy: of attention, `None` for the default; where groups trade tokens for heads, what
            travels between groups and waits for others is counted.

    Raises:
        TypeError: if a number is not an integer.
        ValueError: if a number is out of range, or the strategy does not fit the axis.

    Example:
        >>> hybrid = Hybrid(stateful=3, attention=1, hidden_size=2048)
        >>> [compare_hybrid_layouts(hybrid, Mask.causal(), n, 8).best for n in (4096, 131072)]
        ['contiguous', 'zigzag']
    """
    num_ranks = as_count("world_size", world_size, 1, MAX_RANKS)
    asked = as_count("seq_len", seq_len, 1)
    length = max(layout.padded_length(asked, num_ranks) for layout in WHOLE)
    heads = as_strategy(strategy or Strategy.default, num_ranks).heads
    rows = [_cost(layout, hybrid, mask, length, num_ranks, heads) for layout in WHOLE]
    return HybridComparison(hybrid, length, num_ranks, tuple(rows))


def relayout_tokens(
    layout: Layout, seq_len: int, world_size: int, order: str = Contiguous.name
) -> int:
    """Tokens that change their rank between a layout and the order of layers with a state."""
    found = (
        exchange_of(layout, as_layout(order), 1, rank, world_size, seq_len).sent(1, 1)
        for rank in range(world_size)
    )
    return sum(amount.tokens for sent in found for amount in sent.values())


def _cost(
    layout: Layout, hybrid: Hybrid, mask: Mask, seq_len: int, world_size: int, heads: int
) -> HybridCost:
    """The cost of one layout, where groups of so many ranks share the heads."""
    num_groups = world_size // heads
    work = Work(checked_slices(mask, world_size, (seq_len, seq_len), None))
    joined = layout if heads == 1 else Joined(layout, heads)
    makespan, received = ring_cost(work, Partition.dealt(joined, num_groups, seq_len), num_groups)
    moved = 2 * hybrid.stateful * relayout_tokens(layout, seq_len, world_size)
    token = 2 * hybrid.heads[1] * hybrid.head_dim * hybrid.itemsize
    pair = PAIR * hybrid.heads[0] * hybrid.head_dim
    return HybridCost(
        layout.spec,
        moved * hybrid.hidden_size * hybrid.itemsize,
        hybrid.attention * received * token,
        int(hybrid.attention * (num_groups * makespan - work.total) * pair),
    )
