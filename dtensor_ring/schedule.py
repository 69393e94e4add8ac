"""The rank x step grid of a ring, to be looked at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dtensor_ring.layout import Layout, as_layout
from dtensor_ring.mask import Mask
from dtensor_ring.plan import Documents, Plan, plan


@dataclass(frozen=True)
class Schedule:
    """The plans of all ranks. Printed, it shows who works how much at which step."""

    layout: Layout
    mask: Mask
    seq_len: int
    plans: tuple[Plan, ...]

    @property
    def areas(self) -> list[list[int]]:
        """Visible (query, key) pairs by rank, then by step, summed over rows of `cu_seqlens`."""
        return [[sum(t.area for t in step.tiles) for step in plan.steps] for plan in self.plans]

    @property
    def imbalance(self) -> float:
        """Work of the busiest rank over the mean: 1.0 is perfect balance."""
        totals = [sum(steps) for steps in self.areas]
        return max(totals) * len(totals) / sum(totals) if any(totals) else 1.0

    def __str__(self) -> str:
        areas = self.areas
        whole = max(1, sum(map(sum, areas)))
        num_steps = len(areas[0])
        lines = [
            f"{self.layout.name}, left {_bound(self.mask.left)}, right {_bound(self.mask.right)}: "
            f"{self.seq_len} tokens on {len(areas)} ranks, {num_steps} steps",
            "share of all work, %  " + "".join(f"{f'step {i}':>9}" for i in range(num_steps)),
        ]
        lines[1] += f"{'total':>9}"
        for rank, steps in enumerate(areas):
            cells = "".join(f"{100 * area / whole:9.2f}" for area in [*steps, sum(steps)])
            lines.append(f"{f'rank {rank}':<22}{cells}")
        lines.append(f"busiest rank over mean: {self.imbalance:.3f}")
        return "\n".join(lines)


def describe_schedule(
    layout: Layout | str,
    mask: Mask,
    seq_len: int,
    world_size: int,
    cu_seqlens: Any = None,
) -> Schedule:
    """What each rank computes at each step of a ring, in shares of the whole work.

    Args:
        layout: a layout or its name.
        mask: the band of lags, in tokens.
        seq_len: global length, in tokens.
        world_size: ranks on the ring.
        cu_seqlens: boundaries of documents, `(D+1,)` or `(B, D+1)`; a tensor or a sequence.

    Returns:
        A `Schedule`; print it.

    Raises:
        TypeError: if the mask is no `Mask`.
        ValueError: if the layout is unknown or cannot deal the length, or the boundaries are none.

    Example:
        >>> print(describe_schedule("contiguous", Mask.causal(), 8, 2))
        contiguous, left -, right 0: 8 tokens on 2 ranks, 2 steps
        share of all work, %     step 0   step 1    total
        rank 0                    27.78     0.00    27.78
        rank 1                    27.78    44.44    72.22
        busiest rank over mean: 1.444
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a Mask, such as Mask.causal(), got {mask!r}")
    chosen, documents = as_layout(layout), _documents(cu_seqlens)
    plans = tuple(
        plan(chosen, mask, rank, world_size, seq_len, documents)
        for rank in range(max(1, world_size))  # that there are no ranks is for plan to refuse
    )
    return Schedule(chosen, mask, seq_len, plans)


def _documents(cu_seqlens: Any) -> Documents | None:
    if cu_seqlens is None:
        return None
    rows: Any = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else list(cu_seqlens)
    nested = bool(rows) and isinstance(rows[0], Sequence)
    return tuple(tuple(row) for row in rows) if nested else (tuple(rows),)


def _bound(bound: int | None) -> str:
    return "-" if bound is None else str(bound)
