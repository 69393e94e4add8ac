"""Runs the tiles of a step through a block kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dtensor_ring.kernels.kernel import Kernel
from dtensor_ring.merge import GradientShare, GradientSum, Partial, cols_of, rows_of
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


@dataclass(frozen=True, slots=True)
class Saved:
    """What backward knows of the local queries; `grad_lse` is `None` where lse was not used."""

    grad_out: Tensor
    query: Tensor
    out: Tensor
    lse: Tensor
    grad_lse: Tensor | None = None


def forward_tiles(
    tiles: tuple[Tile, ...],
    query: Tensor,
    held: Pair,
    partial: Partial,
    scoring: Scoring,
    label: Label,
) -> None:
    """Add the tiles' attention over the held keys and values to `partial`."""
    for tile in tiles:
        rows, cols = rows_of(tile), cols_of(tile)
        with label("tile"):
            out, lse = scoring.kernel.forward(
                query[rows], held[0][cols], held[1][cols], tile.mask, scoring.scale, scoring.softcap
            )
        with label("merge"):
            partial.add(tile, out, lse)


def backward_tiles(
    tiles: tuple[Tile, ...],
    saved: Saved,
    held: Pair,
    grad_query: GradientSum,
    grad_held: tuple[GradientSum, GradientSum] | tuple[GradientShare, GradientShare],
    scoring: Scoring,
    label: Label,
) -> None:
    """Add the tiles' gradients to those of the queries and of the held keys and values."""
    for tile in tiles:
        rows, cols = rows_of(tile), cols_of(tile)
        with label("tile"):
            grads = scoring.kernel.backward(
                *(saved.grad_out[rows], saved.query[rows], held[0][cols], held[1][cols]),
                *(saved.out[rows], saved.lse[rows]),
                None if saved.grad_lse is None else saved.grad_lse[rows],
                *(tile.mask, scoring.scale, scoring.softcap),
            )
        with label("merge"):
            grad_query.add(rows, grads[0])
            grad_held[0].add(cols, grads[1])
            grad_held[1].add(cols, grads[2])
