"""Put ring attention into the layers of torchtitan's models, with or without weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torchtitan.config.override import derive
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module

from dtensor_ring.extension import MetaModel, ModelRequest, as_layout, check_kernel, refuse_capture
from parallel_plans.strategies import Strategies
from parallel_plans.tested import warn_untested
from parallel_plans.torchtitan.inner_attention import (
    CUDA_GRAPHS,
    UNBOUNDED,
    Documents,
    RingAttention,
    gather_documents,
    mask_of,
)
from parallel_plans.torchtitan.multi_token import PredictsAhead, is_several_headed, updated_alone


def use_ring(
    config: Decoder.Config,
    layout: str,
    kernel: str | None = None,
    grad_dtype: str | None = None,
    strategy: str | dict[str, str] | None = None,
    machine: str | None = None,
    kv_dtype: str | None = None,
) -> None:
    """Put ring attention into every layer of a model's config, in place.

    Windows do not change. See Note [Documents without a trainer].

    Args:
        config: config of any decoder of torchtitan.
        layout: name of the layout.
        kernel: name of the block kernel; by default the first that can.
        grad_dtype: name of the dtype in which sums of key and value gradients travel, see
            `RingAttention.Config`.
        strategy: how attention is made parallel, see `dtensor_ring.SequenceAxis`. It is one for all
            layers, or one per kind of layer, `{"sliding": "ring", "full": "ulysses:4"}`. "auto"
            chooses for each layer by its mask.
        machine: what "auto" simulates: the path of a file that the first rank of each ring has, or
            the name of a data sheet, see `dtensor_ring.SequenceAxis`.
        kv_dtype: name of the dtype in which keys and values travel, `"int8"` for 8 bits, see
            `RingAttention.Config`.

    Raises:
        ValueError: if the layout, kernel or strategy is unknown, no layer has a given kind, or a
            ring cannot replace an attention.
    """
    warn_untested("torchtitan")
    as_layout(layout)
    check_kernel(kernel)
    strategies = Strategies.of(strategy)
    if getattr(config, "vision_encoder", None) is not None:
        raise ValueError(
            f"{_owner(type(config)).__name__} puts images into the whole sequence: a ring takes "
            "models of text only"
        )
    layers = [*config.layers, *getattr(config, "mtp_layers", [])]
    for layer in layers:
        _check(config, layer)
    strategies.check([mask_of(_window(layer.attention)) for layer in layers])
    for layer in layers:
        attention = layer.attention
        window = _window(attention)
        attention.inner_attention = derive(
            attention.inner_attention,
            RingAttention.Config,
            window_size=window,
            layout=layout,
            kernel=kernel,
            grad_dtype=grad_dtype,
            kv_dtype=kv_dtype,
            strategy=strategies.named(mask_of(window)),
            machine=machine,
        )
    config.__class__ = _with_documents(type(config))


REPLACED = (FlexAttention.Config, VarlenAttention.Config, RingAttention.Config)


def _check(config: Decoder.Config, layer: Any) -> None:
    model = _owner(type(config)).__name__
    inner = getattr(layer.attention, "inner_attention", None)
    if type(inner) not in REPLACED:
        names = ", ".join(kind.__qualname__ for kind in REPLACED)
        raise ValueError(
            f"a ring replaces {names}; a layer of {model} has {type(inner).__qualname__}"
        )
    has_own_masks = _owner(type(config)).get_attention_masks is not Decoder.get_attention_masks
    is_flexible = isinstance(inner, FlexAttention.Config)
    if is_flexible and has_own_masks and not hasattr(layer.attention, "sliding_window_size"):
        raise ValueError(
            f"{model} makes masks of its own for FlexAttention, which a ring cannot read; give it "
            'attn_backend="varlen", whose windows it can, by a config function and with_ring'
        )


def _window(attention: Any) -> tuple[int, int]:
    """Return the window of an attention, in tokens before and after a query."""
    size = getattr(attention, "sliding_window_size", None)
    if size is not None:
        if size < 1:
            raise ValueError(f"a sliding window holds one token at least, got {size}")
        # torchtitan counts the query itself; ours counts the tokens before the query.
        return size - 1, 0
    return getattr(attention.inner_attention, "window_size", (UNBOUNDED, 0))


# Note [Documents without a trainer]
# An override sees only the config of a component, and torchtitan's own trainers make masks for
# their own attentions only. But they pass the positions of the tokens to each model and to each
# stage of a pipeline. Therefore the model itself finds the documents, outside of compiled code.
# The class of the config is replaced by one that builds this model, as fully_shard replaces the
# class of a module. Both classes are made at run time, so neither can be pickled. RingTrainer
# finds the documents before it shards a batch, without communication.


class FindsDocuments(Module):
    """A model that finds the documents of a batch if the trainer has not."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_masks: Any = None,
        **others: Any,
    ) -> Any:
        # RingTrainer passes the documents as masks already.
        if attention_masks is None and positions is not None:
            attention_masks = self._find(positions)
        return super().forward(
            tokens, positions=positions, attention_masks=attention_masks, **others
        )

    def _find(self, positions: Tensor) -> Any:
        rings = (module.axis for module in self.modules() if isinstance(module, RingAttention))
        axis = next(rings, None)
        if axis is None:
            return None  # no attention here, or attention that raises a clear error
        local = positions.to_local() if isinstance(positions, DTensor) else positions
        why, instead = CUDA_GRAPHS
        refuse_capture(local.device, why, instead)
        with spmd.no_typecheck():
            return gather_documents(local, axis.layout, axis.mesh)


