"""The options of the ring op: three values that travel through the dispatcher as flat arguments.

To add an option, add a field to one of these values: the schema follows, see `Arguments`. What else
a new option needs is in CONTRIBUTING.md, "Adding an option".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from math import sqrt
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from dtensor_ring.compute.kernels import Kernel, Scores, kernel_for
from dtensor_ring.ops.boundaries import documents_of_both, run_table, slices_of_table
from dtensor_ring.planning.block_order import block_of, has_whole_blocks
from dtensor_ring.planning.layout import Layout, WholeBlocks
from dtensor_ring.planning.mask import Documents, Mask
from dtensor_ring.planning.plan import Plan, layout_of_groups, plan
from dtensor_ring.planning.run_table import RunTable, as_layout
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import Strategy, as_strategy
from dtensor_ring.transport.transport import DEFAULT_POLICY, TransferPolicy

T = TypeVar("T")


class Call(NamedTuple):
    """The options of a ring call: all arguments but query, key and value.

    If an all-to-all brought keys and values in eight bits, `rounded` are those, which travel on;
    see Note [Rounded once].
    """

    batch: Batch
    scores: Scores
    place: Place
    rounded: Tensor | None = None

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group of the axis."""
        name: Any = self.place.group_name
        return _resolve_process_group(name)

    @property
    def strategy(self) -> Strategy:
        """The strategy of the call."""
        spec: Any = self.place.strategy
        return as_strategy(spec, self.group.size())

    def documents(self, batch: int) -> tuple[Documents | None, Documents | None]:
        """Convert the boundaries of the queries and of the keys for the planner."""
        return documents_of_both(self.batch.cu_seqlens, self.batch.key_cu_seqlens, batch)

    def slices(self, batch: int) -> Slices | None:
        """Convert the slices for the planner, `None` if there are none."""
        given = self.batch.slices
        return None if given is None else slices_of_table(given, batch)

    def request(self, batch: int) -> PlanRequest:
        """Build the planner's arguments."""
        group, spec = self.group, cast(Any, self.place.strategy)
        documents, key_documents = self.documents(batch)
        layout, key_layout, seq_len, key_seq_len = self._layouts()
        is_ordered = batch and self.place.policy.order is not None
        block = self._block((seq_len, key_seq_len)) if is_ordered else None
        return PlanRequest(
            layout=layout,
            mask=self.scores.mask,
            rank=group.rank(),
            world_size=group.size(),
            seq_len=seq_len,
            documents=documents,
            key_seq_len=key_seq_len,
            key_documents=key_documents,
            strategy=as_strategy(spec, group.size()),
            slices=self.slices(batch),
            key_layout=key_layout,
            block=block,
        )

    @property
    def is_ordered(self) -> bool:
        """Whether sums have a fixed order."""
        return self.place.policy.order is not None

    def whole_blocks(self) -> str | None:
        """Return the layout that shards have to get before, for sums in a fixed order.

        `None` if the order is not fixed, or each block already lies on one rank.

        Raises:
            ValueError: if the layout cannot shard the length, or the call has `key_runs`.
        """
        if not self.is_ordered:
            return None
        # After an all-to-all a group of ranks holds its shards as one: only together they need
        # whole blocks.
        layout, _, *seq_lens = self._layouts()
        block, strategy = self._block((seq_lens[0], seq_lens[1])), self.strategy
        layout = layout_of_groups(layout, strategy)
        num_shards = self.group.size() // strategy.heads
        is_whole = all(has_whole_blocks(layout, num_shards, x, block) for x in seq_lens)
        return None if is_whole else WholeBlocks(block).spec

    def in_whole_blocks(self) -> Call:
        """Return the call on shards of whole blocks, see `whole_blocks`."""
        spec = self.whole_blocks()
        if spec is None:
            return self
        return self._replace(
            batch=self.batch._replace(runs=None), place=self.place._replace(layout=spec)
        )

    def _block(self, seq_lens: tuple[int, int]) -> int:
        """Return the tokens of a block of a fixed order."""
        if self.batch.key_runs is not None:
            raise ValueError(
                'order="fixed" has blocks of whole sequences, and key_runs are for queries that '
                "continue one; leave the order out of the policy of this axis"
            )
        return self.place.policy.block or block_of(seq_lens)

    def _layouts(self) -> tuple[Layout, Layout | None, int, int]:
        """Return the layouts of queries and keys, and their global lengths."""
        batch, place = self.batch, self.place
        if batch.key_runs is not None:
            return self._with_key_runs(run_table(batch.key_runs, "key_runs"))
        seq_len, key_seq_len = place.seq_len, place.key_seq_len
        assert seq_len is not None and key_seq_len is not None, "DTensors have said them by now"
        # The named layout only says that it belongs to a batch; the runs are the layout.
        if batch.runs is not None:
            table = run_table(batch.runs)
            table.check_from(0)
            return table, None, seq_len, key_seq_len
        spec: Any = place.layout
        return as_layout(spec), None, seq_len, key_seq_len

    def _with_key_runs(self, keys: RunTable) -> tuple[Layout, RunTable, int, int]:
        """Return the layouts and lengths of queries and keys, where keys have runs."""
        # Both are of one sequence that ends with the queries, or slices say what is seen of
        # another.
        batch, seq_len = self.batch, self.place.seq_len
        is_known = batch.runs is not None or (batch.slices is not None and seq_len is not None)
        if not is_known or batch.key_cu_seqlens is not None:
            found = "key_cu_seqlens, which are another's" if is_known else "no runs"
            raise ValueError(
                "key_runs say which positions of a sequence the keys have, and runs those of the "
                f"queries, whose boundaries are cu_seqlens; got {found}"
            )
        if batch.runs is None:
            spec: Any = self.place.layout
            assert seq_len is not None, "checked above"
            return as_layout(spec), keys, seq_len, keys.end
        queries = run_table(batch.runs)
        if queries.end != keys.end and batch.slices is None:
            raise ValueError(
                f"queries are the last tokens of the keys' sequence, but runs end at {queries.end} "
                f"and key_runs at {keys.end}; slices say what is seen of keys of another sequence"
            )
        return queries, keys, queries.end, keys.end

    def select(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slices: Slices | None = None,
        differentiable_lse: bool = False,
    ) -> Kernel:
        """Return the named kernel, or the first one that supports the call."""
        return kernel_for(*self.facts(query, key, value, slices, differentiable_lse))

    def facts(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slices: Slices | None = None,
        differentiable_lse: bool = False,
    ) -> tuple[Any, ...]:
        """Return what decides `select`, as arguments of `kernel_for`."""
        is_packed = (
            self.batch.cu_seqlens is not None
            or self.scores.mask.chunk is not None
            or slices is not None
        )
        return kernel_facts(
            self.scores,
            query,
            key,
            value,
            is_packed=is_packed,
            slices=slices,
            differentiable_lse=differentiable_lse,
            by_block=self.place.policy.order is not None,
        )


