"""The order of attention kernels by what machine files say of their speed."""

from __future__ import annotations

from functools import partial
from os import PathLike

from dtensor_ring.compute.kernels.kernel import Problem
from dtensor_ring.compute.kernels.registry import follow_rates
from dtensor_ring.lab.machine import FORMS, Machine
from dtensor_ring.lab.presets import as_machine


def prefer_measured(*machines: Machine | str | PathLike[str]) -> None:
    """Prefer attention kernels by the speed that machine files have of them.

    Kernels that run here and serve an attention are taken in the order of their speed, forward and
    backward together: of "window" tiles for windows and documents, else of "causal" ones. Kernels
    without a speed come after these, in the usual order, and so do all for attention to a cache.
    Call it with the same files on all ranks, before the first attention.

    Args:
        machines: files that `python -m dtensor_ring calibrate FILE --kernel NAME` wrote, one for
            each kernel, or machines. Of two rows of one kernel, that of the first machine counts.
            Without any, the usual order is back.

    Raises:
        TypeError: if a machine is something else.
        ValueError: if there is no such file, or it cannot be read as a machine.

    Example:
        >>> from dtensor_ring import prefer_measured
        >>> prefer_measured()
    """
    found = tuple(map(as_machine, machines))
    follow_rates(partial(_rate, found) if found else None)


# FLOPs of a forward that rates are compared at: a causal tile of 8,192 tokens has half of them.
FLOPS = 2.0**40


def _rate(machines: tuple[Machine, ...], kernel: str, problem: Problem) -> float | None:
    """Return the FLOPs per second of a kernel at a problem, `None` if no machine has one."""
    is_banded = problem.windowed or problem.packed
    form, dtype = FORMS[0 if is_banded else 1], str(problem.dtype).removeprefix("torch.")
    for machine in machines:
        try:
            speed = machine.speed(dtype, problem.head_dim, form, kernel)
        except ValueError:
            continue  # it knows neither this kernel nor one that stands for it
        # Rows of any kernel, or of another form, say nothing of an order.
        if (speed.kernel, speed.form) == (kernel, form):
            # A backward has 10 products in place of 4.
            seconds = speed.forward(FLOPS) + speed.backward(2.5 * FLOPS)
            return float(3.5 * FLOPS / seconds)
    return None
