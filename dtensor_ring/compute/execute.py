"""Runs the launches of a step through a block kernel.

Flash attention 2, and the backward of 3, start the same number of blocks for each segment: the
number that the longest one needs. A block without rows ends at once, but thousands of such blocks
take longer than another launch. So long and short segments go into separate launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from dtensor_ring.compute.accumulate import Partials, RunningOutput
from dtensor_ring.compute.changing import changing_launches
from dtensor_ring.compute.dropout import Dropout
from dtensor_ring.compute.kernels.kernel import Gradients, Kernel, Launch, Saved, Scores, Segments
from dtensor_ring.compute.lags import Lags
from dtensor_ring.compute.memory import Region, box_region, cols_of, part_of, parts_of, rows_of
from dtensor_ring.compute.trace import Label
from dtensor_ring.compute.whole_step import whole_step
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.ranges import Span, length
from dtensor_ring.planning.tile import CAUSAL, FULL, Tile


def forward_step(
    step: Step,
    query: Tensor,
    kv: Pair,
    running: RunningOutput,
    kernel: Kernel,
    scores: Scores,
    label: Label,
    joins_tiles: bool = True,
    in_flight: bool = False,
    dropout: Dropout | None = None,
    lags: Lags | None = None,
) -> None:
    """Add the attention over the keys and values of a step to `running`.

    Args:
        step: the step whose tiles are computed.
        query: local queries `(B, N, L, H)`.
        kv: resident keys and values `(B, Nkv, C, H)` and `(B, Nkv, C, Hv)`.
        running: the running result of the local queries.
        kernel: the block kernel.
        scores: how a query scores a key.
        label: names this step in a profile.
        joins_tiles: whether tiles may be joined to one launch; this may copy keys, and takes the
            host longer at the first call of a step.
        in_flight: whether messages are in flight during the step.
        dropout: the weights that are dropped, of all queries and all resident keys.
        lags: the positions of all queries and all resident keys, if queries have a bias.
    """
    joins_tiles = joins_tiles and lags is None
    for launch in launches_of(step, query, kv[0], kernel, joins_tiles, in_flight):
        running.make_room(label)
        with label("tile"):
            launch = launch if dropout is None else _dropping(launch, dropout)
            launch = launch if lags is None else _biased(launch, lags)
            out, lse = _forward(launch, query, kv, kernel, scores)
        running.add(launch.rows, out, lse)


# Cost of a launch, in blocks of one head. An estimate: with 32 heads about 10 us.
LAUNCH = 512


@dataclass(frozen=True, slots=True)
class Group:
    """Segments that form one launch.

    Attributes:
        span: range of the links that the segments come from.
        num_segments: number of segments, from links and from the gaps between them.
        longest: blocks of the longest segment.
    """

    span: Span
    num_segments: int
    longest: int

    @property
    def cost(self) -> int:
        """Time of the launch, in blocks of one head."""
        return LAUNCH + self.num_segments * self.longest

    def joined(self, other: Group, gap: tuple[int, int]) -> Group:
        """Return this group joined with the next one and the gap (segments, blocks) between."""
        return Group(
            (self.span[0], other.span[1]),
            self.num_segments + gap[0] + other.num_segments,
            max(self.longest, gap[1], other.longest),
        )


# Tokens of a block.
BLOCK = 128


def num_blocks(num_tokens: int) -> int:
    """Return the number of blocks that hold `num_tokens`."""
    return -(-num_tokens // BLOCK)


def cut(links: Sequence[int], gaps: Sequence[tuple[int, int]]) -> list[Span]:
    """Cut a chain of links into ranges; each range becomes one launch.

    Args:
        links: blocks of each link's segment.
        gaps: for each pair of neighbouring links, the number of segments between them, and the
            blocks of the longest of these.

    >>> cut([32] + [1] * 100 + [40], [(0, 0)] * 101)
    [(0, 1), (1, 101), (101, 102)]
    """
    groups = [Group((i, i + 1), 1, longest) for i, longest in enumerate(links)]
    level, most = 1, max((*links, *(longest for _, longest in gaps)), default=0)
    # Join short segments first: a single short one would join a long one to save its launch.
    # The last level is at least `most`, so no group is left out, after some log2(most) passes.
    while level < 2 * most:
        groups = _join_neighbours(groups, gaps, level)
        level *= 2
    return [group.span for group in groups]


def _join_neighbours(
    groups: list[Group], gaps: Sequence[tuple[int, int]], level: int
) -> list[Group]:
    """Join neighbours whose segments have at most `level` blocks, where this lowers the cost."""
    joined_groups: list[Group] = []
    for group in groups:
        # A join changes what a join with the group before it costs, so that one is asked again.
        while joined_groups:
            candidate = joined_groups[-1].joined(group, gaps[group.span[0] - 1])
            if candidate.longest > level or candidate.cost > joined_groups[-1].cost + group.cost:
                break
            joined_groups.pop()
            group = candidate
        joined_groups.append(group)
    return joined_groups


@dataclass(frozen=True)
class BoundingBox:
    """A bounding box of batch rows and tokens, which a kernel sees as one dimension.

    Attributes:
        batches: range of batch rows.
        tokens: range of tokens in each of these rows.
        batch_size: number of batch rows of the whole tensor.
    """

    batches: Span
    tokens: Span
    batch_size: int

    @property
    def region(self) -> Region:
        """The box as an index of `(B, N, L)`."""
        return box_region(self.batches, self.tokens, self.batch_size)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all batch rows of the box."""
        return length(self.batches) * length(self.tokens)

    def index_of(self, batch: int, token: int) -> int:
        """Return the place of a token in the flattened box."""
        return (batch - self.batches[0]) * length(self.tokens) + token - self.tokens[0]


