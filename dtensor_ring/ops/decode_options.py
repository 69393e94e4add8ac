"""The options of the decode op."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from dtensor_ring.compute.kernels import Kernel, Scores
from dtensor_ring.ops.arguments import Arguments
from dtensor_ring.ops.boundaries import documents_of, run_table, slices_of_table, starts_of
from dtensor_ring.ops.options import Length, kernel_of
from dtensor_ring.planning.decode import decode_step
from dtensor_ring.planning.layout import Contiguous, Layout
from dtensor_ring.planning.mask import Documents, Mask
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.run_table import RunTable, as_layout
from dtensor_ring.planning.slices import Slices

# The largest number of query tokens. With more, a ring is as fast, and repeats no work.
MAX_QUERIES = 64


class DecodeBatch(NamedTuple):
    """Integer tensors that differ from call to call, see `decode_attention`."""

    cu_seqlens: Tensor | None = None
    slices: Tensor | None = None
    key_runs: Tensor | None = None
    query_starts: Tensor | None = None
    agree: Tensor | None = None


class DecodePlace(NamedTuple):
    """Where the keys are: sharded over the ranks of a group, or all on this rank.

    For DTensors, the placements and the axis decide, and only `merge` is given.
    """

    layout: str | None = Contiguous.name
    seq_len: Length | None = None
    group_name: str | None = None
    merge: str | None = None


class DecodeQuestion(NamedTuple):
    """The planner's arguments, in the order of the parameters of `decode_step`."""

    layout: Layout
    mask: Mask
    rank: int
    world_size: int
    seq_len: int
    starts: tuple[int, ...]
    num_queries: int
    documents: Documents | None
    slices: Slices | None

    def step(self, key: Tensor) -> Step:
        """Plan this rank's step.

        Raises:
            ValueError: if the rank holds more or fewer columns than its runs, or options do not
                fit.
        """
        step = decode_step(*self)
        if len(step.cols) != key.shape[2]:
            raise ValueError(
                f"key must hold the {len(step.cols)} tokens that {self._runs()} gives rank "
                f"{self.rank} of {self.world_size}, got {key.shape[2]}"
            )
        return step

    def _runs(self) -> str:
        if isinstance(self.layout, RunTable):
            return self.layout.argument
        return f"the layout {self.layout.spec} of {self.seq_len} positions"


class DecodeCall(NamedTuple):
    """The options of a decode call: all arguments but query, key and value."""

    batch: DecodeBatch
    scores: Scores
    place: DecodePlace

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the axis, `None` if this rank has all keys."""
        name = self.place.group_name
        return None if name is None else _resolve_process_group(name)  # type: ignore[arg-type]

    def question(self, query: Tensor, key: Tensor) -> DecodeQuestion:
        """Build the planner's arguments.

        Raises:
            ValueError: if an option has a wrong shape, or queries begin before position 0.
        """
        (batch_size, _, num_queries, _), group = query.shape, self.group
        rank, world_size = (0, 1) if group is None else (group.rank(), group.size())
        layout, end = self._keys(key, world_size)
        starts = self._starts(batch_size, end - num_queries)
        cu_seqlens, slices = self.batch.cu_seqlens, self.batch.slices
        return DecodeQuestion(
            *(layout, self.scores.mask, rank, world_size, end, starts, num_queries),
            None if cu_seqlens is None else documents_of(cu_seqlens, "cu_seqlens", batch_size),
            None if slices is None else slices_of_table(slices, batch_size),
        )

    def _keys(self, key: Tensor, world_size: int) -> tuple[Layout, int]:
        """Return the layout of the keys, and the position after their last one."""
        key_runs, place = self.batch.key_runs, self.place
        if key_runs is not None:
            layout = run_table(key_runs, "key_runs")
            return layout, layout.end
        spelling: Any = place.layout
        # Shards have equal length unless a DTensor says otherwise.
        seq_len = key.shape[2] * world_size if place.seq_len is None else place.seq_len
        return as_layout(spelling), seq_len

    def _starts(self, batch_size: int, default: int) -> tuple[int, ...]:
        given = self.batch.query_starts
        if given is not None:
            return starts_of(given, batch_size)
        if default < 0:
            raise ValueError(
                f"query has {-default} tokens more than key has positions, the last of which are "
                "its own by default; pass query_starts"
            )
        return (default,)

    def select(self, query: Tensor, value: Tensor, question: DecodeQuestion) -> Kernel:
        """Return the named kernel, or the first one that supports the call."""
        is_packed = (
            question.documents is not None
            or question.slices is not None
            or question.mask.chunk is not None
            or len(question.starts) > 1
        )
        return kernel_of(self.scores, query, value, is_packed, question.slices)


_ARGUMENTS = Arguments(DecodeCall, DecodeBatch, Scores, DecodePlace, Mask)
# The decode op's arguments after its tensors, in the order of `flatten_decode`.
DECODE_LEAVES, DECODE_SCHEMA = _ARGUMENTS.leaves, _ARGUMENTS.schema


def flatten_decode(call: DecodeCall) -> tuple[Any, ...]:
    """Return the arguments of the decode op after its tensors."""
    return _ARGUMENTS.flatten(call)


def unflatten_decode(arguments: tuple[Any, ...]) -> DecodeCall:
    """Return the call from which `flatten_decode` made these arguments."""
    return _ARGUMENTS.unflatten(arguments)
