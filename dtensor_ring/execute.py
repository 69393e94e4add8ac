"""Runs the tiles of a step through a block kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dtensor_ring.gradient import GradientShare, GradientSum
from dtensor_ring.kernels.kernel import Kernel
from dtensor_ring.partial import Partial
from dtensor_ring.plan import Step
from dtensor_ring.region import cols_of, rows_of
from dtensor_ring.segments import Segments, launches
from dtensor_ring.tile import Tile
from dtensor_ring.trace import Label

Pair = tuple[Tensor, Tensor]
"""Key and value, or their gradients."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Which kernel scores query against key, and how."""

    kernel: Kernel
    scale: float
    softcap: float = 0.0

    @property
    def factors(self) -> tuple[float, float]:
        """What kernels take last."""
        return self.scale, self.softcap


@dataclass(frozen=True, slots=True)
class Saved:
    """What backward knows of the local queries; `grad_lse` is `None` where lse was not used."""

    grad_out: Tensor
    query: Tensor
    out: Tensor
    lse: Tensor
    grad_lse: Tensor | None = None


def forward_step(
    step: Step,
    query: Tensor,
    held: Pair,
    partial: Partial,
    scoring: Scoring,
    label: Label,
    is_last: bool = False,
) -> None:
    """Add the attention of a step's tiles over the held keys and values to `partial`."""
    todo = _launches(step, query, held[0], scoring.kernel.has_segments)
    covered = [_tile(launch, query, held[0]) for launch in todo]
    are_last = last_of_their_rows(covered) if is_last else [False] * len(covered)
    for launch, tile, is_last_of_rows in zip(todo, covered, are_last, strict=True):
        with label("tile"):
            out, lse = _attend(launch, query, held, scoring)
        with label("merge"):
            partial.add(tile, out, lse, is_last_of_rows)


def backward_step(
    step: Step,
    saved: Saved,
    held: Pair,
    grad_query: GradientSum,
    grad_held: tuple[GradientSum, GradientSum] | tuple[GradientShare, GradientShare],
    scoring: Scoring,
    label: Label,
) -> None:
    """Add the gradients of a step's tiles to those of the queries and of the held pair."""
    has_segments = scoring.kernel.has_segments and saved.grad_lse is None
    for launch in _launches(step, saved.query, held[0], has_segments):
        with label("tile"):
            grads = _pull_back(launch, saved, held, scoring)
        tile = _tile(launch, saved.query, held[0])
        with label("merge"):
            grad_query.add(rows_of(tile), grads[0])
            grad_held[0].add(cols_of(tile), grads[1])
            grad_held[1].add(cols_of(tile), grads[2])


def _launches(
    step: Step, query: Tensor, key: Tensor, has_segments: bool
) -> Sequence[Tile | Segments]:
    if not query.shape[0]:
        return ()
    if not has_segments:
        return step.tiles
    return launches(step, query.shape[0], query.shape[2], key.shape[2])


def _tile(launch: Tile | Segments, query: Tensor, key: Tensor) -> Tile:
    """What a launch covers."""
    if isinstance(launch, Tile):
        return launch
    return Tile((0, query.shape[2]), (0, key.shape[2]), launch.mask)


def last_of_their_rows(tiles: list[Tile]) -> list[bool]:
    """Whether no later tile has rows up to the end of the tile."""
    first_row: dict[int | None, int] = {}  # of the later tiles, by batch row
    result = []
    for tile in reversed(tiles):
        batches = first_row if tile.batch is None else (None, tile.batch)
        result.append(all(first_row.get(x, tile.rows[1]) >= tile.rows[1] for x in batches))
        first_row[tile.batch] = min(first_row.get(tile.batch, tile.rows[0]), tile.rows[0])
    return result[::-1]


def _attend(
    launch: Tile | Segments, query: Tensor, held: Pair, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    if isinstance(launch, Segments):
        return _attend_segments(launch, query, held, scoring)
    rows, cols = rows_of(launch), cols_of(launch)
    return scoring.kernel.forward(
        query[rows], held[0][cols], held[1][cols], launch.mask, *scoring.factors
    )


def _attend_segments(
    segments: Segments, query: Tensor, held: Pair, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    flat = _one_behind_the_other
    out, lse = scoring.kernel.forward_segments(
        *(flat(query), flat(held[0]), flat(held[1]), segments, *scoring.factors)
    )
    batch = query.shape[0]
    return _by_batch(out, batch), lse.unflatten(1, (batch, -1)).transpose(0, 1)


def _pull_back(
    launch: Tile | Segments, saved: Saved, held: Pair, scoring: Scoring
) -> tuple[Tensor, ...]:
    if isinstance(launch, Segments):
        return _pull_back_segments(launch, saved, held, scoring)
    rows, cols = rows_of(launch), cols_of(launch)
    return scoring.kernel.backward(
        *(saved.grad_out[rows], saved.query[rows], held[0][cols], held[1][cols]),
        *(saved.out[rows], saved.lse[rows]),
        None if saved.grad_lse is None else saved.grad_lse[rows],
        *(launch.mask, *scoring.factors),
    )


def _pull_back_segments(
    segments: Segments, saved: Saved, held: Pair, scoring: Scoring
) -> tuple[Tensor, ...]:
    flat = _one_behind_the_other
    grads = scoring.kernel.backward_segments(
        *(flat(saved.grad_out), flat(saved.query), flat(held[0]), flat(held[1]), flat(saved.out)),
        *(saved.lse.transpose(0, 1).flatten(1), segments, *scoring.factors),
    )
    return tuple(_by_batch(grad, saved.query.shape[0]) for grad in grads)


def _one_behind_the_other(x: Tensor) -> Tensor:
    """`(B, N, L, H)` to `(B * L, N, H)`: a view, if it is token-major or the batch is 1."""
    return x.transpose(1, 2).flatten(0, 1)


def _by_batch(x: Tensor, batch: int) -> Tensor:
    """`(B * L, N, H)` back to `(B, N, L, H)`."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)
