"""The order of maps in a scan over ranks, and which of them go where in which round.

The maps of all ranks have *places* 0, 1, 2, ... in the order of the tokens that they belong to. The
*owner* of a place is the rank that has its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtensor_ring.planning.layout import Layout

# Up to this many ranks each sends its maps to all that need them, in one round. With more, rounds
# by steps that double send fewer bytes: about log2(W) maps of a rank in place of W / 2.
MAX_AT_ONCE = 8


def owners_of(layout: Layout, world_size: int, num_maps: int) -> tuple[int, ...]:
    """Return the owner of each place where each rank has a map for each of its runs.

    Raises:
        ValueError: if the runs of the layout are more or fewer, or depend on the length.

    >>> from dtensor_ring.planning.layout import Contiguous, ZigZag
    >>> owners_of(Contiguous(), 3, 1), owners_of(ZigZag(), 3, 2)
    ((0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    length = world_size * num_maps
    if not layout.per_batch and not layout.parameters:
        one, two = (_owners(layout, world_size, x) for x in (length, 2 * length))
        # In a longer sequence each place has more tokens, one after another.
        if two == [owner for owner in one for _ in range(2)]:
            return tuple(one)
    raise ValueError(
        f"in the layout {layout.spec!r} the tokens of a rank are not {num_maps} runs of the "
        "sequence, whatever its length; give one map for each run of a layout whose shards are one "
        "or two runs, or bring tokens into such a layout by relayout"
    )


def _owners(layout: Layout, world_size: int, seq_len: int) -> list[int]:
    """Return the rank of each position."""
    found = [0] * seq_len
    for rank in range(world_size):
        for position in layout.positions(rank, world_size, seq_len):
            found[position] = rank
    return found


def num_sent_at_once(owners: Sequence[int], rank: int, peer: int) -> int:
    """Return how many of a rank's maps, from its first on, a peer needs for its own places.

    >>> [num_sent_at_once((0, 1, 2, 2, 1, 0), 1, peer) for peer in (0, 2)]
    [2, 1]
    """
    last = max(place for place, owner in enumerate(owners) if owner == peer)
    return sum(owner == rank for owner in owners[:last])


def num_sent(owners: Sequence[int], is_zero: bool) -> int:
    """Return how many maps travel between ranks in a scan, of all ranks together.

    Args:
        owners: the rank of each place.
        is_zero: whether nothing is left of a state before the tokens, as in convolutions.

    >>> num_sent((0, 1, 2), False), num_sent((0, 1, 2, 2, 1, 0), False)
    (3, 9)
    """
    size, num_places = max(owners) + 1, len(owners)
    if size <= MAX_AT_ONCE and not is_zero:
        pairs = ((x, y) for x in range(size) for y in range(size) if x != y)
        return sum(num_sent_at_once(owners, rank, peer) for rank, peer in pairs)
    steps = steps_of(2 if is_zero else num_places)
    return sum(
        # A map of the same rank is not sent.
        owners[place - step] != owners[place]
        for number, step in enumerate(steps)
        for place in range(step + (number > 0), num_places)
    )


def steps_of(num_places: int) -> list[int]:
    """Return by how many places maps travel in each round where steps double.

    The first round brings each place the map of the one before it. Each later round joins the maps
    that a place has with those that an earlier place has.

    >>> steps_of(9), steps_of(2)
    ([1, 1, 2, 4], [1])
    """
    # How many maps before its own a place has joined so far; it doubles from round to round.
    # Of six places, what the last one knows after each round, by the numbers of their maps:
    #     round  0  1   2     3
    #     step   1  1   2     4
    #     maps   4  34  1234  01234
    steps, covered = [1], 1
    while covered < num_places - 1:
        steps.append(covered)
        covered *= 2
    return steps
