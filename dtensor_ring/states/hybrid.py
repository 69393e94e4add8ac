"""The cost of layouts in models where some layers carry a state along the sequence.

Layers with a state need tokens in the order of the sequence. A contiguous layout makes the causal
mask of attention uneven. In another layout tokens move before and after these layers; or they stay,
where the shards of ranks are two runs each, whose maps are more bytes than those of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dtensor_ring.all_to_all.plan import all_to_all_plan
from dtensor_ring.balanced.balanced import TOKEN, WHOLE, ring_cost
from dtensor_ring.balanced.work import AttentionWork, Partition
from dtensor_ring.planning.layout import Contiguous, Joined, Layout
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.plan import checked_slices
from dtensor_ring.planning.ranges import MAX_RANKS, as_count
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.strategy import Strategy, as_strategy
from dtensor_ring.states.plan import num_sent, owners_of


class Hybrid(NamedTuple):
    """A model with both kinds of layers.

    Attributes:
        stateful: number of layers with a state.
        attention: number of layers with attention.
        hidden_size: size of the hidden state of a token.
        heads: numbers of query heads, and of key and value heads.
        head_dim: size of a head.
        itemsize: size of a number, in bytes.
        maps: bytes of a row of the maps of all layers with a state, see `StateMap`: those of
            recurrences, and those without decay and matrix, of convolutions. `None` if they are
            unknown; then they are not counted, and tokens always move.
    """

    stateful: int
    attention: int
    hidden_size: int
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    itemsize: int = 2
    maps: tuple[int, int] | None = None


@dataclass(frozen=True)
class HybridCost:
    """The cost of a layout in one forward pass of one row, in bytes, summed over all ranks.

    Attributes:
        layout: the spec of the layout.
        relayouts: bytes sent to change the layout around layers with a state. The backward pass
            sends them again, and the next ones.
        states: bytes of the maps that these layers send.
        keys: bytes of keys and values that ranks see on other ranks. A ring forwards a few more.
        waiting: bytes that could be sent while ranks wait for the one with the most work.
    """

    layout: str
    relayouts: int
    states: int
    keys: int
    waiting: int

    @property
    def total(self) -> int:
        """The sum of the costs, in bytes."""
        return self.relayouts + self.states + self.keys + self.waiting


@dataclass(frozen=True)
class HybridComparison:
    """The cost of each layout in a hybrid model. `str` makes a table of it."""

    hybrid: Hybrid
    seq_len: int
    world_size: int
    rows: tuple[HybridCost, ...]

    @property
    def best(self) -> str:
        """The layout of the least cost; a tie goes to the one with fewer bytes of relayouts."""
        return min(self.rows, key=lambda row: (row.total, row.relayouts)).layout

    def __str__(self) -> str:
        lines = [
            f"{self.hybrid.stateful} layers with a state, {self.hybrid.attention} with attention: "
            f"{self.seq_len} tokens on {self.world_size} ranks, MB of a forward",
            "layout       relayouts    states  keys and values   waiting     total",
        ]
        for row in self.rows:
            counts = row.relayouts, row.states, row.keys, row.waiting, row.total
            relayouts, states, keys, waiting, total = (x / 1e6 for x in counts)
            lines.append(
                f"{row.layout:<10}{relayouts:>12.1f}{states:>10.1f}{keys:>17.1f}{waiting:>10.1f}"
                f"{total:>10.1f}"
            )
        return "\n".join([*lines, f"least: {self.best}"])


def compare_hybrid_layouts(
    hybrid: Hybrid, mask: Mask, seq_len: int, world_size: int, strategy: str | None = None
) -> HybridComparison:
    """Compare the cost of layouts in a model with layers that carry a state.

    Args:
        hybrid: the layers of the model, and the sizes of its tensors.
        mask: the mask of the attention.
        seq_len: global length, in tokens; it is padded as the layouts need it.
        world_size: number of ranks of the axis.
        strategy: the strategy of the attention, `None` for the default. With an all-to-all, only
            transfers and waiting between groups are counted.

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
    # One length for all, or a layout that pads less would seem to cost less.
    length = max(layout.padded_length(asked, num_ranks) for layout in WHOLE)
    heads = as_strategy(strategy or Strategy.default, num_ranks).heads
    rows = [_cost(layout, hybrid, mask, length, num_ranks, heads) for layout in WHOLE]
    return HybridComparison(hybrid, length, num_ranks, tuple(rows))


