"""Ring attention as the attention of diffusers' own context parallelism.

diffusers deals the sequence and gathers the output, by `model.enable_parallelism(config=
ContextParallelConfig(ring_degree=..., ulysses_degree=...))`, and asks an attention backend for the
rest. Its "native" one becomes ours where a model is parallel, and stays what it was elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dtensor_ring import Mask, SequenceAxis, TransferPolicy
from parallel_plans.tested import warn_untested


def use_ring_attention(kernel: str | None = None, policy: TransferPolicy | None = None) -> None:
    """Let diffusers' backend "native" run its context parallelism as ring attention, from now on.

    `ring_degree` ranks exchange keys and values, `ulysses_degree` ranks trade tokens for heads, and
    with both, groups that trade are on a ring. Keys and values are never gathered, grouped queries
    stay grouped, and training has the gradient of one process. Ranks gather the output; of a loss
    that all of them compute, a parameter's gradients on all ranks add up to that of one process.

    Args:
        kernel: name of the block kernel; by default the first that can.
        policy: the dtypes in which messages travel.

    Raises:
        ImportError: if diffusers is not installed, or a version without context parallelism.

    Call it once, then `model.enable_parallelism(config=ContextParallelConfig(ring_degree=2))`.
    """
    warn_untested("diffusers")
    registry, native = _registry()
    _register(RingBackend(_stock(registry._backends[native]), kernel, policy))


def use_stock_attention() -> None:
    """Take `use_ring_attention` back."""
    registry, native = _registry()
    _register(_stock(registry._backends[native]))


def _registry() -> tuple[Any, Any]:
    """Diffusers' table of backends, and the name of the one that is replaced."""
    from diffusers.models.attention_dispatch import (
        AttentionBackendName,
        _AttentionBackendRegistry,
    )

    return _AttentionBackendRegistry, AttentionBackendName.NATIVE


def _stock(backend: Any) -> Callable[..., Tensor]:
    """The backend that there was before."""
    return backend.stock if isinstance(backend, RingBackend) else backend


def _register(backend: Any) -> None:
    registry, native = _registry()
    checks = registry._constraints[native]
    registry.register(native, constraints=checks, supports_context_parallel=True)(backend)


@dataclass(frozen=True)
class RingBackend:
    """A backend of diffusers: called with the arguments that its dispatcher knows by name."""

    stock: Callable[..., Any]
    """What runs where nothing is parallel."""
    kernel: str | None
    policy: TransferPolicy | None
    layout: str = "contiguous"
    """As diffusers deals tokens; for attention that sees everything, any order is as good."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> Any:
        """From `(B, L, N, H)` of this rank to `(B, L, N, H)`.

        Raises:
            ValueError: if the call asks for what tokens of several ranks cannot have.
        """
        config = getattr(_parallel_config, "context_parallel_config", None)
        if config is None:
            how = (attn_mask, dropout_p, is_causal, scale, enable_gqa, return_lse)
            return self.stock(query, key, value, *how, _parallel_config)
        _refuse(config, attn_mask, dropout_p, is_causal, return_lse)
        if not enable_gqa and query.shape[2] != key.shape[2]:
            raise ValueError(
                f"{query.shape[2]} query heads and {key.shape[2]} key heads need enable_gqa=True"
            )
        shard = (x.transpose(1, 2) for x in (query, key, value))
        out = self._axis(config).attention(*shard, mask=Mask.full(), scale=scale)
        return out.transpose(1, 2)

    def _axis(self, config: Any) -> SequenceAxis:
        """The axis of a model's ranks: those that trade tokens for heads come one after another."""
        degree = config.ulysses_degree
        strategy = f"ulysses:{degree}" if degree > 1 else "ring"
        how = {"strategy": strategy, "kernel": self.kernel, "policy": self.policy}
        return SequenceAxis(config._flattened_mesh, self.layout, **how)


def _refuse(
    config: Any, attn_mask: Tensor | None, dropout_p: float, is_causal: bool, return_lse: bool
) -> None:
    """Refuse what diffusers' own context parallelism does not do, or not by this backend."""
    asked = {
        "attn_mask": attn_mask is not None,
        "dropout_p": dropout_p > 0,
        # Texts and images are dealt one by one and joined then, so there is no order.
        "is_causal": is_causal,
        "return_lse": return_lse,
        "ring_anything": getattr(config, "ring_anything", False),
        "ulysses_anything": getattr(config, "ulysses_anything", False),
    }
    if given := [name for name, is_given in asked.items() if is_given]:
        raise ValueError(
            f"ring attention in diffusers takes no {', '.join(given)}; leave it out, or call "
            "parallel_plans.diffusers.use_stock_attention()"
        )
