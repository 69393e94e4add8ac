"""Run ring attention in diffusers' own context parallelism.

`model.enable_parallelism(config=ContextParallelConfig(ring_degree=..., ulysses_degree=...))` makes
diffusers shard the sequence and gather the output. An attention backend does the rest. This module
replaces the "native" backend for parallel models, and leaves it as it was for all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtensor_ring import Mask, SequenceAxis, TransferPolicy
from dtensor_ring.extension import AnyMachine, check_strategy
from parallel_plans.tested import warn_untested


def use_ring_attention(
    kernel: str | None = None,
    policy: TransferPolicy | None = None,
    strategy: str | None = None,
    machine: AnyMachine | None = None,
) -> None:
    """Make diffusers' backend "native" run its context parallelism as ring attention.

    `ring_degree` ranks exchange keys and values, and `ulysses_degree` ranks do an all-to-all of
    tokens and heads. With both, the groups of the all-to-all form a ring. Keys and values are never
    gathered, and grouped queries stay grouped. Ranks gather the output: if all of them compute the
    loss, a parameter's gradients on all ranks add up to the gradient of one process.

    Args:
        kernel: name of the block kernel; by default the first that can.
        policy: the dtypes in which messages travel.
        strategy: how attention is made parallel over all ranks, whatever the two degrees are, see
            `dtensor_ring.SequenceAxis`. "auto" takes the fastest. By default the degrees decide.
        machine: what "auto" simulates, see `dtensor_ring.SequenceAxis`.

    Raises:
        ValueError: if the strategy is unknown.
        ImportError: if diffusers is not installed, or its version has no context parallelism.

    Call it once, then `model.enable_parallelism(config=ContextParallelConfig(ring_degree=2))`.
    """
    warn_untested("diffusers")
    if strategy is not None:
        check_strategy(strategy)
    if policy is not None:
        policy.refuse_order("the attention of diffusers")
    registry, native = _registry()
    stock = _stock(registry._backends[native])
    _register(RingBackend(stock, kernel, policy, strategy, machine))


def use_stock_attention() -> None:
    """Undo `use_ring_attention`."""
    registry, native = _registry()
    _register(_stock(registry._backends[native]))


def _registry() -> tuple[Any, Any]:
    """Return diffusers' registry of backends, and the name of the backend to replace."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    return _AttentionBackendRegistry, AttentionBackendName.NATIVE


def _stock(backend: Any) -> Callable[..., Tensor]:
    """Return the backend of diffusers that ours replaced."""
    return backend.stock if isinstance(backend, RingBackend) else backend


def _register(backend: Any) -> None:
    registry, native = _registry()
    checks = registry._constraints[native]
    registry.register(native, constraints=checks, supports_context_parallel=True)(backend)


@dataclass(frozen=True)
class RingBackend:
    """A backend of diffusers, whose dispatcher passes arguments by name.

    Attributes:
        stock: the backend of diffusers, which runs models that are not parallel.
        kernel: name of the block kernel; `None` for the first that can.
        policy: the dtypes in which messages travel.
        strategy: the strategy of all models; `None` for the degrees of each.
        machine: what the strategy "auto" simulates.
        layout: the layout in which diffusers shards tokens. Full attention is balanced in any.
    """

    stock: Callable[..., Any]
    kernel: str | None
    policy: TransferPolicy | None
    strategy: str | None = None
    machine: AnyMachine | None = None
    layout: str = "contiguous"

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
        """Compute attention of this rank's tokens: `(B, L, N, H)` to `(B, L, N, H)`.

        Raises:
            ValueError: if the call asks for something that this backend does not support.
        """
        config = getattr(_parallel_config, "context_parallel_config", None)
        if config is None:
            return self.stock(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale,
                enable_gqa,
                return_lse,
                _parallel_config,
            )
        _refuse(config, dropout_p, is_causal, return_lse)
        if not enable_gqa and query.shape[2] != key.shape[2]:
            raise ValueError(
                f"{query.shape[2]} query heads and {key.shape[2]} key heads need enable_gqa=True"
            )
        axis = self._axis(config)
        _check_mask(axis, attn_mask)
        # Views: diffusers has tokens before heads, and so has the memory that the ring likes best.
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        out = axis.attention(query, key, value, mask=Mask.full(), scale=scale)
        return out.transpose(1, 2)

    def _axis(self, config: Any) -> SequenceAxis:
        """Return the axis of a model's ranks; the ranks of one all-to-all are consecutive."""
        degree = config.ulysses_degree
        by_degree = f"ulysses:{degree}" if degree > 1 else "ring"
        how: dict[str, Any] = {"strategy": self.strategy or by_degree, "kernel": self.kernel}
        how |= {"policy": self.policy, "machine": self.machine}
        return SequenceAxis(config._flattened_mesh, self.layout, **how)


def _check_mask(axis: SequenceAxis, attn_mask: Tensor | None) -> None:
    """Refuse a mask that hides keys. Models may give one that hides none, of a whole prompt.

    Each rank counts the hidden keys among its own tokens, and the ranks add up these counts.

    Raises:
        ValueError: on every rank, if the mask of one hides a key.
    """
    if attn_mask is None:
        return
    is_hidden = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask != 0
    # Summed over ranks, so that all of them refuse, or none.
    number = int(axis.sum(is_hidden.sum().float()))
    if number:
        raise ValueError(
            f"ring attention in diffusers takes no attn_mask that hides keys, and this one hides "
            f"{number} on all ranks; give prompts of one length without padding, for example one "
            "at a time, or call parallel_plans.diffusers.use_stock_attention()"
        )


def _refuse(config: Any, dropout_p: float, is_causal: bool, return_lse: bool) -> None:
    """Refuse what diffusers' context parallelism or this backend does not support."""
    asked = {
        "dropout_p": dropout_p > 0,
        # Texts and images are sharded separately and then joined: the tokens have no order.
        "is_causal": is_causal,
        "return_lse": return_lse,
        "ring_anything": getattr(config, "ring_anything", False),
        "ulysses_anything": getattr(config, "ulysses_anything", False),
    }
    if refused := [name for name, is_refused in asked.items() if is_refused]:
        raise ValueError(
            f"ring attention in diffusers takes no {', '.join(refused)}; leave it out, or call "
            "parallel_plans.diffusers.use_stock_attention()"
        )
