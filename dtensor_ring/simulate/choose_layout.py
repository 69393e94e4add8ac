"""Choose the layout in which the attentions of a model take least time on a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from os import PathLike

import torch

from dtensor_ring.balanced.balanced import WHOLE
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Boundaries, Mask
from dtensor_ring.planning.ranges import MAX_RANKS, as_count
from dtensor_ring.planning.strategy import AUTO, as_strategy
from dtensor_ring.simulate.choose import TIE, chosen_strategy
from dtensor_ring.simulate.machine import Machine
from dtensor_ring.simulate.machine_files import as_machine
from dtensor_ring.simulate.problem import problem_of
from dtensor_ring.simulate.simulated_attention import timeline_of
from dtensor_ring.transport.transport import DEFAULT_POLICY, TransferPolicy


def choose_layout(
    masks: Mask | Sequence[Mask],
    seq_len: int,
    world_size: int,
    heads: tuple[int, int] = (32, 8),
    head_dim: int = 128,
    cu_seqlens: Boundaries | None = None,
    *,
    batch: int = 1,
    dtype: torch.dtype | str = torch.bfloat16,
    policy: TransferPolicy = DEFAULT_POLICY,
    strategy: str = AUTO,
    machine: Machine | str | PathLike[str] = "h100",
) -> str:
    """Return "contiguous" or "zigzag", whichever takes a model's attentions less time.

    A batch is sharded before its masks are seen, so the layout of an axis is chosen by masks that
    are known beforehand. Forward and backward of all layers are simulated in both layouts. A tie
    goes to "contiguous", which leaves tokens where they are. For documents that are known, the
    layout `Balanced` is made for each batch.

    Args:
        masks: that of all layers, or one for each layer.
        seq_len: global length, in tokens; it is padded as the layouts need it.
        world_size: ranks of the axis.
        heads: of queries, and of keys and values; with tensor parallelism, those of a rank.
        head_dim: of queries, keys and values.
        cu_seqlens: boundaries of documents that all batches have, `(D+1,)`.
        batch: rows of the batch.
        dtype: of query, key and value, or its name.
        policy: the dtypes in which messages travel.
        strategy: of all layers, see `SequenceAxis`; with "auto", each has the fastest one.
        machine: the name of a data sheet, a file of `python -m dtensor_ring calibrate`, or a
            `Machine`.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if there are no masks, a number is out of range, or the strategy or the machine
            is unknown or cannot run the attention.

    Example:
        >>> masks = Mask.causal(), Mask.sliding(1023), Mask.full()
        >>> [choose_layout(mask, 65536, 8, strategy="ring") for mask in masks]
        ['zigzag', 'contiguous', 'contiguous']
    """
    num_ranks, device = as_count("world_size", world_size, 1, MAX_RANKS), as_machine(machine)
    counted = _counted(masks)
    length = max(x.padded_length(as_count("seq_len", seq_len), num_ranks) for x in WHOLE)
    sizes = heads, head_dim, cu_seqlens
    how = {"batch": batch, "dtype": dtype, "policy": policy}

    def seconds(layout: Layout, mask: Mask) -> float:
        """Return the time of a layer, forward and backward."""
        asked = mask, length, num_ranks, *sizes
        problem = problem_of(*asked, slices=None, layout=layout, kernel=None, **how)
        chosen = (
            chosen_strategy(problem, device)
            if strategy == AUTO
            else as_strategy(strategy, num_ranks)
        )
        return timeline_of(problem, chosen, device).total

    best: tuple[float, str] | None = None
    for layout in reversed(WHOLE):  # the first of equals leaves tokens where they are
        total = sum(count * seconds(layout, mask) for mask, count in counted.items())
        if best is None or total < best[0] * (1 - TIE):
            best = total, layout.spec
    assert best is not None, "there are layouts"
    return best[1]


def _counted(masks: Mask | Sequence[Mask]) -> Counter[Mask]:
    """Return the number of layers of each mask."""
    listed = [masks] if isinstance(masks, Mask) else masks
    if not isinstance(listed, Sequence) or not all(isinstance(mask, Mask) for mask in listed):
        raise TypeError(f"masks must be a Mask, or a sequence with one for each layer: {masks!r}")
    if not listed:
        raise ValueError("a layout is chosen by masks, and there are none")
    return Counter(listed)