def bounding_box(
    spans: Sequence[tuple[int, Span]], batch_size: int, num_tokens: int
) -> BoundingBox:
    """Return the bounding box of `(batch row, tokens)` pairs, which are in ascending order.

    >>> bounding_box([(1, (3, 4)), (1, (6, 9))], 2, 10).tokens
    (3, 9)
    >>> bounding_box([(0, (3, 4)), (1, (6, 9))], 2, 10).tokens
    (0, 10)
    """
    (first, (start, _)), (last, (_, end)) = spans[0], spans[-1]
    # A box of several batch rows is one dimension without a copy only if it has all their tokens.
    tokens = (start, end) if first == last else (0, num_tokens)
    return BoundingBox((first, last + 1), tokens, batch_size)


# The smallest number of tiles for a launch of segments; single launches have smaller merges.
FEWEST = 3

# The largest number of chains of one mask that a tile is compared with.
MAX_OPEN_CHAINS = 16

# Batch size, number of local queries, and number of resident keys.
Shape = tuple[int, int, int]

# A batch row, and a tile of it.
_Link = tuple[int, Tile]


def launches(
    step: Step, shape: Shape, has_segments: bool, in_flight: bool = False
) -> tuple[Launch, ...]:
    """Return the launches of a step, which are made once for each shape, see also `whole_step`.

    Tiles of packed documents have one mask and ascend in both queries and keys. Such tiles form one
    launch of segments.

    Args:
        step: the step whose tiles are launched.
        shape: batch size, number of local queries, and number of resident keys.
        has_segments: whether the kernel takes segments; if not, each tile is a launch.
        in_flight: whether messages are in flight during the launches.
    """
    made: dict[Any, tuple[Launch, ...]] = step.kept
    # Only boundaries of segments depend on the shape; single tiles do not.
    has_segments = has_segments and len(step.tiles) * shape[0] >= FEWEST
    key = (shape if has_segments else None), in_flight
    if key not in made:
        # Two threads may both get here; either result serves.
        if in_flight:
            alone = launches(step, shape, has_segments)
            made[key] = tuple(replace(x, in_flight=True) for x in alone)
        else:
            made[key] = _join_tiles(step, shape) if has_segments else _singles(step)
    return made[key]


def _singles(step: Step) -> tuple[Launch, ...]:
    return tuple(map(_single, step.tiles))


def _single(tile: Tile) -> Launch:
    return Launch(rows_of(tile), cols_of(tile), tile.mask)


def _join_tiles(step: Step, shape: Shape) -> tuple[Launch, ...]:
    """Chain the tiles by mask, and return the launches of all chains."""
    chains: list[_Chain] = []
    by_mask: dict[Mask, list[_Chain]] = {}
    for tile, batch in _tiles_by_batch(step.tiles, shape[0]):
        # Try only the last chains: rows that see many ranges of keys open many of them.
        alike = by_mask.setdefault(tile.mask, [])
        chain = next((x for x in alike[-MAX_OPEN_CHAINS:] if x.takes(tile, batch)), None)
        if chain is None:
            chain = _Chain(tile.mask)
            chains.append(chain)
            alike.append(chain)
        chain.links.append((batch, tile))
    return tuple(launch for chain in chains for launch in chain.launches(shape))


