"""The inner attention that leaves keys and values sharded along the sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import ismethod
from typing import Any

import spmd_types as spmd
from spmd_types.runtime import get_local_type, get_partition_spec
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.gpt_oss.model import Attention as GptOssAttention
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig

from dtensor_ring import Mask, SequenceAxis, TransferPolicy
from dtensor_ring.extension import number_layer, within_layer
from parallel_plans.torchtitan.documents import Documents

UNBOUNDED = -1
TENSORS = ("q_BLNH", "k_BLNH", "v_BLNH")


class RingAttention(Module):
    """Stands where torchtitan has `FlexAttention` or `VarlenAttention`.

    Heads stay sharded over the tensor-parallel axis as they were, and so do batches; keys and
    values are not gathered over the context-parallel one: they travel around it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        """Config of `RingAttention`, also in a model that nothing overrides.

        Example:
            >>> RingAttention.Config(window_size=(127, 0), layout="striped").window_size
            (127, 0)
        """

        window_size: tuple[int, int] = (UNBOUNDED, 0)
        """How many tokens before and after itself a query sees, -1 for all, within its document."""

        layout: str = "zigzag"
        """How tokens are dealt to the ranks: "contiguous", "striped", "zigzag", "balanced", or
        "block_cyclic:128" with blocks of that many tokens."""

        kernel: str | None = None
        """Name of the block kernel; by default the first of `available_kernels()` that can."""

        grad_dtype: str | None = None
        """Name of the dtype in which sums of key and value gradients travel: "float32" by default;
        "bfloat16" halves their bytes, see `dtensor_ring.TransferPolicy`."""

        strategy: str | None = None
        """How attention is made parallel, see `dtensor_ring.SequenceAxis`: "ring" by default,
        "ulysses:4" trades tokens for heads over groups of four ranks."""

        def build(self, **kwargs: Any) -> RingAttention:
            """The module; by now the sharding of the attention that it stands for is set."""
            here = self.sharding_config
            config = replace(self, sharding_config=here and _sequence_stays_sharded(here))
            return Module.Config.build(config, **kwargs)  # slots forbid super()

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.window_size = config.window_size  # models that have windows may compile more often
        self.mask = mask_of(self.window_size)
        self.layout, self.kernel = config.layout, config.kernel
        self.strategy = config.strategy
        self.policy = policy_of(config.grad_dtype)
        self.axis: SequenceAxis | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        self.join(parallel_dims)
        super().parallelize(parallel_dims)

    def join(self, parallel_dims: ParallelDims) -> None:
        """Learn which ranks the ring is made of."""
        # A ring of one rank works too, so nothing else has to ask.
        mesh = parallel_dims.get_optional_mesh("cp", include_singleton_axes=True)
        assert mesh is not None
        self.axis = SequenceAxis(mesh, self.layout, kernel=self.kernel, policy=self.policy)
        number_layer(self, mesh)

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        enable_gqa: bool = False,  # heads are grouped as their numbers say
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        """Attention of this rank's tokens, `(B, L, N, H)` to `(B, L, N, Hv)`.

        Raises:
            ValueError: without documents, or with what a ring cannot do.
        """
        axis, documents = self._axis(), _documents(attention_masks)
        refuse(others)
        out = attend(
            *(self, axis, documents, q_BLNH, k_BLNH, v_BLNH),
            mask=self.mask,
            sinks=None if out_transform is None else sinks_of(out_transform),
            scale=scale,
            # Layers share the axis, and may differ in their strategies.
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
    """Attention of this rank's tokens within their documents, `(B, L, N, Hv)`."""
    # The op knows more than types say: no rank holds all keys.
    with within_layer(layer), spmd.no_typecheck():
        return axis.attention(
            *(x.transpose(1, 2) for x in (q_BLNH, k_BLNH, v_BLNH)),
            cu_seqlens=documents.cu_seqlens,
            runs=documents.runs,
            **options,
        ).transpose(1, 2)


def typed_as(query: Tensor, out: Tensor) -> None:
    """Say that an output is sharded as its query, where torchtitan checks such types."""
    if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
        spmd.assert_type(out, get_local_type(query), get_partition_spec(query))


def mask_of(window_size: tuple[int, int]) -> Mask:
    """The mask of a window, see `RingAttention.Config`."""
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
    """The sharding of stock attention without the gathering of keys and values."""
    sources = config.in_src_shardings
    if sources is None or set(sources) != set(TENSORS):
        raise ValueError(
            f"ring attention stands for attention whose sharding names {TENSORS}, got "
            f"{sources and tuple(sources)}"
        )
    grads = LocalMapConfig(in_grad_placements=tuple(sources[name] for name in TENSORS))
    return replace(config, in_dst_shardings=sources, local_map=config.local_map and grads)


def policy_of(grad_dtype: str | None) -> TransferPolicy | None:
    """The policy by which sums of gradients travel in the dtype of that name.

    Raises:
        ValueError: if there is none of that name.
    """
    if grad_dtype is None:
        return None
    if grad_dtype not in TORCH_DTYPE_MAP:
        known = ", ".join(TORCH_DTYPE_MAP)
        raise ValueError(f"unknown grad_dtype {grad_dtype!r}; known dtypes: {known}")
    return TransferPolicy(grad_dtype=TORCH_DTYPE_MAP[grad_dtype])


def sinks_of(out_transform: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The sinks by which gpt-oss transforms the output: for the ring they are one more block.

    Raises:
        ValueError: if it is another transform.
    """
    if not ismethod(out_transform) or out_transform.__func__ is not GptOssAttention._apply_sinks:
        name = getattr(out_transform, "__qualname__", repr(out_transform))
        raise ValueError(
            f"a ring cannot run {name}, which transforms the output by its log-sum-exp: only the "
            "attention sinks of gpt-oss are known"
        )
    attention: Any = out_transform.__self__
    # The local part of a DTensor: heads are sharded as the query's are.
    sinks = attention.sinks
    return sinks.to_local(grad_placements=sinks.placements) if isinstance(sinks, DTensor) else sinks


def refuse(others: dict[str, Any]) -> None:
    """Refuse arguments of an attention that a ring has no use for.

    Raises:
        ValueError: naming them.
    """
    given = [name for name, value in others.items() if value is not None]
    if given:
        raise ValueError(f"ring attention does not take {', '.join(given)}; leave it out")
