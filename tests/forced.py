"""Machines on which one strategy is the fastest by far, and what "auto" takes on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

from dtensor_ring import Mask
from dtensor_ring.lab.machine import Curve, KernelSpeed, Links, Machine
from dtensor_ring.ops import ring_op

# A million seconds for a message, ten for an all-to-all.
FAST, SLOW, SLOWEST = (Curve.line(latency, 1e15) for latency in (1e-9, 1e6, 1e7))


def links(p2p: Curve, all_to_all: Curve) -> Links:
    return Links(p2p, all_to_all, SLOWEST, SLOWEST)


WITHIN_HOSTS = {
    # The messages of all routes hide behind these kernels, and a ring is the first of equals.
    "ring": links(FAST, SLOWEST),
    "all_gather": links(SLOW, SLOWEST),  # it has one hop
    "ulysses": links(SLOWEST, FAST),
    "groups": links(SLOWEST, FAST),
}


def machine_for(strategy: str, inside: Links | None = None) -> Machine:
    """A machine on which that takes the least time; "groups" is an all-to-all within each host."""
    seconds = Curve.line(0.0, 1.0) if strategy == "ring" else FAST
    forms = ("full", "causal", "window")
    return Machine(
        name=f"for {strategy}",
        device="cpu",
        source="data sheet",
        ranks_per_host=2 if strategy == "groups" else 64,
        memory=2**40,
        kernels=tuple(KernelSpeed("any", "float32", 8, form, seconds, seconds) for form in forms),
        gemm={"float32": 1e15},
        memory_rate=1e15,
        merge=FAST,
        pack=FAST,
        inside=WITHIN_HOSTS[strategy] if inside is None else inside,
        between=links(SLOW, SLOWEST),
    )


def machine_by_bytes(seconds: float) -> Machine:
    """A machine whose all-to-alls take this time, and whose other messages a second for a byte."""
    return machine_for("each mask", links(Curve.line(0.0, 1.0), Curve.line(seconds, 1e15)))


@contextmanager
def taken() -> Iterator[list[tuple[Mask, str, str | None]]]:
    """The masks, the strategies and the machines of the calls of the ring op of this rank."""
    found: list[tuple[Mask, str, str | None]] = []

    def noted(run: Callable[..., Any], bound: Any, *inputs: Any) -> Any:
        call = bound.call
        if bound.is_shared:
            found.append((call.scores.mask, call.place.strategy, call.place.machine))
        return run(bound, *inputs)

    both = {name: getattr(ring_op, name) for name in ("run_forward", "run_backward")}
    with patch.multiple(ring_op, **{name: partial(noted, run) for name, run in both.items()}):
        yield found
