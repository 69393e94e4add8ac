"""Make the ring a kernel of torchtitan's `ContextParallelTransform`, which is not released yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field, make_dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config.override import override
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.spmd_types import current_spmd_mesh
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module

from dtensor_ring import SequenceAxis
from dtensor_ring.extension import number_layer
from parallel_plans.strategies import Strategies
from parallel_plans.tested import warn_untested
from parallel_plans.torchtitan import inner_attention
from parallel_plans.torchtitan.inner_attention import Documents

# What a config has beside the fields of torchtitan's attention.
FIELDS = ("strategy", "kernel", "grad_dtype", "kv_dtype", "machine")


# Note [Seam]: after 0.3.0, torchtitan puts context-parallel attention into a model by a transform
# of its config, `ContextParallelTransform(kernel=...)`. A kernel is a class that inherits an
# attention and `ContextParallelKernel`, whose `cp_group` is the group of the current SPMD mesh. It
# gets folded local tensors `(T, N, H)` of contiguous tokens. Its config sets
# `shard_attention_mask`, so that boundaries of documents stay in global positions. These names
# still change, so both classes are arguments here, and this file needs only names of torchtitan
# 0.3.0.
def ring_kernel(attention: type[Module], capability: type) -> type[Module]:
    """Return a class of ring attention for `ContextParallelTransform(kernel=...)`.

    Args:
        attention: torchtitan's class of attention with variable lengths. Its config has a
            `window_size`, and the kernel's config inherits its fields.
        capability: torchtitan's class that kernels for context parallelism inherit,
            `ContextParallelKernel`.

    Returns:
        A class whose `Config` has four more fields: `strategy`, for all layers or by kind of
        attention, and `machine`, see `use_ring`; `kernel`, name of the block kernel; and
        `grad_dtype` and `kv_dtype`, see `RingAttention.Config`.

    Example:
        >>> from torchtitan.models.common.attention import VarlenAttention
        >>> class ContextParallelKernel: ...
        >>> Kernel = ring_kernel(VarlenAttention, ContextParallelKernel)
        >>> Kernel.Config(window_size=(127, 0), strategy={"sliding": "ring"}).build().strategy
        'ring'
    """
    warn_untested("torchtitan")
    # Some versions of the capability have a config too. Only one base can have slots.
    bases = tuple(x.Config for x in (capability, attention) if hasattr(x, "Config"))
    name = f"Ring{attention.__name__}"
    # Boundaries stay global, and heads need not divide: our Ulysses shards any number.
    declared = {"shard_attention_mask": False, "shard_attention_heads": False}
    config = make_dataclass(
        "Config",
        [(name, str | None, field(default=None)) for name in FIELDS],
        bases=bases,
        namespace=declared | {"__qualname__": f"{name}.Config"},
        kw_only=True,
        slots=True,
    )
    return type(name, (_RingKernel, capability, attention), {"Config": config})


class _RingKernel(Module):
    """A mixin that makes an attention of torchtitan run over the ring."""

    window_size: tuple[int, int]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.mask = inner_attention.mask_of(self.window_size)
        self.strategy = Strategies.of(config.strategy).named(self.mask)
        self.kernel = config.kernel
        self.policy = inner_attention.policy_of(config.grad_dtype, config.kv_dtype)
        self.machine = config.machine
        self.axis: SequenceAxis | None = None

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        # Make the axis before anything is compiled: a compiler cannot trace this.
        mesh = parallel_dims.get_optional_mesh("cp", include_singleton_axes=True)
        assert mesh is not None
        self.axis = self._axis_of(mesh)
        number_layer(self, mesh)
        super().parallelize(parallel_dims)

    def _axis_of(self, mesh: DeviceMesh, layout: str = "contiguous") -> SequenceAxis:
        how = {"kernel": self.kernel, "policy": self.policy, "machine": self.machine}
        return SequenceAxis(mesh, layout, **how)

    def forward(
        self,
        q_THK: Tensor,
        k_THK: Tensor,
        v_THV: Tensor,
        *,
        attention_masks: Any = None,
        attention_metadata: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,  # ignored: head counts imply it
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **others: Any,
    ) -> Tensor:
        """Compute attention of this rank's tokens, `(T, N, H)` to `(T, N, Hv)`.

        Args:
            q_THK: queries of the local tokens of all sequences, one sequence after the other.
            k_THK: likewise, keys.
            v_THV: likewise, values.
            attention_masks: has `cu_seq_q`, the boundaries of documents in the global sequence.
            attention_metadata: the name of `attention_masks` in later versions.
            scale: factor of the scores.
            enable_gqa: whether there are fewer key heads.
            out_transform: transform of attention sinks, if any.
            others: arguments that a ring does not support; all must be `None`.

        Raises:
            ValueError: if documents are missing, or an argument is not supported by a ring.
        """
        metadata = attention_masks if attention_metadata is None else attention_metadata
        documents = _documents_of(metadata)
        inner_attention.refuse(others)
        if self.axis is None:
            self.axis = self._axis_of(_current_mesh())
        query, key, value = (x.unsqueeze(0) for x in (q_THK, k_THK, v_THV))
        out = inner_attention.attend(
            self,
            self.axis,
            documents,
            query,
            key,
            value,
            mask=self.mask,
            sinks=None if out_transform is None else inner_attention.sinks_of(out_transform),
            scale=scale,
            strategy=self.strategy,
        ).squeeze(0)
        inner_attention.typed_as(q_THK, out)
        return out

    @staticmethod
    def prepare_cp_metadata(attention_metadata: Any, *, permutation: Tensor | None) -> Documents:
        """Return the documents of a batch, on the CPU for all layers; later versions call this.

        Raises:
            ValueError: if a load balancer has permuted the tokens.
        """
        if permutation is not None:
            raise ValueError(
                "a load balancer has permuted the tokens, which this kernel takes in their order: "
                'give --parallelism.context_parallel_load_balancer None; strategies with "ulysses" '
                "are balanced by themselves, and the configs of parallel_plans.torchtitan take any "
                "layout"
            )
        documents = _documents_of(attention_metadata)
        return Documents(documents.cu_seqlens.cpu())


def _documents_of(metadata: Any) -> Documents:
    """Return the documents in the metadata of attention with variable lengths."""
    if isinstance(metadata, Documents):
        return metadata
    cu_seqlens = getattr(metadata, "cu_seq_q", None)
    if not isinstance(cu_seqlens, Tensor):
        raise ValueError(
            "a ring reads documents off cu_seq_q, as attention with variable lengths has it, got "
            f'{type(metadata).__name__}; give the model attn_backend="varlen"'
        )
    if metadata.max_q != metadata.max_k or metadata.cu_seq_k.shape != cu_seqlens.shape:
        raise ValueError("keys have documents of their own, and this kernel is for self-attention")
    return Documents(cu_seqlens)


def _current_mesh() -> DeviceMesh:
    """Return the mesh of the ranks that share a sequence."""
    mesh = current_spmd_mesh()
    if mesh is None or "cp" not in (mesh.mesh_dim_names or ()):
        raise ValueError(
            "this kernel has no ranks: it was not parallelized, and there is no SPMD mesh with an "
            "axis named cp"
        )
    return mesh["cp"]


@override(target=Decoder.Config, description="strategies of attention over the ring")
def ring_strategy(
    config: Decoder.Config,
    *,
    strategy: str | dict[str, str] | None = None,
    machine: str | None = None,
) -> Decoder.Config:
    """Set the strategies of a model with `ring_kernel` or `use_ring`, as an override.

        --override.imports 'parallel_plans.torchtitan.ring_strategy={"strategy":"ulysses:4"}'

    With "auto", each layer chooses by its mask, and `machine` says what is simulated.

    Raises:
        ValueError: if a strategy is unknown, no layer has a given kind, or no attention is a ring.
    """
    strategies = Strategies.of(strategy)
    rings: list[Any] = [
        x for _, x, _, _ in config.traverse(Module.Config, recurse=True) if _is_ring(x)
    ]
    if not rings:
        raise ValueError(
            "no attention of this model is a ring: put it there by ring_kernel or use_ring first"
        )
    masks = [inner_attention.mask_of(ring.window_size) for ring in rings]
    strategies.check(masks)
    for ring, mask in zip(rings, masks, strict=True):
        ring.strategy, ring.machine = strategies.named(mask), machine
    return config


def _is_ring(config: Any) -> bool:
    """Return whether a config builds attention over the ring."""
    kind = config._owner
    return kind is not None and issubclass(kind, (_RingKernel, inner_attention.RingAttention))
