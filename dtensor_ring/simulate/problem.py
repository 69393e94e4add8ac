"""One attention whose time is asked for: its mask, sizes and layout, checked."""

from __future__ import annotations

from typing import Any, NamedTuple

from dtensor_ring.balanced.balanced import check_seen, layout_for
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Boundaries, Documents, Mask, as_documents
from dtensor_ring.planning.plan import PlanInputs, checked_slices, plan_inputs
from dtensor_ring.planning.ranges import MAX_RANKS, as_count
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import Strategy, as_strategy, why_not
from dtensor_ring.planning.tile import FULL
from dtensor_ring.simulate.sizes import TensorSizes, tensor_sizes
from dtensor_ring.transport.transport import TransferPolicy

# Pairs of query and key of a rank, over all heads, whose number fits 64 bits.
MAX_PAIRS = 2**62


class SimulatedProblem(NamedTuple):
    """An attention over the ranks of an axis. It is hashable.

    Attributes:
        layout: how the sequence is sharded.
        mask: which keys a query sees; `None` where `slices` say it.
        seq_len: global length, in tokens.
        world_size: ranks of the axis.
        documents: boundaries of documents.
        slices: what queries see, in place of mask and documents.
        sizes: of the tensors.
        dtype: of query, key and value, such as "bfloat16".
        num_parts: partial results that a rank keeps, see `TransferPolicy`.
        kernel: a registered kernel's name; `None` for the first one that the machine has.
    """

    layout: Layout
    mask: Mask | None
    seq_len: int
    world_size: int
    documents: Documents | None
    slices: Slices | None
    sizes: TensorSizes
    dtype: str
    num_parts: int | None = None
    kernel: str | None = None

    def able(self, spec: Strategy | str) -> Strategy:
        """Return a strategy, given as one or by its spec.

        Raises:
            ValueError: if the spec is unknown or does not fit the axis, or there are too few heads.
            TypeError: if the spec is not a string.
        """
        strategy = as_strategy(spec, self.world_size)
        reason = why_not(strategy, *self.sizes.heads)
        if reason is not None:
            raise ValueError(f"the strategy {strategy.spec!r} cannot run this attention: {reason}")
        return strategy

    @property
    def is_banded(self) -> bool:
        """Whether there are windows, documents or slices."""
        is_windowed = self.mask is not None and self.mask.left is not None
        return is_windowed or self.documents is not None or self.slices is not None

    def inputs(self, strategy: Strategy) -> PlanInputs:
        """Return what the plans of all ranks begin with."""
        mask = FULL if self.mask is None else self.mask
        lengths = self.seq_len, self.seq_len
        seen = checked_slices(mask, self.world_size, lengths, self.documents, slices=self.slices)
        layouts = self.layout, self.layout
        return plan_inputs(layouts, self.world_size, lengths, seen, strategy)


def problem_of(
    mask: Mask | None,
    seq_len: Any,
    world_size: Any,
    heads: Any,
    head_dim: Any,
    cu_seqlens: Boundaries | None,
    *,
    slices: Slices | None,
    layout: Layout | str,
    batch: Any,
    dtype: Any,
    policy: TransferPolicy,
    kernel: str | None = None,
) -> SimulatedProblem:
    """Check the arguments of an attention, see `simulate_attention`.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a number is out of range, the layout is unknown or does not fit the length,
            or the boundaries do not fit the sequence.
    """
    check_seen(mask, slices)
    num_ranks = as_count("world_size", world_size, 1, MAX_RANKS)
    length = as_count("seq_len", seq_len)
    documents = as_documents(cu_seqlens)
    sizes, name = tensor_sizes(heads, head_dim, batch, dtype, policy)
    # Boundaries or slices by row give the number of rows.
    rows = max(len(x) for x in (documents or (), slices or ()))
    sizes = sizes._replace(batch=max(sizes.batch, rows))
    if length**2 * sizes.batch * sizes.heads[0] > MAX_PAIRS * num_ranks:
        raise ValueError(
            f"seq_len {length:,} with batch {sizes.batch:,} and {sizes.heads[0]} heads has more "
            f"pairs of tokens for each of {num_ranks} ranks than {MAX_PAIRS:,}, which is all that "
            "is counted: take fewer tokens, or more ranks"
        )
    sharded = layout_for(layout, mask, length, num_ranks, documents, slices)
    asked = mask, length, num_ranks, documents, slices
    return SimulatedProblem(sharded, *asked, sizes, name, policy.num_parts, kernel)
