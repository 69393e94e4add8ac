"""The sizes of a language model that decide what a training step takes, read from its modules."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import nn

from dtensor_ring.lab.training.layer_run import LayerRunner
from dtensor_ring.lab.training.layer_seconds import Shard
from dtensor_ring.lab.training.model_source import (
    ModelSource,
    NotSimulated,
    kind_of,
    layers_of,
    meta_module,
)
from dtensor_ring.lab.training.state_shape import StateShape, state_of
from dtensor_ring.planning.mask import Mask


@dataclass(frozen=True)
class LayerShape:
    """A layer: an attention or a state or both, and an MLP; or one of them alone.

    Attributes:
        index: number of the first such layer of the model.
        mask: which keys a query sees.
        heads: number of query heads, and of key and value heads; 0 without an attention.
        head_dim: numbers of a head. Where those of keys and of values differ, their mean, which
            gives the same FLOPs and bytes.
        weights: numbers of all parameters.
        flops: FLOPs of a forward by token, of products.
        state: what stands in place of the attention, or beside it; `None` for an attention alone.
    """

    index: int
    mask: Mask
    heads: tuple[int, int]
    head_dim: int
    weights: int
    flops: int
    state: StateShape | None = None


@dataclass(frozen=True)
class ModelShape:
    """A language model that predicts next tokens, in sizes.

    Attributes:
        source: what its modules are made of.
        hidden: numbers of a token between layers.
        vocabulary: number of tokens that there are.
        tied: whether the embedding is the output projection.
        layers: from the first to the last.
    """

    source: ModelSource
    hidden: int
    vocabulary: int
    tied: bool
    layers: tuple[LayerShape, ...]

    @classmethod
    def of(cls, config: Any) -> ModelShape:
        """Read the modules that transformers makes of a config.

        Args:
            config: a mapping with the names of `config.json`, the path of such a file or of its
                folder, or an object with `to_dict`. Without a `model_type` its layers are those of
                a Llama.

        Raises:
            ImportError: if transformers is not installed.
            TypeError: if it is something else.
            ValueError: if there is no such file, transformers makes no model of it, or a layer is
                of a kind that is not simulated.

        >>> config = dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=2)
        >>> config |= dict(intermediate_size=96, vocab_size=32, model_type="llama")
        >>> ModelShape.of(config).layers[1].heads
        (4, 4)
        """
        return _shape(ModelSource.of(config))

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.source.name

    @property
    def embedded(self) -> int:
        """Numbers of the embedding, and of the output projection."""
        return self.hidden * self.vocabulary

    @property
    def weights(self) -> int:
        """Numbers of all parameters of layers, of the embedding and of the output projection."""
        return sum(x.weights for x in self.layers) + self.embedded * (1 if self.tied else 2)

    @property
    def flops(self) -> int:
        """FLOPs by token of all products and states in a forward, without attention itself."""
        states = sum(x.state.flops(is_sharded=False) for x in self.layers if x.state)
        return 2 * self.embedded + sum(x.flops for x in self.layers) + states

    def layer_weights(self, tp: int) -> tuple[int, ...]:
        """Return the numbers of each layer that a rank of tensor parallelism has.

        Raises:
            ValueError: if a size is no multiple of the number of ranks.
        """
        return _layer_weights(self.source, tp)


# Tokens of the run that sizes are read from, and its dtype.
TOKENS, DTYPE = 64, "bfloat16"


@lru_cache(maxsize=64)
def _layer_weights(source: ModelSource, tp: int) -> tuple[int, ...]:
    return tuple(_weights(x, tp) for x in layers_of(meta_module(source, DTYPE, tp)))


@lru_cache(maxsize=64)
def _shape(source: ModelSource) -> ModelShape:
    """Return the sizes of a model; each kind of layer runs once."""
    module = meta_module(source, DTYPE)
    embedding = module.get_input_embeddings().weight
    found: dict[Any, LayerShape] = {}
    layers: list[LayerShape] = []
    for index, layer in enumerate(layers_of(module)):
        kind = kind_of(module.config, index)
        key = kind, _signature(layer)
        if key not in found:
            found[key] = _layer(source, module.config, index, layer, kind)
        layers.append(found[key])
    if not any(x.heads[0] for x in layers):
        raise NotSimulated(f"{source.name} has no attention, so there is nothing to make parallel")
    tied = bool(getattr(module.config, "tie_word_embeddings", False))
    return ModelShape(source, embedding.shape[1], embedding.shape[0], tied, tuple(layers))


# Kinds of layers whose masks are known, and those that have a state.
ATTENTIONS = "full_attention", "attention", "sliding_attention", "chunked_attention"
STATES, MLPS = ("linear_attention", "mamba", "conv", "hybrid"), ("mlp", "moe")


def _layer(
    source: ModelSource, config: Any, index: int, layer: nn.Module, kind: str | None
) -> LayerShape:
    """Read the sizes of a layer from a run of it."""
    if kind is not None and kind not in (*ATTENTIONS, *STATES, *MLPS):
        raise NotSimulated(
            f"{source.name} has layers of kind {kind!r}, which are not simulated: only full, "
            "sliding and chunked attention, and layers with a state, are"
        )
    runner = LayerRunner(source, index, Shard(TOKENS, 1, 2, DTYPE))
    launches = runner.run().forward
    states = [x for x in map(state_of, layer.children()) if x is not None]
    if kind in STATES and not states:
        raise NotSimulated(f"{source.name} has layers with a state that is not simulated")
    mask, heads, dim = Mask.causal(), (0, 0), 0
    if runner.attentions:
        (heads, dims, window), *_ = runner.attentions
        dim = sum(dims) // 2
        if heads[0] % heads[1]:
            raise NotSimulated(
                f"{heads[0]} heads of queries of {source.name} are no multiple of its {heads[1]} "
                "of keys"
            )
        if kind == "chunked_attention":
            mask = Mask.chunked(config.attention_chunk_size)
        elif window is not None:
            mask = Mask.sliding(window - 1)  # the window of transformers counts the query itself
    return LayerShape(
        index=index,
        mask=mask,
        heads=heads,
        head_dim=dim,
        weights=_weights(layer, 1),
        flops=sum(x.flops for x in launches if x.op != "state") // TOKENS,
        state=states[0] if states else None,
    )


def _weights(layer: nn.Module, tp: int) -> int:
    """Return the numbers of a layer; those of states are divided here, all others in the config."""
    found = 0
    for child in layer.children():
        size = sum(x.numel() for x in child.parameters())
        found += size // tp if state_of(child) else size
    return found + sum(x.numel() for x in layer.parameters(recurse=False))


# Attributes of modules that say nothing of their sizes; the last two number layers.
NUMBERS = "training", "layer_idx", "layer_id"


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    """Return what equal layers of a model have in common."""
    return tuple(
        (
            type(module),
            tuple(x.shape for x in module.parameters(recurse=False)),
            tuple(
                (name, value)
                for name, value in vars(module).items()
                if isinstance(value, int | float | str) and name not in NUMBERS
            ),
        )
        for module in layer.modules()
    )
