"""The inner attention that leaves keys and values sharded, and the documents of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import ismethod
from typing import Any

import spmd_types as spmd
import torch
from spmd_types.runtime import get_local_type, get_partition_spec
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

from dtensor_ring import Balanced, Mask, SequenceAxis, TransferPolicy, sequence_runs
from dtensor_ring.extension import (
    Layout,
    as_layout,
    check_agreement,
    number_layer,
    positions_of,
    within_layer,
)
from parallel_plans.sequences import SequenceOrder, boundaries, filled_boundaries

# Why a CUDA graph is refused, and what to give instead.
CUDA_GRAPHS = (
    "its replays would have the documents of one batch for all others",
    "give --training.disable_cuda_graphs",
)


@dataclass(frozen=True)
class Documents:
    """What attention needs to know of a batch; models pass it as `attention_masks`.

    It is not a tuple: fully_shard moves the tensors in a model's tuples to the device, but
    boundaries are read on the CPU.

    Attributes:
        cu_seqlens: boundaries of the packed documents, int32 on the CPU, `(S+1,)` or `(B, S+1)`.
        runs: which tokens each rank holds, `(W, R, 2)`, if the layout is made for each batch.
    """

    cu_seqlens: Tensor
    runs: Tensor | None = None


@dataclass(frozen=True)
class OwnTokens:
    """Which tokens of a batch a rank has; nothing else of the batch is kept.

    Attributes:
        documents: what attention needs to know of the batch.
        indices: places in a row of this rank's tokens, in its order, `(L,)`.
    """

    documents: Documents
    indices: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Return this rank's part of a tensor `(B, S)`, in new memory."""
        return x.index_select(1, self.indices.to(x.device))


# Names of a batch's tensors besides its labels; all are `(B, S)`.
TENSORS_OF_BATCH = {"input", "positions"}


def own_tokens(batch: dict[str, Any], layout: str, rank: int, world_size: int) -> OwnTokens:
    """Return which tokens of a whole batch a rank has, and its documents.

    Args:
        batch: `input` and `positions`, both `(B, S)`; positions are 0 where a document starts.
        layout: spec of the layout; the balanced one is made for the documents of this batch.
        rank: this rank.
        world_size: ranks of the ring.

    Raises:
        ValueError: if the batch holds anything else, or the layout cannot shard it.
    """
    if batch.keys() != TENSORS_OF_BATCH:
        raise ValueError(
            f"a ring shards {sorted(TENSORS_OF_BATCH)} and labels, but the batch holds "
            f"{sorted(batch)}: use a data loader of text"
        )
    seq_len = batch["input"].shape[1]
    # Boundaries are in global positions, and all of them on each rank.
    cu_seqlens = boundaries(batch["positions"] == 0)
    chosen, runs = as_layout(layout), None
    if chosen.per_batch:
        chosen = _balanced(cu_seqlens, seq_len, world_size)
        runs = sequence_runs(chosen)
    indices = positions_of(chosen.runs(rank, world_size, seq_len))
    return OwnTokens(Documents(cu_seqlens, runs), indices)


def _balanced(cu_seqlens: Tensor, seq_len: int, world_size: int) -> Balanced:
    """Return the layout that balances causal attention within documents."""
    return Balanced(Mask.causal(), seq_len, world_size, cu_seqlens)


def gather_documents(positions: Tensor, layout: Layout, mesh: DeviceMesh) -> Documents:
    """Return the documents of a batch from this rank's slice of the positions, `(B, L)`.

    Raises:
        ValueError: on every rank, if the positions show that tokens are not in the order of the
            layout. They cannot show it if whole documents fill the runs of the layout.
    """
    # torchtitan's own trainers have no layout per batch.
    if not layout.per_batch:
        seq_len = positions.shape[1] * mesh.size()
        order = SequenceOrder(mesh, layout, seq_len)
        own = order.contiguous(positions.contiguous())
        before = order.of_neighbour(own[:, -1:], -1)
        # In a packed batch a position is 0, or one more than that before it. If some are neither,
        # the tokens were sharded in another order than this layout's.
        follows = (
            own == torch.cat([own[:, :1] - 1 if before is None else before, own[:, :-1]], 1) + 1
        )
        starts = (own == 0).nonzero() + torch.tensor([0, order.begin], device=own.device)
        told = bool(((own == 0) | follows).all()), starts.cpu()
        # A rank cannot know from its own positions where documents end on others.
        every = check_agreement(mesh.get_group(), {}, "share a batch", told=told)
        if all(is_in_order for is_in_order, _ in every):
            found = torch.cat([x for _, x in every])
            # Ranks have ascending parts of each row, so a stable sort by row leaves them in order.
            found = found[found[:, 0].argsort(stable=True)]
            return Documents(filled_boundaries(found, len(positions), seq_len))
    raise ValueError(
        f"the tokens of this batch were not sharded {layout.spec}: torchtitan's own trainers shard "
        "as --parallelism.context_parallel_load_balancer says, in two of our layouts, and that "
        "must fit ring_attention's, see docs/torchtitan.md; for any layout, start from a config of "
        "parallel_plans.torchtitan, or use its RingTrainer"
    )


