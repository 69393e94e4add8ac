"""The rank x step grid of a ring, to be looked at."""

from __future__ import annotations

from dataclasses import dataclass
from operator import index
from typing import Any

from dtensor_ring.balanced import Balanced
from dtensor_ring.layout import LAYOUTS, Layout, as_layout
from dtensor_ring.mask import Mask
from dtensor_ring.plan import Documents, Plan, as_documents, plan


@dataclass(frozen=True)
class Schedule:
    """The plans of all ranks. Printed, it shows who works how much at which step."""

    layout: Layout
    mask: Mask
    seq_len: int
    documents: Documents | None
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

    @property
    def received(self) -> list[int]:
        """Tokens whose keys and values come to each rank, over all steps of a forward pass."""
        return [plan.num_received for plan in self.plans]

    def imbalances(self) -> dict[str, float]:
        """The imbalance of every layout that can deal this length, by name."""
        problem = self.mask, self.seq_len, len(self.plans), self.documents
        found = {self.layout.name: self.imbalance}
        for name in (*LAYOUTS, Balanced.name):
            if name not in found:
                try:
                    found[name] = describe_schedule(name, *problem).imbalance
                except ValueError:  # striped, of a length that does not divide
                    continue
        return {name: found[name] for name in (*LAYOUTS, Balanced.name) if name in found}

    def __str__(self) -> str:
        areas = self.areas
        whole = max(1, sum(map(sum, areas)))
        num_steps = len(areas[0])
        lines = [
            f"{self.layout.name}, {_bounds(self.mask)}: "
            f"{self.seq_len} tokens on {len(areas)} ranks, {num_steps} steps",
            "share of all work, %  " + "".join(f"{f'step {i}':>9}" for i in range(num_steps)),
        ]
        lines[1] += f"{'total':>9}"
        for rank, steps in enumerate(areas):
            cells = "".join(f"{100 * area / whole:9.2f}" for area in [*steps, sum(steps)])
            lines.append(f"{f'rank {rank}':<22}{cells}")
        others = ", ".join(f"{name} {value:.3f}" for name, value in self.imbalances().items())
        lines += [f"busiest rank over mean: {self.imbalance:.3f}", f"by layout: {others}"]
        lines.append(f"keys and values to a rank, at most: {max(self.received)} tokens")
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
        layout: a layout or its name; "balanced" is the one for this mask and these documents.
        mask: which keys a query sees.
        seq_len: global length, in tokens.
        world_size: ranks on the ring.
        cu_seqlens: boundaries of documents, `(D+1,)` or `(B, D+1)`; a tensor or a sequence.

    Returns:
        A `Schedule`; print it. Below the grid are the balance, that of the other layouts, and how
        much moves.

    Raises:
        TypeError: if the mask is no `Mask`, or a number no integer.
        ValueError: if the layout is unknown or cannot deal the length, or the boundaries are none.

    Example:
        >>> print(describe_schedule("contiguous", Mask.causal(), 8, 2))
        contiguous, left -, right 0: 8 tokens on 2 ranks, 2 steps
        share of all work, %     step 0   step 1    total
        rank 0                    27.78     0.00    27.78
        rank 1                    27.78    44.44    72.22
        busiest rank over mean: 1.444
        by layout: contiguous 1.444, striped 1.111, zigzag 1.000, balanced 1.000
        keys and values to a rank, at most: 4 tokens
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a Mask, such as Mask.causal(), got {mask!r}")
    seq_len, world_size = index(seq_len), index(world_size)  # a float would count as the same
    documents, num_ranks = as_documents(cu_seqlens), max(1, world_size)
    if layout == Balanced.name:
        layout = Balanced(mask, seq_len, num_ranks, documents)
    chosen = layout if isinstance(layout, Balanced) else as_layout(layout)
    plans = tuple(
        plan(chosen, mask, rank, world_size, seq_len, documents)
        for rank in range(num_ranks)  # that there are no ranks is for plan to refuse
    )
    return Schedule(chosen, mask, seq_len, documents, plans)


def _bounds(mask: Mask) -> str:
    """The bounds of a mask, in words: left and right always, the others where there are."""
    counts = {"left": mask.left, "right": mask.right}
    counts |= {"chunk": mask.chunk} if mask.chunk else {}
    counts |= {"prefix": mask.prefix} if mask.prefix else {}
    return ", ".join(f"{name} {'-' if n is None else n}" for name, n in counts.items())