def relayout_tokens(
    layout: Layout, seq_len: int, world_size: int, order: str = Contiguous.name
) -> int:
    """Return the number of tokens that move between a layout and the order of stateful layers."""
    plans = (
        all_to_all_plan(layout, as_layout(order), 1, rank, world_size, seq_len)
        for rank in range(world_size)
    )
    return sum(len(x.cols) for plan in plans for x in plan.sends if x.peer != plan.rank)


def stays_from(hybrid: Hybrid, layout: Layout, world_size: int) -> int | None:
    """Return the length from which on tokens of a layout stay where they are in layers with states.

    Shards of two runs of the sequence have two maps, which are more bytes than one, but tokens need
    not move. One document must fill a row.

    Args:
        hybrid: the layers of the model, and the sizes of its tensors.
        layout: the layout of the attention.
        world_size: number of ranks of the axis.

    Returns:
        The number of tokens of a row on all ranks; `None` where tokens always move, or need not.

    Example:
        >>> maps = 36 * 4 * 2 * 32 * 128 * 128, 36 * 4 * 3 * 8192  # of Qwen3-Next
        >>> stays_from(Hybrid(36, 12, 2048, maps=maps), as_layout("zigzag"), 4)
        8240
    """
    if hybrid.maps is None or world_size == 1 or not hybrid.stateful:
        return None
    try:
        owners = owners_of(layout, world_size, 2)
    except ValueError:  # its shards are not two runs
        return None
    step = layout.padded_length(1, world_size)
    moved = _moved(hybrid, layout, step, world_size)
    more = _of_maps(hybrid, owners) - _of_maps(hybrid, range(world_size))
    # Bytes of moved tokens grow with the length, and bytes of maps do not.
    return max(1, -(-more // moved)) * step if moved else None


def _moved(hybrid: Hybrid, layout: Layout, seq_len: int, world_size: int) -> int:
    """Return the bytes of tokens that change their rank before and after layers with a state."""
    tokens = relayout_tokens(layout, seq_len, world_size)
    # Twice: tokens move before each of these layers, and back after it.
    return 2 * hybrid.stateful * tokens * hybrid.hidden_size * hybrid.itemsize


def _of_maps(hybrid: Hybrid, owners: Sequence[int]) -> int:
    """Return the bytes of maps that ranks send, given the rank of each."""
    recurrences, columns = hybrid.maps or (0, 0)
    return recurrences * num_sent(owners, False) + columns * num_sent(owners, True)


# Bytes that travel while a rank computes one pair, per number in its query; see `TOKEN`.
PAIR = 4096 / TOKEN / (32 * 128)


def _cost(
    layout: Layout, hybrid: Hybrid, mask: Mask, seq_len: int, world_size: int, heads: int
) -> HybridCost:
    """Return the cost of one layout, with an all-to-all within groups of `heads` ranks."""
    num_groups = world_size // heads
    work = AttentionWork(checked_slices(mask, world_size, (seq_len, seq_len), None))
    joined = layout if heads == 1 else Joined(layout, heads)
    makespan, received = ring_cost(
        work, Partition.of_layout(joined, num_groups, seq_len), num_groups
    )
    shortest = stays_from(hybrid, layout, world_size)
    # From this length on, the maps of two runs are fewer bytes than tokens that move.
    stays = shortest is not None and seq_len >= shortest
    owners = owners_of(layout, world_size, 2) if stays else range(world_size)
    token = 2 * hybrid.heads[1] * hybrid.head_dim * hybrid.itemsize
    pair = PAIR * hybrid.heads[0] * hybrid.head_dim
    # In `makespan` the group with the most work computes, and the others wait for it.
    return HybridCost(
        layout.spec,
        0 if stays else _moved(hybrid, layout, seq_len, world_size),
        _of_maps(hybrid, owners),
        hybrid.attention * received * token,
        int(hybrid.attention * (num_groups * makespan - work.total) * pair),
    )