UNBOUNDED = -1
TENSORS = ("q_BLNH", "k_BLNH", "v_BLNH")


class RingAttention(Module):
    """Ring attention in place of torchtitan's `FlexAttention` or `VarlenAttention`.

    The sharding of heads and batches does not change. Keys and values are not gathered over the
    context-parallel axis: they travel around it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Config of `RingAttention`, which works in a model's config without an override too.

        Attributes:
            window_size: how many tokens before and after itself a query sees in its document, -1
                for all.
            layout: how tokens are sharded: "contiguous", "striped", "zigzag", "balanced", or
                "block_cyclic:128" with blocks of that many tokens.
            kernel: name of the block kernel; by default the first of `available_kernels()` that
                can.
            grad_dtype: name of the dtype in which sums of key and value gradients travel. It is
                "float32" by default; "bfloat16" halves its bytes, see
                `dtensor_ring.TransferPolicy`.
            kv_dtype: name of the dtype in which keys and values travel. It is their own by
                default; "int8" and "fp8" send 8 bits, see `dtensor_ring.TransferPolicy`.
            strategy: how attention is made parallel, see `dtensor_ring.SequenceAxis`. It is "ring"
                by default; "ulysses:4" does an all-to-all over groups of four ranks.
            machine: what the strategy "auto" simulates, see `use_ring`.

        Example:
            >>> RingAttention.Config(window_size=(127, 0), layout="striped").window_size
            (127, 0)
        """

        window_size: tuple[int, int] = (UNBOUNDED, 0)
        layout: str = "zigzag"
        kernel: str | None = None
        grad_dtype: str | None = None
        kv_dtype: str | None = None
        strategy: str | None = None
        machine: str | None = None

        def build(self, **kwargs: Any) -> RingAttention:
            """Build the module; torchtitan has set the replaced attention's sharding by now."""
            here = self.sharding_config
            config = replace(self, sharding_config=here and _sequence_stays_sharded(here))
            return Module.Config.build(config, **kwargs)  # slots forbid super()

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window_size = config.window_size  # torchtitan reads it to raise the recompile limit
        self.mask = mask_of(self.window_size)
        self.layout, self.kernel = config.layout, config.kernel
        self.strategy, self.machine = config.strategy, config.machine
        self.policy = policy_of(config.grad_dtype, config.kv_dtype)
        self.axis: SequenceAxis | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        self.join(parallel_dims)
        super().parallelize(parallel_dims)

    def join(self, parallel_dims: ParallelDims) -> None:
        """Make the axis of the ring from the context-parallel ranks."""
        # A ring of one rank works too, so no other code has to distinguish.
        mesh = parallel_dims.get_optional_mesh("cp", include_singleton_axes=True)
        assert mesh is not None
        self.axis = self.axis_of(mesh)
        number_layer(self, mesh)

    def axis_of(self, mesh: DeviceMesh) -> SequenceAxis:
        """Return the axis of this attention over the ranks of a mesh."""
        how = {"kernel": self.kernel, "policy": self.policy, "machine": self.machine}
        return SequenceAxis(mesh, self.layout, **how)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,  # ignored: head counts imply it
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        """Compute attention of this rank's tokens, `(B, L, N, H)` to `(B, L, N, Hv)`.

        Raises:
            ValueError: if documents are missing, or an argument is not supported by a ring.
        """
        axis, documents = self._axis(), _documents(attention_masks)
        refuse(others)
        out = attend(
            self,
            axis,
            documents,
            q_BLNH,
            k_BLNH,
            v_BLNH,
            mask=self.mask,
            sinks=None if out_transform is None else sinks_of(out_transform),
            scale=scale,
            # Layers share the axis, but may have different strategies.
            strategy=self.strategy,
        )
        typed_as(q_BLNH, out)
        return out

    def _axis(self) -> SequenceAxis:
        if self.axis is None:
            raise ValueError(
                "ring attention has no ranks: it was not parallelized. The partial_dtensor backend "
                "leaves it out unless training starts from a config of parallel_plans.torchtitan"
            )
        return self.axis