class Leaf(NamedTuple):
    """One argument of the schema."""

    name: str
    path: str
    schema_type: str

    def of(self, call: Any) -> Any:
        """Return the value of this argument in a call."""
        value = call
        for name in self.path.split("."):
            value = getattr(value, name)
        return value


_SCHEMA_TYPES = {
    "Tensor | None": "Tensor?",
    "int | None": "int?",
    "Length | None": "SymInt?",
    "str | None": "str?",
    "int": "int",
    "tuple[int, ...]": "int[]",
    "tuple[int, ...] | None": "int[]?",
    "bool": "bool",
    "float": "float",
    "torch.dtype | None": "ScalarType?",
}


class Arguments(Generic[T]):
    """Maps a nested value of options to the flat arguments of an op.

    Args:
        owner: type of the value.
        nested: types of all values within it: named tuples, or classes that check their fields.
            A class with a `spec` is one argument, that text, from which its `of_spec` makes it.

    Attributes:
        leaves: the arguments, in the order of `flatten`.
        schema: the arguments as a schema string, in the same order.
    """

    def __init__(self, owner: Callable[..., T], *nested: Any) -> None:
        self._nested = {kind.__name__: kind for kind in nested}
        self.leaves = tuple(self._leaves(owner))
        self.schema = ", ".join(f"{leaf.schema_type} {leaf.name}" for leaf in self.leaves)

        self._owner, self._values = owner, self._within(owner, 0)
        self._get = attrgetter(*(leaf.path for leaf in self.leaves))

    def flatten(self, call: T) -> tuple[Any, ...]:
        """Return the arguments of the op after its tensors."""
        if torch.compiler.is_compiling():  # a compiler follows Python only
            return tuple(leaf.of(call) for leaf in self.leaves)
        return self._get(call)

    def unflatten(self, arguments: tuple[Any, ...]) -> T:
        """Return the value from which `flatten` made these arguments."""
        fields = list(arguments)
        for make, begin, end in self._values:
            fields[begin:end] = [make(*fields[begin:end])]
        return self._owner(*fields)

    def _leaves(self, owner: Any, path: str = "") -> Iterator[Leaf]:
        for name, kind in _members(owner):
            nested = self._nested.get(kind)
            # A layout travels as a text, from which every rank can make it.
            if nested is not None and hasattr(nested, "of_spec"):
                yield Leaf(name, f"{path}{name}.spec", "str")
            elif nested is not None:
                yield from self._leaves(nested, f"{path}{name}.")
            else:
                yield Leaf(name, path + name, _SCHEMA_TYPES[kind])

    def _within(self, owner: Any, begin: int) -> list[tuple[Callable[..., Any], int, int]]:
        """Return how to make each value within an `owner`, and the span of its fields."""
        # Later values come first, and inner values before outer ones: making one moves no fields of
        # those that follow. The fields of the `owner` begin at `begin`.
        values: list[tuple[Callable[..., Any], int, int]] = []
        for _, kind in _members(owner):
            nested = self._nested.get(kind)
            if nested is None:
                begin += 1
                continue
            if hasattr(nested, "of_spec"):
                values = [(lru_cache(maxsize=256)(nested.of_spec), begin, begin + 1), *values]
                begin += 1
                continue
            # Checking costs, and layers pass the same values in every call: make each one once.
            make = nested if issubclass(nested, tuple) else lru_cache(maxsize=256)(nested)
            whole = make, begin, begin + len(_members(nested))
            values = [*self._within(nested, begin), whole, *values]
            begin += len([*self._leaves(nested)])
        return values


