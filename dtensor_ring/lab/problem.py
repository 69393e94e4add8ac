"""One attention whose time is asked for: its mask, layout and sizes, and a config's entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import torch
from typing_extensions import TypedDict

from dtensor_ring.all_to_all.plan import HeadShard
from dtensor_ring.balanced.balanced import check_seen, layout_for
from dtensor_ring.lab.fields import read_json
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Boundaries, Documents, Mask, as_documents
from dtensor_ring.planning.plan import PlanInputs, check_documents, checked_slices, plan_inputs
from dtensor_ring.planning.ranges import MAX_RANKS, as_count, length
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import Strategy, as_strategy, why_not
from dtensor_ring.planning.tile import FULL
from dtensor_ring.transport.transport import DEFAULT_POLICY, TransferPolicy


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
        reason = self.why_not(strategy)
        if reason is not None:
            raise ValueError(f"the strategy {strategy.spec!r} cannot run this attention: {reason}")
        return strategy

    def why_not(self, strategy: Strategy) -> str | None:
        """Return why a strategy cannot run this attention; `None` if it can."""
        num_heads, num_key_heads = self.sizes.heads
        return why_not(strategy, num_heads, num_key_heads)

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


class TensorSizes(NamedTuple):
    """The sizes of the tensors of an attention.

    Attributes:
        heads: number of query heads, and of key and value heads.
        head_dims: head dim of queries and keys, and of values.
        batch: rows of the batch.
        dtype: dtype of query, key and value.
        kv_dtype: dtype of keys and values in messages; one of 8 bits has scales.
        sum_dtype: dtype of key and value gradient sums in messages.
    """

    heads: tuple[int, int]
    head_dims: tuple[int, int]
    batch: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    sum_dtype: torch.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of a number of query, key and value."""
        return self.dtype.itemsize

    @property
    def wide_itemsize(self) -> int:
        """Bytes of a number that results are merged in: float32 or wider."""
        return max(4, self.itemsize)

    def heads_of(self, shard: HeadShard | None) -> tuple[int, int]:
        """Return the query and key heads of a shard of the heads; all of them without one."""
        if shard is None:
            return self.heads
        query, key = (length(shard.span(count, self.heads[1])) for count in self.heads)
        return query, key


def _tensor_sizes(
    heads: Any, head_dim: Any, batch: int, dtype: Any, policy: TransferPolicy
) -> TensorSizes:
    """Check heads, their dims and the dtype, and return the sizes."""
    if not isinstance(heads, Sequence) or len(heads) != 2:
        raise TypeError(f"heads must be two numbers, of queries and of keys, got {heads!r}")
    query, key = (as_count("heads", count, 1) for count in heads)
    if query % key:
        raise ValueError(f"heads of queries must be a multiple of those of keys, got {heads}")
    kind = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise TypeError(f"dtype must be floating, such as torch.bfloat16, got {dtype!r}")
    if not isinstance(policy, TransferPolicy):
        raise TypeError(
            f"policy must be a TransferPolicy, such as TransferPolicy(), got {policy!r}"
        )
    dim = as_count("head_dim", head_dim)
    return TensorSizes(
        heads=(query, key),
        head_dims=(dim, dim),
        batch=batch,
        dtype=kind,
        kv_dtype=policy.dtype_of_keys(kind),
        sum_dtype=policy.sum_dtype(kind),
    )


def text_entries(config: Any) -> Mapping[str, Any]:
    """Return the entries of a config; those of the text model, where there are others too.

    Raises:
        TypeError: if it is no mapping, no path and no config of transformers.
        ValueError: if there is no such file.
    """
    if isinstance(config, str | Path):
        config = config_json(Path(config))
    elif not isinstance(config, Mapping) and callable(getattr(config, "to_dict", None)):
        config = config.to_dict()
    config = config.get("text_config", config) if isinstance(config, Mapping) else config
    if not isinstance(config, Mapping):
        raise TypeError(
            f"config must be a mapping, a config.json or its folder, got {type(config).__name__}"
        )
    return config