def attend(
    layer: Module,
    axis: SequenceAxis,
    documents: Documents,
    q_BLNH: Tensor,
    k_BLNH: Tensor,
    v_BLNH: Tensor,
    **options: Any,
) -> Tensor:
    """Compute attention of this rank's tokens within their documents, `(B, L, N, Hv)`."""
    # Types cannot express that the op attends to keys of other ranks, so they are not checked.
    with within_layer(layer), spmd.no_typecheck():
        query, key, value = (x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH))
        return axis.attention(
            query,
            key,
            value,
            cu_seqlens=documents.cu_seqlens,
            runs=documents.runs,
            **options,
        ).transpose(1, 2)


def typed_as(query: Tensor, out: Tensor) -> None:
    """Declare that an output is sharded like its query, where torchtitan checks SPMD types."""
    if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
        spmd.assert_type(out, get_local_type(query), get_partition_spec(query))


def mask_of(window_size: tuple[int, int]) -> Mask:
    """Return the mask of a window, see `RingAttention.Config`."""
    left, right = (None if x == UNBOUNDED else x for x in window_size)
    return Mask(left, right)


def _documents(attention_masks: Any) -> Documents:
    if not isinstance(attention_masks, Documents):
        raise ValueError(
            "ring attention takes the documents of the batch as attention_masks, got "
            f"{type(attention_masks).__name__}: start from a config of parallel_plans.torchtitan, "
            "or give --override.imports parallel_plans.torchtitan.ring_attention"
        )
    return attention_masks


def _sequence_stays_sharded(config: ShardingConfig) -> ShardingConfig:
    """Return the sharding of stock attention without the gathering of keys and values."""
    sources = config.in_src_shardings
    if sources is None or set(sources) != set(TENSORS):
        raise ValueError(
            f"ring attention replaces attention whose sharding names {TENSORS}, got "
            f"{sources and tuple(sources)}"
        )
    grads = LocalMapConfig(in_grad_placements=tuple(sources[name] for name in TENSORS))
    return replace(config, in_dst_shardings=sources, local_map=config.local_map and grads)


def policy_of(grad_dtype: str | None, kv_dtype: str | None) -> TransferPolicy | None:
    """Return the policy that sends sums of gradients, and keys and values, in named dtypes.

    Raises:
        ValueError: if no dtype has that name.
    """
    named = {"grad_dtype": grad_dtype, "kv_dtype": kv_dtype}
    given = {x: _dtype_of(x, name) for x, name in named.items() if name is not None}
    return TransferPolicy(**given) if given else None


def _dtype_of(option: str, name: str) -> Any:
    """Return a dtype by torchtitan's name, or that of a format of `TransferPolicy`."""
    known = TORCH_DTYPE_MAP | ({"int8": "int8", "fp8": "fp8"} if option == "kv_dtype" else {})
    if name not in known:
        raise ValueError(f"unknown {option} {name!r}; known dtypes: {', '.join(known)}")
    return known[name]


def sinks_of(out_transform: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return the sinks with which gpt-oss transforms the output; the ring merges them itself.

    Raises:
        ValueError: if this is another transform.
    """
    if not ismethod(out_transform) or out_transform.__func__ is not GptOssAttention._apply_sinks:
        name = getattr(out_transform, "__qualname__", repr(out_transform))
        raise ValueError(
            f"a ring cannot run {name}, which transforms the output by its log-sum-exp: only the "
            "attention sinks of gpt-oss are known"
        )
    attention: Any = out_transform.__self__
    # Take the local part of a DTensor: its heads are sharded like the query's.
    sinks = attention.sinks
    return sinks.to_local(grad_placements=sinks.placements) if isinstance(sinks, DTensor) else sinks


def refuse(others: dict[str, Any]) -> None:
    """Refuse arguments that ring attention does not support.

    Raises:
        ValueError: if one is not `None`.
    """
    refused = [name for name, value in others.items() if value is not None]
    if refused:
        raise ValueError(f"ring attention does not take {', '.join(refused)}; leave it out")


RING_ATTENTION = torch.ops.dtensor_ring.ring_attention.default


class RingSelectiveAC(SelectiveAC):
    """torchtitan's selective policy, but backward does not run the forward of a ring again."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """Config of `RingSelectiveAC`."""

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | {RING_ATTENTION}
