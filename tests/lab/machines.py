"""Machines of round numbers."""

from __future__ import annotations

from typing import Any

from dtensor_ring.lab.machine import FORMS, Curve, KernelSpeed, Links, Machine


def links(latency: float, rate: float) -> Links:
    """Links that do everything at one speed."""
    return Links(*[Curve.line(latency, rate)] * 4)


def round_machine(
    *, inside: float = 100.0, between: float = 10.0, kernel: float = 1e6, **others: Any
) -> Machine:
    """A machine whose links take 1 s and 2 s, and bytes per second as given.

    Args:
        inside: bytes per second inside a host.
        between: bytes per second between hosts.
        kernel: FLOPs per second of attention and of matrix products.
        others: more fields of `Machine`.
    """
    curve = Curve.line(0.0, kernel)
    speeds = [
        KernelSpeed("any", dtype, 128, form, curve, curve)
        for dtype in ("bfloat16", "float32")
        for form in FORMS
    ]
    fields: dict[str, Any] = {
        "name": "round",
        "device": "a device",
        "source": "data sheet",
        "ranks_per_host": 8,
        "memory": 2**30,
        "kernels": tuple(speeds),
        "gemm": {"bfloat16": kernel, "float32": kernel},
        "memory_rate": kernel,
        "merge": Curve.line(0.0, kernel),
        "pack": Curve.line(0.0, kernel),
        "inside": links(1.0, inside),
        "between": links(2.0, between),
    }
    return Machine(**(fields | others))
