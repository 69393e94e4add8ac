"""Machines on which one strategy is the fastest by far, so that "auto" takes it."""

from __future__ import annotations

from dtensor_ring.simulate.machine import Curve, KernelSpeed, Links, Machine

FAST, SLOW = Curve.line(1e-9, 1e15), Curve.line(1.0, 1e3)
KERNELS = tuple(
    KernelSpeed("any", "float32", 128, form, FAST, FAST) for form in ("full", "causal", "window")
)


def links(p2p: Curve = SLOW, all_to_all: Curve = SLOW, all_gather: Curve = SLOW) -> Links:
    return Links(p2p, all_to_all, all_gather, SLOW)


def machine_for(strategy: str) -> Machine:
    """A machine with slow links for all but what a strategy sends by."""
    inside = {
        "ring": links(p2p=FAST),
        "all_gather": Links(SLOW, SLOW, FAST, FAST),
        "ulysses": links(all_to_all=FAST),
    }[strategy]
    return Machine(
        name=f"for {strategy}",
        device="cpu",
        source="data sheet",
        ranks_per_host=8,
        memory=2**40,
        kernels=KERNELS,
        gemm={"float32": 1e15},
        memory_rate=1e15,
        merge=FAST,
        pack=FAST,
        inside=inside,
        between=links(),
    )