@cache
def _with_documents(config_type: type[Decoder.Config]) -> type[Decoder.Config]:
    """Return a config class whose model finds documents, with equal slots for `__class__`."""
    owner = _owner(config_type)
    if issubclass(owner, FindsDocuments):
        return config_type
    body: dict[str, Any] = {"__qualname__": config_type.__qualname__}
    bases: tuple[type, ...] = (FindsDocuments, owner)
    if is_several_headed(owner):
        body["update_from_config"] = updated_alone(config_type.update_from_config)
        bases = FindsDocuments, PredictsAhead, owner
    new = dataclass(kw_only=True, slots=True)(type("Config", (config_type,), body))
    # The config builds this class, which finds the documents before its forward.
    new._owner = type(owner.__name__, bases, {"Config": new})
    return new


def _owner(config_type: type[Decoder.Config]) -> Any:
    """Return the class that a config builds."""
    assert config_type._owner is not None
    return config_type._owner


def model_of_function(
    module: str, function: str, mesh: DeviceMesh, asked: ModelRequest
) -> MetaModel:
    """Build the model of a config function on the meta device, with its sequence over a mesh.

    Args:
        module: name of the module that has the function.
        function: name of a function that returns a training config.
        mesh: mesh of the ranks that share the sequence.
        asked: what the model is to be run on.

    Raises:
        ValueError: if there is no such function, or a ring cannot serve its model.
    """
    config = _config(module, function)
    how = {"strategy": asked.strategy, "machine": asked.machine, "kv_dtype": asked.kv_dtype}
    use_ring(config, asked.layout, **how)
    with torch.device("meta"):
        model: Any = config.build()
    if asked.dtype is not None:
        model.to(asked.dtype)
    for part in model.modules():
        if isinstance(part, RingAttention):
            part.axis = part.axis_of(mesh)
    rank, size = mesh.get_local_rank(), mesh.size()
    num_local = as_layout(asked.layout).num_tokens(rank, size, asked.seq_len)
    return MetaModel(type(model).__name__, model, lambda: _loss(model, asked, num_local))


def _config(module: str, function: str) -> Any:
    """Return the config of the model.

    Raises:
        ValueError: if the function does not return one.
    """
    try:
        found = getattr(import_module(module), function)
        return found().model_spec.model
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{module}:{function} is not a config function of torchtitan, such as "
            f"parallel_plans.torchtitan.config_registry:llama3_8b_ring_128k ({error})"
        ) from error


def _loss(model: Any, asked: ModelRequest, num_local: int) -> Tensor:
    """Compute the loss of this rank's tokens, as torchtitan does."""
    tokens = torch.zeros(asked.batch, num_local, dtype=torch.long, device="meta")
    documents = Documents(torch.tensor([0, asked.seq_len], dtype=torch.int32))
    logits = model(tokens, positions=tokens, attention_masks=documents)
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())
