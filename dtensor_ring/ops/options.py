"""The options of the ring ops: three values, which travel through the dispatcher as flat arguments.

An option is added to the fields of one of the values, and nowhere else: see `Arguments`.
"""

from __future__ import annotations

from math import sqrt
from typing import Any, NamedTuple, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from dtensor_ring.compute.kernels import Kernel, Scores, kernel_for
from dtensor_ring.ops.arguments import Arguments
from dtensor_ring.ops.boundaries import documents_of_both, run_table, slices_of_table
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Documents, Mask
from dtensor_ring.planning.plan import Plan, plan
from dtensor_ring.planning.run_table import RunTable, as_layout
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import Strategy, as_strategy
from dtensor_ring.transport.policy import DEFAULT_POLICY, TransferPolicy

Length = int
"""A global length in tokens, which a compiler may have as a symbol."""

TOKEN_MAJOR_HINT = (
    "; tensors are (B, N, S, H): if these are (B, S, N, H), as in flash-attn, use transpose(1, 2)"
)


def group_named(name: Any) -> dist.ProcessGroup:
    """The process group of that name."""
    return _resolve_process_group(name)


class Batch(NamedTuple):
    """Options that differ from batch to batch: tensors of integers, see `ring_attention`."""

    cu_seqlens: Tensor | None = None
    key_cu_seqlens: Tensor | None = None
    runs: Tensor | None = None
    slices: Tensor | None = None
    key_runs: Tensor | None = None


class Place(NamedTuple):
    """Where the tokens are, and how they get to where they are needed.

    On DTensors, placements and the axis say it: then only a strategy may be given. Where the
    batch has runs of queries and of keys, they say the lengths.
    """

    layout: str | None = None
    strategy: str | None = None
    seq_len: Length | None = None
    key_seq_len: Length | None = None
    group_name: str | None = None
    policy: TransferPolicy = DEFAULT_POLICY


ON_DTENSORS = Place()
"""The place of a call on DTensors. A compiler cannot follow a default that is an object."""


def on_dtensors(strategy: str | None) -> Place:
    """The place of a call on DTensors, which may have a strategy of its own."""
    return ON_DTENSORS if strategy is None else ON_DTENSORS._replace(strategy=strategy)


class Question(NamedTuple):
    """What the planner is asked, in the order of the arguments of `plan`."""

    layout: Layout
    mask: Mask
    rank: int
    world_size: int
    seq_len: int
    documents: Documents | None
    key_seq_len: int
    key_documents: Documents | None
    strategy: Strategy
    slices: Slices | None = None
    key_layout: Layout | None = None

    def plan(self, query: Tensor, key: Tensor) -> Plan:
        """This rank's plan.

        Raises:
            ValueError: if the shards are not as long as their global lengths say, or the layout,
                the boundaries or the strategy do not allow this attention.
        """
        try:
            result = plan(*self)
        except ValueError as error:
            if self._seem_token_major(query, key):
                raise ValueError(f"{error}{TOKEN_MAJOR_HINT}") from error
            raise
        # The plan relies on it: a shard of another length would be read out of bounds.
        sides = (query, self.seq_len, self.layout), (key, self.key_seq_len, self.key_layout)
        for (x, whole, layout), expected in zip(sides, result.num_local, strict=True):
            if x.shape[2] != expected:
                raise ValueError(
                    f"rank {self.rank} of {self.world_size} holds {x.shape[2]} tokens, but its "
                    f"shard of {_deal_of(layout or self.layout, whole)} has {expected}"
                )
        return result

    def _seem_token_major(self, query: Tensor, key: Tensor) -> bool:
        """Whether an error may be due to tensors `(B, S, N, H)`, whose heads pass for tokens."""
        (num_heads, num_tokens), (num_key_heads, num_keys) = query.shape[1:3], key.shape[1:3]
        if num_heads <= num_tokens:
            return False
        ends = [row[-1] for row in self.documents.arrays if row.size] if self.documents else []
        fit_heads = any(self.seq_len < end <= num_heads * self.world_size for end in ends)
        # The queries of a turn are fewer than the keys as it should be.
        differ = self.key_layout is None and num_tokens != num_keys
        return fit_heads or (num_heads == num_key_heads and differ)


def _deal_of(layout: Layout, seq_len: int) -> str:
    """What says how many tokens a rank has, for an error."""
    return layout.argument if isinstance(layout, RunTable) else f"seq_len {seq_len}"


