"""Simulate one attention on a machine."""

from __future__ import annotations

from os import PathLike

import torch

from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Boundaries, Mask
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import Strategy
from dtensor_ring.simulate.machine import Machine
from dtensor_ring.simulate.machine_files import as_machine
from dtensor_ring.simulate.problem import SimulatedProblem, problem_of
from dtensor_ring.simulate.recurrence import RingTimes
from dtensor_ring.simulate.timeline import Timeline
from dtensor_ring.transport.transport import DEFAULT_POLICY, TransferPolicy


def simulate_attention(
    mask: Mask | None,
    seq_len: int,
    world_size: int,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    cu_seqlens: Boundaries | None = None,
    *,
    slices: Slices | None = None,
    layout: Layout | str = "zigzag",
    strategy: Strategy | str = Strategy.default,
    batch: int = 1,
    dtype: torch.dtype | str = torch.bfloat16,
    policy: TransferPolicy = DEFAULT_POLICY,
    kernel: str | None = None,
    machine: Machine | str | PathLike[str] = "h100",
) -> Timeline:
    """Simulate the forward and the backward of one attention on a machine, without running it.

    Ranks of a host are consecutive ranks of the axis. Of a host whose devices are also used by
    other axes, give a machine with fewer `ranks_per_host`.

    Args:
        mask: which keys a query sees; `None` where `slices` say it.
        seq_len: global length, in tokens.
        world_size: ranks of the axis.
        heads: of queries, and of keys and values; with tensor parallelism, those of a rank.
        head_dim: of queries, keys and values.
        cu_seqlens: boundaries of documents, `(D+1,)` or `(B, D+1)`; a tensor or a sequence.
        slices: what queries see, in place of mask and boundaries.
        layout: a layout or its name.
        strategy: how the attention is made parallel, see `SequenceAxis`.
        batch: rows of the batch, if boundaries do not say it by row.
        dtype: of query, key and value, or its name.
        policy: the dtypes in which messages travel.
        kernel: a registered kernel's name; by default the first one that the machine has.
        machine: a preset's name, such as "h100", a file that `python -m dtensor_ring calibrate`
            wrote, or a `Machine`.

    Returns:
        A `Timeline`; print it, or save its `chrome_trace()`.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if the machine is unknown or lacks the kernel or the dtype, or the strategy or
            layout is unknown, does not fit the axis or the length, or there are too few heads.

    Example:
        >>> from dtensor_ring.simulate.machine import Curve, KernelSpeed, Links, Machine
        >>> link, copy, kernel = (Curve.line(1e-5, rate) for rate in (1e11, 2e12, 5e14))
        >>> speed = KernelSpeed("any", "bfloat16", 128, "full", kernel, kernel)
        >>> links = Links(link, link, link, link)
        >>> machine = Machine("mine", "cuda", "data sheet", 8, 80 * 2**30, (speed,), {}, 2e12, copy,
        ...     copy, links, links)
        >>> found = simulate_attention(Mask.causal(), 65536, 8, machine=machine)
        >>> [round(1e3 * seconds, 2) for seconds in found.seconds]
        [9.33, 23.82]
    """
    problem = problem_of(
        *(mask, seq_len, world_size, heads, head_dim, cu_seqlens),
        slices=slices,
        layout=layout,
        batch=batch,
        dtype=dtype,
        policy=policy,
        kernel=kernel,
    )
    return timeline_of(problem, problem.able(strategy), as_machine(machine), keeps_spans=True)


def timeline_of(
    problem: SimulatedProblem, strategy: Strategy, machine: Machine, keeps_spans: bool = False
) -> Timeline:
    """Return the times of a problem by one strategy that can run it.

    Raises:
        ValueError: if the machine lacks the kernel or the dtype.
    """
    times = RingTimes(problem, strategy, machine, keeps_spans)
    return Timeline(machine.name, strategy.spec, times.forward(), times.backward())
