"""Context parallelism of Hugging Face models, without editing them."""

from parallel_plans.huggingface.checkpoint import ring_checkpoint_contexts
from parallel_plans.huggingface.plan import context_parallel_plan

__all__ = ["context_parallel_plan", "ring_checkpoint_contexts"]
