"""Machines on which one strategy is the fastest by far, and what "auto" takes on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from dtensor_ring import Mask
from dtensor_ring.ops import ring_op
from dtensor_ring.simulate.machine import Curve, KernelSpeed, Links, Machine

FAST, SLOW = Curve.line(1e-9, 1e15), Curve.line(1e6, 1.0)
KERNELS = tuple(
    KernelSpeed("any", "float32", 128, form, FAST, FAST) for form in ("full", "causal", "window")
)
INSIDE = {
    "ring": Links(p2p=FAST, all_to_all=SLOW, all_gather=SLOW, reduce_scatter=SLOW),
    "all_gather": Links(p2p=SLOW, all_to_all=SLOW, all_gather=FAST, reduce_scatter=FAST),
    "ulysses": Links(p2p=SLOW, all_to_all=FAST, all_gather=SLOW, reduce_scatter=SLOW),
}


def machine_for(strategy: str, inside: Links | None = None) -> Machine:
    """A machine with slow links for all but what a strategy sends by."""
    return Machine(
        name=f"for {strategy}",
        device="cpu",
        source="data sheet",
        ranks_per_host=64,
        memory=2**40,
        kernels=KERNELS,
        gemm={"float32": 1e15},
        memory_rate=1e15,
        merge=FAST,
        pack=FAST,
        inside=INSIDE[strategy] if inside is None else inside,
        between=INSIDE["ring"],
    )


def machine_by_bytes(seconds: float) -> Machine:
    """A machine whose all-to-alls take this time, and whose other messages a second for a byte."""
    p2p, of_any_size = Curve.line(0.0, 1.0), Curve.line(seconds, 1e15)
    return machine_for("each mask", Links(p2p, of_any_size, SLOW, SLOW))


@contextmanager
def taken() -> Iterator[list[tuple[Mask, str, str | None]]]:
    """The masks, the strategies and the machines of the calls of the ring op of this rank."""
    found: list[tuple[Mask, str, str | None]] = []

    def checked(call: Any, *rest: Any) -> Any:
        found.append((call.scores.mask, call.place.strategy, call.place.machine))
        return checked_call(call, *rest)

    checked_call = ring_op.checked_call
    with patch.object(ring_op, "checked_call", checked):
        yield found