@dataclass
class _Chain:
    """Tiles of one mask in ascending order of batch rows, queries and keys."""

    mask: Mask
    links: list[_Link] = field(default_factory=list)

    def takes(self, tile: Tile, batch: int) -> bool:
        """Return whether a tile of the same mask may be the next link."""
        last_batch, last = self.links[-1]
        # Bottom-right kernels shift a band by rows - cols, which must be equal in all segments.
        are_square = all(length(x.rows) == length(x.cols) for x in (last, tile))
        if not (are_square or self.mask in (FULL, CAUSAL)):
            return False
        is_after = tile.rows[0] >= last.rows[1] and tile.cols[0] >= last.cols[1]
        return batch > last_batch or (batch == last_batch and is_after)

    def launches(self, shape: Shape) -> list[Launch]:
        """Return launches of segments, and launches of single tiles where there are too few."""
        joined: list[Launch] = []
        alone: list[_Link] = []
        for first, end in self._cuts(shape):
            links = self.links[first:end]
            if len(_tiles(links, shape[0])) >= FEWEST:
                joined.append(self._segments(links, shape))
            else:
                alone += links
        return joined + list(map(_single, _tiles(alone, shape[0])))

    def _cuts(self, shape: Shape) -> list[Span]:
        """Return ranges of links; each range becomes one launch."""
        blocks = [num_blocks(max(length(tile.rows), length(tile.cols))) for _, tile in self.links]
        gaps = [_gap(before, after, shape) for before, after in pairwise(self.links)]
        return cut(blocks, gaps)

    def _segments(self, links: list[_Link], shape: Shape) -> Launch:
        """Return one launch of these tiles; gaps become segments without keys or queries."""
        queries, keys = (
            bounding_box(
                [(batch, getattr(tile, side)) for batch, tile in links], shape[0], num_tokens
            )
            for side, num_tokens in zip(("rows", "cols"), shape[1:], strict=True)
        )
        # Tiles of the queries 0 to 3 and 6 to 8, and of the keys 0 to 3 and 5 to 7, become
        #     rows   0   4   6   6   9
        #     cols   0   4   4   5   8
        # Queries 4 and 5 of the second segment see nothing, and no query sees key 4 of the third.
        rows, cols = [0], [0]
        for batch, tile in links:
            # Segments must cover all tokens: a gap becomes a segment that sees nothing.
            _skip(
                rows,
                cols,
                queries.index_of(batch, tile.rows[0]),
                keys.index_of(batch, tile.cols[0]),
            )
            rows.append(queries.index_of(batch, tile.rows[1]))
            cols.append(keys.index_of(batch, tile.cols[1]))
        _skip(rows, cols, queries.num_tokens, keys.num_tokens)
        segments = Segments(tuple(rows), tuple(cols))
        return Launch(queries.region, keys.region, self.mask, segments)


def _gap(before: _Link, after: _Link, shape: Shape) -> tuple[int, int]:
    """Return the number of segments between two tiles, and the blocks of the longest."""
    sides = []
    for size, side in ((shape[1], "rows"), (shape[2], "cols")):
        (batch, last), (next_batch, tile) = before, after
        sides.append((next_batch - batch) * size + getattr(tile, side)[0] - getattr(last, side)[1])
    return sum(map(bool, sides)), num_blocks(max(sides))


def _tiles(links: list[_Link], batch_size: int) -> list[Tile]:
    """Return the tiles of the links. A tile that all batch rows share is returned once."""
    counts = Counter(tile for _, tile in links)
    # `_tiles_by_batch` repeated a shared tile for each batch row; undo this.
    shared = [(None if counts[x] == batch_size else batch, x) for batch, x in links]
    return list(dict.fromkeys(replace(tile, batch=batch) for batch, tile in shared))


def _skip(rows: list[int], cols: list[int], row: int, col: int) -> None:
    """Append a segment without keys up to that row, and one without queries up to that column."""
    for ends, end, others in ((rows, row, cols), (cols, col, rows)):
        if ends[-1] < end:
            ends.append(end)
            others.append(others[-1])  # the other side has no token in this segment


def _tiles_by_batch(tiles: tuple[Tile, ...], batch_size: int) -> Iterator[tuple[Tile, int]]:
    """Yield each batch row's tiles, in the order of the step."""
    for batch in range(batch_size):
        yield from ((tile, batch) for tile in tiles if tile.batch in (None, batch))


# Key and value, or their gradients.
Pair = tuple[Tensor, Tensor]