def _members(owner: Any) -> list[tuple[str, str]]:
    """Return the name and the annotated type of each field."""
    return [(name, _annotation(kind)) for name, kind in owner.__annotations__.items()]


def _annotation(kind: Any) -> str:
    """Return an annotation as the file writes it; `NamedTuple` wraps it in a `ForwardRef`."""
    return getattr(kind, "__forward_arg__", kind)


# A global length in tokens. While compiling it may be a symbol.
Length = int

TOKEN_MAJOR_HINT = (
    "; tensors are (B, N, S, H): if these are (B, S, N, H), as in flash-attn, use transpose(1, 2)"
)


def group_named(name: Any) -> dist.ProcessGroup:
    """Return the process group of a name."""
    return _resolve_process_group(name)


class Batch(NamedTuple):
    """Integer tensors that differ from batch to batch, see `ring_attention`."""

    cu_seqlens: Tensor | None = None
    key_cu_seqlens: Tensor | None = None
    runs: Tensor | None = None
    slices: Tensor | None = None
    key_runs: Tensor | None = None


class Place(NamedTuple):
    """Where the tokens are, and how they are moved.

    For DTensors, the placements and the axis decide, and only a strategy may be given. If the batch
    has runs of queries and of keys, the lengths follow from them. Where a machine chose the
    strategy, the call names it, so that ranks compare their machines.
    """

    layout: str | None = None
    strategy: str | None = None
    seq_len: Length | None = None
    key_seq_len: Length | None = None
    group_name: str | None = None
    policy: TransferPolicy = DEFAULT_POLICY
    machine: str | None = None


# The place of a call on DTensors. A constant: compilers cannot follow a default that is an object.
ON_DTENSORS = Place()


def on_dtensors(strategy: str | None) -> Place:
    """Return the place of a call on DTensors, with the call's own strategy if given."""
    return ON_DTENSORS if strategy is None else ON_DTENSORS._replace(strategy=strategy)


