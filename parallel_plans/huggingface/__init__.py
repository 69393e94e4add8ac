"""Context parallelism of Hugging Face models, without editing them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from parallel_plans.huggingface.activations.kept_for_backward import ring_checkpoint_contexts
from parallel_plans.huggingface.core.modules import restore_model, stock_model
from parallel_plans.huggingface.distributed import context_parallel_model
from parallel_plans.huggingface.generation.hand_over_cache import hand_over_cache
from parallel_plans.huggingface.plan import context_parallel_plan

if TYPE_CHECKING:
    from parallel_plans.huggingface.generation.context_parallel_cache import ContextParallelCache

__all__ = [
    "ContextParallelCache",
    "context_parallel_model",
    "context_parallel_plan",
    "hand_over_cache",
    "restore_model",
    "ring_checkpoint_contexts",
    "stock_model",
]


def __getattr__(name: str) -> Any:
    """Import `ContextParallelCache` on first use, because it imports transformers."""
    if name != "ContextParallelCache":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from parallel_plans.huggingface.generation.context_parallel_cache import ContextParallelCache

    return ContextParallelCache
