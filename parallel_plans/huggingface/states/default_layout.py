"""Picks the layout of a model when the plan does not name one."""

from __future__ import annotations

import logging
from typing import Any

from dtensor_ring import Mask
from dtensor_ring.extension import Hybrid, HybridComparison, compare_hybrid_layouts
from parallel_plans.huggingface.core.patterns import LayerMask, LayerMasks
from parallel_plans.huggingface.states.stateful import attention_layers, stateful_layers

DEFAULT: str = "zigzag"
# Sequence length that is compared for a model without a maximum length.
DEFAULT_SEQ_LEN = 32768

_LOG = logging.getLogger("dtensor_ring")


def compared_layouts(
    model: Any, layer_masks: LayerMasks, world_size: int, strategy: str | None
) -> HybridComparison | None:
    """Compare the costs of layouts for a model with stateful layers, at its longest sequence.

    The comparison is logged at level INFO. A plan without a layout uses the cheapest one.

    Args:
        model: a model with weights, or on the meta device.
        layer_masks: the masks of its layers; the most frequent one is compared.
        world_size: number of ranks of the axis.
        strategy: the strategy of all attention layers; `None` and "auto" for the default.

    Returns:
        `None` for a model without stateful layers.
    """
    num_stateful = len(stateful_layers(model))
    if not num_stateful:
        return None
    masks = [x.mask for x in layer_masks.values() if isinstance(x, LayerMask)]
    found = compare_hybrid_layouts(
        _sizes(model, num_stateful),
        max(masks, key=masks.count, default=Mask.causal()),
        getattr(model.config, "max_position_embeddings", None) or DEFAULT_SEQ_LEN,
        world_size,
        None if strategy == "auto" else strategy,
    )
    _LOG.info("layouts of %s: %s", type(model).__name__, found)
    return found


def _sizes(model: Any, num_stateful: int) -> Hybrid:
    """Return the numbers of layers of a model and the sizes of its tensors."""
    config, num_attention = model.config, len(attention_layers(model))
    if not num_attention:
        return Hybrid(num_stateful, 0, config.hidden_size, itemsize=model.dtype.itemsize)
    heads = _largest(config, "num_attention_heads") or 1
    head_dim = _largest(config, "head_dim") or config.hidden_size // heads
    key_heads = _largest(config, "num_key_value_heads") or heads
    sizes = config.hidden_size, (heads, key_heads), head_dim, model.dtype.itemsize
    return Hybrid(num_stateful, num_attention, *sizes)


def _largest(config: Any, name: str) -> int | None:
    """Return the largest value of an option that is one number, or one number per layer."""
    found = getattr(config, name, None)
    return max(found, default=None) if isinstance(found, (list, tuple)) else found