class PlanRequest(NamedTuple):
    """The planner's arguments, in the order of the parameters of `plan`."""

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
    block: int | None = None

    @property
    def num_bytes(self) -> int:
        """Estimated memory of runs, boundaries and slices, in bytes: a cache counts its keys."""
        return sum(getattr(x, "num_bytes", 0) for x in self)

    def plan(self, query: Tensor, key: Tensor) -> Plan:
        """Make this rank's plan.

        Raises:
            ValueError: if shards do not have the length that follows from the global length, or
                the layout, the boundaries or the strategy do not allow this attention.
        """
        try:
            result = plan(*self)
        except ValueError as error:
            if self._seem_token_major(query, key):
                raise ValueError(f"{error}{TOKEN_MAJOR_HINT}") from error
            raise
        # Kernels would read out of bounds in a shard of another length.
        sides = (query, self.seq_len, self.layout), (key, self.key_seq_len, self.key_layout)
        for (x, whole, layout), expected in zip(sides, result.num_local, strict=True):
            if x.shape[2] != expected:
                raise ValueError(
                    f"rank {self.rank} of {self.world_size} holds {x.shape[2]} tokens, but its "
                    f"shard of {_length_source(layout or self.layout, whole)} has {expected}"
                )
        return result

    def _seem_token_major(self, query: Tensor, key: Tensor) -> bool:
        """Return whether tensors may be `(B, S, N, H)`, so that heads were taken for tokens."""
        (num_heads, num_tokens), (num_key_heads, num_keys) = query.shape[1:3], key.shape[1:3]
        if num_heads <= num_tokens:
            return False
        ends = [row[-1] for row in self.documents.arrays if row.size] if self.documents else []
        fit_heads = any(self.seq_len < end <= num_heads * self.world_size for end in ends)
        # With `key_layout`, fewer queries than keys are normal.
        differ = self.key_layout is None and num_tokens != num_keys
        return fit_heads or (num_heads == num_key_heads and differ)


def _length_source(layout: Layout, seq_len: int) -> str:
    """Name the argument that sets the number of tokens of a rank, for an error."""
    return layout.argument if isinstance(layout, RunTable) else f"seq_len {seq_len}"


def kernel_facts(
    scores: Scores,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_packed: bool,
    slices: Slices | None = None,
    differentiable_lse: bool = False,
    by_block: bool = False,
    fleeting: bool = False,
) -> tuple[Any, ...]:
    """Return the arguments of `kernel_for` for an attention.

    Args:
        scores: how queries score keys.
        query: `(B, N, L, H)`, or `(B, N, L, H + E)` with a bias by distance.
        key: `(B, Nkv, C, H)`.
        value: `(B, Nkv, C, Hv)`.
        is_packed: whether a step may have any number of tiles.
        slices: what queries see, if the call has slices.
        differentiable_lse: whether backward gets a gradient of lse.
        by_block: whether sums have a fixed order, see `Kernel.bitwise_by_block`.
        fleeting: whether each call has tiles of its own, as those to a cache.
    """
    mask, scale, softcap, _, kernel, *_ = scores
    _, num_heads, _, width = query.shape
    head_dim = key.shape[3]
    _, num_key_heads, _, value_head_dim = value.shape
    # The planner cuts other bands into squares, so only these need a kernel with windows.
    is_windowed = mask.left is not None if slices is None else slices.are_windowed
    return (
        kernel,
        query.device.type,
        query.dtype,
        head_dim,
        value_head_dim,
        scale,
        softcap,
        differentiable_lse,
        is_windowed,
        num_heads != num_key_heads,
        is_packed,
        scores.dropout_p > 0,
        by_block,
        fleeting,
        width > head_dim,
    )


_ARGUMENTS = Arguments(Call, Batch, Scores, Place, Mask, TransferPolicy)
# The arguments of the ring ops after their tensors, in the order of `flatten`.
LEAVES, SCHEMA = _ARGUMENTS.leaves, _ARGUMENTS.schema


def flatten(call: Call) -> tuple[Any, ...]:
    """Return the arguments of the ring ops after their tensors."""
    return _ARGUMENTS.flatten(call)


def unflatten(arguments: tuple[Any, ...]) -> Call:
    """Return the call from which `flatten` made these arguments."""
    return _ARGUMENTS.unflatten(arguments)


def default_scale(head_dim: int) -> float:
    """Return the usual softmax scale, one over the square root of the head dim."""
    return 1.0 / sqrt(head_dim) if head_dim else 1.0