def backward_step(
    step: Step,
    saved: Saved,
    query: Tensor,
    kv: Pair,
    grad_query: Partials,
    grad_kv: tuple[Partials, Partials],
    kernel: Kernel,
    scores: Scores,
    label: Label,
    dropout: Dropout | None = None,
    lags: Lags | None = None,
) -> None:
    """Add the gradients of a step to those of the queries and of the resident keys and values.

    Args:
        step: the step whose tiles are computed.
        saved: outputs of the local queries, and the gradients of these outputs.
        query: local queries `(B, N, L, H)`.
        kv: resident keys and values `(B, Nkv, C, H)` and `(B, Nkv, C, Hv)`.
        grad_query: receives gradients of regions of `(B, N, L)`.
        grad_kv: receive gradients of regions of `(B, Nkv, C)`.
        kernel: the block kernel.
        scores: how a query scored a key.
        label: names this step in a profile.
        dropout: the weights that were dropped, of all queries and all resident keys.
        lags: the positions of all queries and all resident keys, if queries have a bias.
    """
    for launch in launches_of(step, query, kv[0], kernel, joins_tiles=lags is None):
        for one in (grad_query, *grad_kv):
            one.make_room(label)
        with label("tile"):
            launch = launch if dropout is None else _dropping(launch, dropout)
            launch = launch if lags is None else _biased(launch, lags)
            of_query, of_key, of_value = _backward(launch, saved, query, kv, kernel, scores)
        grad_query.add(launch.rows, of_query)
        grad_kv[0].add(launch.cols, of_key)
        grad_kv[1].add(launch.cols, of_value)


def launches_of(
    step: Step,
    query: Tensor,
    key: Tensor,
    kernel: Kernel,
    joins_tiles: bool = True,
    in_flight: bool = False,
) -> tuple[Launch, ...]:
    """Return the launches of a step by a kernel; `joins_tiles` as in `forward_step`."""
    # Each launch costs the host, and small tiles leave multiprocessors of a GPU idle. So a launch
    # takes as many tiles as the kernel can: with intervals all of a step, with segments those of
    # one mask that follow each other, and otherwise one.
    batch_size, _, num_rows, _ = query.shape
    if not batch_size:
        return ()  # some kernels refuse an empty batch, others return nothing for it
    has_segments = joins_tiles and kernel.has_segments
    if step.changing is not None:
        return changing_launches(step, batch_size, query.device, has_segments, in_flight)
    if kernel.has_intervals and joins_tiles and len(step.tiles) > 1:
        return whole_step(step, batch_size, in_flight)
    return launches(step, (batch_size, num_rows, key.shape[2]), has_segments, in_flight)


def _dropping(launch: Launch, dropout: Dropout) -> Launch:
    """Return the launch with what it drops; launches are kept, and seeds differ by call."""
    part = dropout.of_regions(launch.rows, launch.cols)
    return replace(launch, dropout=part if launch.segments is None else part.flat())


def _biased(launch: Launch, lags: Lags) -> Launch:
    """Return the launch with the positions of its queries and keys; one without has no segments."""
    return replace(launch, lags=lags.of_regions(launch.rows, launch.cols))


def _forward(
    launch: Launch, query: Tensor, kv: Pair, kernel: Kernel, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Return `out` `(B, N, R, Hv)` and `lse` `(B, N, R)` of a launch."""
    q, (k, v) = part_of(query, launch.rows), parts_of(launch.cols, kv)
    if launch.segments is None:
        return kernel.forward(q, k, v, launch, scores)
    # Boundaries of segments count tokens across batch rows, so flatten batch and tokens.
    out, lse = kernel.forward(_flat(q), _flat(k), _flat(v), launch, scores)
    batch_size = q.shape[0]
    return _by_batch(out, batch_size), lse.unflatten(1, (batch_size, -1)).transpose(0, 1)


def _backward(
    launch: Launch, saved: Saved, query: Tensor, kv: Pair, kernel: Kernel, scores: Scores
) -> Gradients:
    """Return the gradients of query, key and value of a launch, each `(B, N, R, H)`."""
    saved = saved.region(launch.rows)
    q, (k, v) = part_of(query, launch.rows), parts_of(launch.cols, kv)
    if launch.segments is None:
        return kernel.backward(saved, q, k, v, launch, scores)
    # Kernels take segments as one batch row of all tokens, with lse by head.
    slopes = None if saved.grad_lse is None else _heads_first(saved.grad_lse)
    flat = Saved(_flat(saved.grad_out), _flat(saved.out), _heads_first(saved.lse), slopes)
    grads = kernel.backward(flat, _flat(q), _flat(k), _flat(v), launch, scores)
    dq, dk, dv = (_by_batch(grad, q.shape[0]) for grad in grads)
    return dq, dk, dv


def _flat(x: Tensor) -> Tensor:
    """Reshape `(B, N, L, H)` to `(B * L, N, H)`: a view if `x` is token-major or B is 1."""
    return x.transpose(1, 2).flatten(0, 1)


def _heads_first(lse: Tensor) -> Tensor:
    """Reshape `(B, N, L)` to `(N, B * L)`: a copy unless B is 1."""
    return lse.transpose(0, 1).flatten(1)


def _by_batch(x: Tensor, batch_size: int) -> Tensor:
    """Reshape `(B * L, N, H)` back to `(B, N, L, H)`."""
    return x.unflatten(0, (batch_size, -1)).transpose(1, 2)