class Call(NamedTuple):
    """A call of a ring op: everything but query, key and value."""

    batch: Batch
    scores: Scores
    place: Place

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the axis."""
        name: Any = self.place.group_name
        return _resolve_process_group(name)

    @property
    def strategy(self) -> Strategy:
        """How the attention is made parallel."""
        spelling: Any = self.place.strategy
        return as_strategy(spelling, self.group.size())

    def documents(self, batch: int) -> tuple[Documents | None, Documents | None]:
        """Boundaries of the queries and of the keys, as the planner wants them."""
        return documents_of_both(self.batch.cu_seqlens, self.batch.key_cu_seqlens, batch)

    def slices(self, batch: int) -> Slices | None:
        """What queries see, if slices say it."""
        given = self.batch.slices
        return None if given is None else slices_of_table(given, batch)

    def question(self, batch: int) -> Question:
        """What the planner is asked."""
        group, spelling = self.group, cast(Any, self.place.strategy)
        documents, key_documents = self.documents(batch)
        layout, key_layout, seq_len, key_seq_len = self._dealt()
        return Question(
            *(layout, self.scores.mask, group.rank(), group.size(), seq_len, documents),
            *(key_seq_len, key_documents, as_strategy(spelling, group.size())),
            *(self.slices(batch), key_layout),
        )

    def _dealt(self) -> tuple[Layout, Layout | None, int, int]:
        """How queries and keys are dealt, and their global lengths."""
        batch, place = self.batch, self.place
        if batch.key_runs is not None:
            queries, keys = self._turn(batch.key_runs)
            return queries, keys, keys.end, keys.end
        seq_len, key_seq_len = place.seq_len, place.key_seq_len
        assert seq_len is not None and key_seq_len is not None, "DTensors have said them by now"
        # Runs of a batch take the place of the layout, whose name says that it belongs to one.
        if batch.runs is not None:
            table = run_table(batch.runs)
            table.check_from(0)
            return table, None, seq_len, key_seq_len
        spelling: Any = place.layout
        return as_layout(spelling), None, seq_len, key_seq_len

    def _turn(self, key_runs: Tensor) -> tuple[RunTable, RunTable]:
        """Which positions queries and keys have, of one sequence that ends with the queries."""
        batch = self.batch
        if batch.runs is None or batch.key_cu_seqlens is not None:
            found = "no runs" if batch.runs is None else "key_cu_seqlens, which are another's"
            raise ValueError(
                "key_runs say which positions of a sequence the keys have, and runs those of the "
                f"queries, whose boundaries are cu_seqlens; got {found}"
            )
        queries, keys = run_table(batch.runs), run_table(key_runs, "key_runs")
        if queries.end != keys.end:
            raise ValueError(
                f"queries are the last tokens of the keys' sequence, but runs end at {queries.end} "
                f"and key_runs at {keys.end}"
            )
        return queries, keys

    def select(
        self,
        query: Tensor,
        value: Tensor,
        slices: Slices | None = None,
        differentiable_lse: bool = False,
    ) -> Kernel:
        """The kernel to use: the named one, or the first that can."""
        is_packed = (
            self.batch.cu_seqlens is not None
            or self.scores.mask.chunk is not None
            or slices is not None
        )
        return kernel_of(self.scores, query, value, is_packed, slices, differentiable_lse)


def kernel_of(
    scores: Scores,
    query: Tensor,
    value: Tensor,
    is_packed: bool,
    slices: Slices | None = None,
    differentiable_lse: bool = False,
) -> Kernel:
    """The kernel of an attention: the named one, or the first that can.

    Args:
        scores: how queries score keys.
        query: `(B, N, L, H)`.
        value: `(B, Nkv, C, Hv)`.
        is_packed: whether a step may have any number of tiles.
        slices: what queries see, if they say it.
        differentiable_lse: whether backward gets a gradient of lse.
    """
    mask, scale, softcap, _, kernel = scores
    _, num_heads, _, head_dim = query.shape
    _, num_key_heads, _, value_head_dim = value.shape
    # The planner cuts other bands into squares.
    is_windowed = mask.left is not None if slices is None else slices.are_windowed
    return kernel_for(
        *(kernel, query.device.type, query.dtype, head_dim, value_head_dim, scale, softcap),
        *(differentiable_lse, is_windowed, num_heads != num_key_heads, is_packed),
    )


_ARGUMENTS = Arguments(Call, Batch, Scores, Place, Mask, TransferPolicy)
LEAVES, SCHEMA = _ARGUMENTS.leaves, _ARGUMENTS.schema
"""Of the ring ops, after their tensors, in the order of `flatten`."""


def flatten(call: Call) -> tuple[Any, ...]:
    """The arguments of the ring ops after their tensors."""
    return _ARGUMENTS.flatten(call)


def unflatten(arguments: tuple[Any, ...]) -> Call:
    """The call that `flatten` made the arguments of."""
    return _ARGUMENTS.unflatten(arguments)


def default_scale(head_dim: int) -> float:
    """The usual softmax scale, one over the square root of the head dim."""
    return 1.0 / sqrt(head_dim) if head_dim else 1.0
