"""Picks the layout of a model when the plan does not name one."""

from __future__ import annotations

import logging
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

import dtensor_ring
from dtensor_ring import Mask, TransferPolicy
from dtensor_ring.extension import (
    AnyMachine,
    Hybrid,
    HybridComparison,
    Layout,
    as_layout,
    compare_hybrid_layouts,
    machine_on,
)
from parallel_plans.huggingface.core.patterns import LayerMask, LayerMasks
from parallel_plans.huggingface.states.state_passing import StateSpecs, map_bytes
from parallel_plans.huggingface.states.stateful import attention_layers
from parallel_plans.strategies import SUFFIX, kind_of

DEFAULT: str = "zigzag"

_LOG = logging.getLogger("dtensor_ring")


def named_layout(layout: Layout | str | None) -> Layout:
    """Return the layout of a plan, for now the default where the plan picks one.

    Raises:
        ValueError: if it is unknown.
        TypeError: if it is no layout and no name.
    """
    return as_layout(DEFAULT if layout is None or layout == "auto" else layout)


def compared_layouts(
    model: Any, layer_masks: LayerMasks, specs: StateSpecs, world_size: int, strategy: str | None
) -> HybridComparison | None:
    """Compare the costs of layouts for a model with stateful layers, at its longest sequence.

    The comparison is logged at level INFO. A plan without a layout uses the cheapest one.

    Args:
        model: a model with weights, or on the meta device.
        layer_masks: the masks of its layers; the most frequent one is compared.
        specs: the states of its layers.
        world_size: number of ranks of the axis.
        strategy: the strategy of all attention layers; `None` and "auto" for the default.

    Returns:
        `None` for a model without stateful layers.
    """
    if not specs:
        return None
    masks = _masks(layer_masks)
    found = compare_hybrid_layouts(
        hybrid_of(model, specs),
        # One layout for all layers: the mask that most of them have decides.
        max(masks, key=masks.count),
        _longest(model),
        world_size,
        None if strategy == "auto" else strategy,
    )
    _LOG.info("layouts of %s: %s", type(model).__name__, found)
    return found


def fastest_layout(
    model: Any,
    layer_masks: LayerMasks,
    mesh: DeviceMesh,
    strategy: str | None,
    machine: AnyMachine | None,
    policy: TransferPolicy | None,
    **_: Any,
) -> str:
    """Return the layout in which the attentions of a model take least time.

    They are simulated at the longest sequence of the model.

    Args:
        model: a model without stateful layers, with weights or on the meta device.
        layer_masks: the masks of its layers.
        mesh: the 1-D mesh of the axis.
        strategy: the strategy of all layers; `None` for the default.
        machine: what is simulated, see `SequenceAxis`.
        policy: the dtypes in which messages travel, `None` for the default.
    """
    sizes, device = hybrid_of(model, ()), machine_on(mesh, machine)
    found = dtensor_ring.choose_layout(  # loads the simulator, which no other model needs
        _of_layers(_masks(layer_masks), model),
        _longest(model),
        mesh.size(),
        sizes.heads,
        sizes.head_dim,
        dtype=device.dtype_like(str(model.dtype).removeprefix("torch.")),
        policy=policy or TransferPolicy(),
        strategy=strategy or "ring",
        machine=device,
    )
    _LOG.info("layout of %s by %s: %s", type(model).__name__, device.label, found)
    return found


def _masks(layer_masks: LayerMasks) -> list[Mask]:
    """Return the masks of the layers, at least one."""
    found = [x.mask for x in layer_masks.values() if isinstance(x, LayerMask)]
    return found or [Mask.causal()]


def _of_layers(masks: list[Mask], model: Any) -> list[Mask]:
    """Return the mask of each layer where the config lists their kinds, else one of each kind."""
    kinds = [x.removesuffix(SUFFIX) for x in getattr(model.config, "layer_types", None) or ()]
    # Each mask once for each of its layers, so that the many weigh more.
    return [mask for mask in masks for _ in range(max(1, kinds.count(kind_of(mask))))]


# Sequence length that is compared for a model without a maximum length.
DEFAULT_SEQ_LEN = 32768


def _longest(model: Any) -> int:
    """Return the length of the longest sequence of a model, in tokens."""
    return getattr(model.config, "max_position_embeddings", None) or DEFAULT_SEQ_LEN


def hybrid_of(model: Any, specs: StateSpecs) -> Hybrid:
    """Return the numbers of layers of a model, the sizes of its tensors and the bytes of maps."""
    config, num_attention, num_stateful = model.config, len(attention_layers(model)), len(specs)
    itemsize, maps = model.dtype.itemsize, map_bytes(specs)
    if not num_attention:
        return Hybrid(num_stateful, 0, config.hidden_size, itemsize=itemsize, maps=maps)
    heads = _largest(config, "num_attention_heads") or 1
    head_dim = _largest(config, "head_dim") or config.hidden_size // heads
    key_heads = _largest(config, "num_key_value_heads") or heads
    return Hybrid(
        num_stateful,
        num_attention,
        hidden_size=config.hidden_size,
        heads=(heads, key_heads),
        head_dim=head_dim,
        itemsize=itemsize,
        maps=maps,
    )


def _largest(config: Any, name: str) -> int | None:
    """Return the largest value of an option that is one number, or one number per layer."""
    found = getattr(config, name, None)
    return max(found, default=None) if isinstance(found, (list, tuple)) else found