def config_json(path: Path) -> Any:
    """Return what a `config.json` has, given its path or that of its folder.

    Raises:
        ValueError: if it cannot be read or is not JSON.
    """
    path = path / "config.json" if path.is_dir() else path
    return read_json(path, f"config {path}")


class ProblemOptions(TypedDict, total=False, closed=True):
    """Options of an attention whose time is asked for; `simulate_attention` explains them."""

    slices: Slices | None
    layout: Layout | str
    batch: int
    dtype: torch.dtype | str
    policy: TransferPolicy
    kernel: str | None


def refuse_unknown(function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Refuse what is no option, as Python refuses an argument that a function does not have.

    Args:
        function: the public function that was called.
        options: what it was given as `ProblemOptions`.

    Raises:
        TypeError: with the option, and the one that was meant.
    """
    for name in options.keys() - ProblemOptions.__annotations__:
        known = [*signature(function).parameters, *ProblemOptions.__annotations__]
        meant = "".join(f"; did you mean {x!r}?" for x in get_close_matches(name, known, 1))
        raise TypeError(f"{function.__name__}() got an unexpected keyword argument {name!r}{meant}")


def checked_attention(
    mask: Mask | None,
    seq_len: Any,
    world_size: Any,
    cu_seqlens: Boundaries | None,
    slices: Slices | None,
) -> tuple[int, int, Documents | None]:
    """Check what an attention sees, and return its length, ranks and documents.

    Numbers become integers, as they are cache keys: 8.0 would equal 8.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a number is out of range, or the boundaries do not fit the sequence.
    """
    check_seen(mask, slices)
    num_ranks = as_count("world_size", world_size, 1, MAX_RANKS)
    documents = as_documents(cu_seqlens)
    length = as_count("seq_len", seq_len)
    check_documents(num_ranks, length, documents)
    return length, num_ranks, documents


# Pairs of query and key of a rank, over all heads, whose number fits 64 bits.
MAX_PAIRS = 2**62


def problem_of(
    mask: Mask | None,
    seq_len: Any,
    world_size: Any,
    heads: Any,
    head_dim: Any,
    cu_seqlens: Boundaries | None,
    *,
    slices: Slices | None = None,
    layout: Layout | str = "zigzag",
    batch: Any = 1,
    dtype: Any = torch.bfloat16,
    policy: TransferPolicy = DEFAULT_POLICY,
    kernel: str | None = None,
) -> SimulatedProblem:
    """Check the arguments of an attention, see `simulate_attention`.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a number is out of range, the layout is unknown or does not fit the length,
            or the boundaries do not fit the sequence.
    """
    length, num_ranks, documents = checked_attention(mask, seq_len, world_size, cu_seqlens, slices)
    # Boundaries or slices by row give the number of rows.
    rows = max(len(x) for x in (documents or (), slices or ()))
    sizes = _tensor_sizes(heads, head_dim, max(as_count("batch", batch), rows), dtype, policy)
    if length**2 * sizes.batch * sizes.heads[0] > MAX_PAIRS * num_ranks:
        raise ValueError(
            f"seq_len {length:,} with batch {sizes.batch:,} and {sizes.heads[0]} heads has more "
            f"pairs of tokens for each of {num_ranks} ranks than {MAX_PAIRS:,}, which is all that "
            "is counted: take fewer tokens, or more ranks"
        )
    return SimulatedProblem(
        layout=layout_for(layout, mask, length, num_ranks, documents, slices),
        mask=mask,
        seq_len=length,
        world_size=num_ranks,
        documents=documents,
        slices=slices,
        sizes=sizes,
        dtype=str(sizes.dtype).removeprefix("torch."),
        num_parts=policy.num_parts,
        kernel=kernel,
    )
