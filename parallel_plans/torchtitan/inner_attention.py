"""Define the inner attention that leaves keys and values sharded along the sequence."""

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

import dtensor_ring  # noqa: F401 - registers the op
from dtensor_ring import Mask, SequenceAxis, TransferPolicy
from dtensor_ring.extension import number_layer, within_layer
from parallel_plans.torchtitan.packed_batch import Documents

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
        return axis.attention(
            *(x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH)),
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
