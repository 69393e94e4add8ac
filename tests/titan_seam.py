"""What later versions of torchtitan offer attention for context parallelism; none is released.

Stand-ins in our words, as far as a kernel meets them: two versions of the class that kernels
inherit, and the transform that puts a kernel into a model's config.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any

from torch.distributed import ProcessGroup
from torchtitan.distributed.spmd_types import current_spmd_mesh
from torchtitan.models.common.attention import BaseAttention
from torchtitan.protocols.module import Module


class ContextParallelKernel:
    """A kernel that moves keys and values itself."""

    @property
    def cp_group(self) -> ProcessGroup:
        mesh = current_spmd_mesh()
        if mesh is None:
            raise RuntimeError("there is no mesh")
        return mesh.get_group("cp")


class CPAttention(ABC):
    """The later version: it has a config, and prepares what layers share."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        pass

    @staticmethod
    @abstractmethod
    def prepare_cp_metadata(attention_metadata: Any, *, permutation: Any) -> Any: ...


@dataclass(kw_only=True)
class ContextParallelTransform:
    """Replaces the attention of all layers, whose options stay."""

    kernel: type[Module]
    kernel_config_overrides: dict[str, Any] = field(default_factory=dict)
    capability: type = ContextParallelKernel

    def __post_init__(self) -> None:
        if not issubclass(self.kernel, self.capability):
            raise ValueError(f"{self.kernel.__qualname__} cannot be a kernel")

    def transform(self, model: Any) -> Any:
        for _, attention, _, _ in model.traverse(BaseAttention.Config):
            old = attention.inner_attention
            if not issubclass(self.kernel.Config, type(old)):
                raise ValueError(f"{self.kernel.__qualname__}.Config must inherit that of a layer")
            kept = {option.name: getattr(old, option.name) for option in fields(old)}
            attention.inner_attention = self.kernel.Config(**kept, **self.kernel_config_overrides)
        return model


def check_parallel(model: Any, context: int, tensor: int, load_balancer: str | None) -> None:
    """What is checked of a model's config before it is built."""
    for _, attention, _, _ in model.traverse(BaseAttention.Config):
        kernel = attention.inner_attention._owner
        if context > 1 and not issubclass(kernel, (ContextParallelKernel, CPAttention)):
            raise ValueError("not a kernel for context parallelism")
        if not getattr(kernel.Config, "shard_attention_mask", True) and load_balancer is not None:
            raise ValueError("boundaries are in the order of positions, tokens are not")
        shards_heads = getattr(kernel.Config, "shard_attention_heads", False)
        if attention.n_heads % (tensor * (context if shards_heads else 1)):
            raise ValueError("heads do not divide")
