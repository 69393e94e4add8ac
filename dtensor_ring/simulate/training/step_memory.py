"""What a simulated training step keeps in the memory of a rank, in bytes.

Activations are those of the modules of transformers, without compilation, as `estimate` counts
them on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dtensor_ring.simulate.training.attention_memory import AttentionRoom
from dtensor_ring.simulate.training.layer_pieces import (
    KEPT_ITEMSIZE,
    Piece,
    attention_kept,
    layer_pieces,
    most_backward,
    most_forward,
    norm_piece,
    stream_bytes,
)
from dtensor_ring.simulate.training.layer_seconds import Shard
from dtensor_ring.simulate.training.memory_setting import MemorySetting
from dtensor_ring.simulate.training.model_shape import LayerShape, ModelShape, Product

# The loss makes logits of a part of the vocabulary at a time: of at most this many parts, each of
# these bytes in float32 at least. `parallel_plans` has the loss, which is above this package.
LOSS_TILES, LOSS_TILE_BYTES = 64, 16 * 2**20

# Tensors on their way back from the host, as the plan for transformers has them.
AHEAD = 3


class StepMemory(NamedTuple):
    """Bytes of one rank.

    Attributes:
        parameters: its shard of the parameters.
        gradients: its shard of their gradients.
        optimizer: its shard of the states of AdamW.
        gathered: parameters and gradients of other ranks, while FSDP2 has them here.
        attention_kept: queries, keys, values, outputs and lse that attentions keep for backward.
        others_kept: what else is kept for the backward.
        working: what the fullest moment needs besides: what one layer or the loss has while it
            runs, and keys, values and sums of other ranks.
        host: what is in the host's memory instead.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    attention_kept: int
    others_kept: int
    working: int
    host: int = 0

    @property
    def peak(self) -> int:
        """The most bytes of the device at once."""
        return sum(self) - self.host


def numbers_of(product: Product, tp: int) -> int:
    """Return the weights of a product that a rank of tensor parallelism has."""
    return product.weights // tp if product.divided else product.weights


def layer_weights(layer: LayerShape, tp: int) -> int:
    """Return the weights of a layer that a rank of tensor parallelism has."""
    return sum(numbers_of(x, tp) for x in layer.products)


def step_memory(
    model: ModelShape,
    shard: Shard,
    num_shards: int,
    setting: MemorySetting,
    rooms: Sequence[AttentionRoom],
) -> StepMemory:
    """Return what a rank keeps.

    Args:
        model: the model.
        shard: what the rank has of a batch.
        num_shards: ranks that FSDP2 shards parameters over.
        setting: what the step does to take less.
        rooms: what the attention of each layer needs while it runs.
    """
    layers = [
        _LayerBytes.of(layer, model.hidden, shard, setting, room)
        for layer, room in zip(model.layers, rooms, strict=True)
    ]
    state = _states(model, shard, num_shards, setting)
    attention, others = (sum(x[i] for x in layers) for i in range(2))
    on_host, fetched = 0, 0
    if "checkpoints" in setting.offload:
        on_host, there = attention + others, min(fetched_layers(setting.checkpoint), len(layers))
        attention, others = (there * max(x[i] for x in layers) for i in range(2))
        fetched = (attention + others) // there * (there - 1)
    # A last norm precedes the head; all layers share the tables of rotary embeddings.
    norm = norm_piece(model.hidden, shard, setting.mlp_tile)
    tables = int(2 * max(x.head_dim for x in model.layers) * shard.itemsize * shard.tokens)
    kept = attention + others + norm.kept + tables
    moments = [kept + max(loss_room(model, shard), norm.backward)]
    if on_host:
        moments.append(max(x.most for x in layers) + fetched + tables)
    else:
        moments += (x + tables for x in _backwards(layers))
    return state._replace(
        attention_kept=attention,
        others_kept=others + norm.kept + tables,
        working=max(moments) - kept,
        host=state.host + on_host,
    )


def fetched_layers(checkpoint: str) -> int:
    """Return how many layers' checkpoints are on a device while all others are on the host.

    They are the layer whose backward runs, and those on their way. A layer keeps its input; or its
    input and two results of its attention.

    >>> fetched_layers("full"), fetched_layers("attention")
    (4, 2)
    """
    return 1 + AHEAD // (1 if checkpoint == "full" else 3)


class _LayerBytes(NamedTuple):
    """What a layer keeps until its backward, and what that needs at its fullest moment.

    Attributes:
        attention: what its attention keeps.
        others: what else it keeps.
        most: the most at once in its backward, and in the forward that it computes again; with what
            it keeps.
    """

    attention: int
    others: int
    most: int

    @classmethod
    def of(
        cls,
        layer: LayerShape,
        hidden: int,
        shard: Shard,
        setting: MemorySetting,
        room: AttentionRoom,
    ) -> _LayerBytes:
        pieces = layer_pieces(layer, hidden, shard, room, setting.mlp_tile)
        most = max(most_backward(pieces), most_forward(pieces))
        stream = int(stream_bytes(hidden, shard) * shard.tokens)
        results = int(attention_kept(layer, shard)[1] * shard.tokens)
        # Tiles, and norms in float32, keep the input of the layer; in 16 bits it is a wide copy.
        is_kept = setting.mlp_tile is not None or shard.itemsize >= KEPT_ITEMSIZE
        own = 0 if is_kept else stream
        match setting.checkpoint:
            case "none":
                return cls(*_by_attention(pieces), most)
            case "attention":
                return cls(results, stream, own + most)
        return cls(0, stream, own + most)


def _by_attention(pieces: Sequence[Piece]) -> tuple[int, int]:
    """Return what attentions keep, and what all else does."""
    whole = sum(x.kept for x in pieces)
    attention = sum(x.kept for x in pieces if x.name == "attention")
    return attention, whole - attention


def _backwards(layers: Sequence[_LayerBytes]) -> Iterator[int]:
    """Yield the most bytes at once in the backward of each layer, with what those before keep."""
    below = 0
    for layer in layers:
        yield below + layer.most
        below += layer.attention + layer.others


def _states(model: ModelShape, shard: Shard, num_shards: int, setting: MemorySetting) -> StepMemory:
    """Return the bytes of parameters, and of what belongs to each."""
    layers = [layer_weights(x, shard.tp) for x in model.layers]
    root = model.embedded * (1 if model.tied else 2) // shard.tp
    kept = -(-(sum(layers) + root) * KEPT_ITEMSIZE // num_shards)
    # In backward: two layers of parameters, and the gradients of one.
    gathered = (root + 3 * max(layers)) * shard.itemsize if num_shards > 1 else 0
    parts = kept, kept, 2 * kept
    if "optimizer" in setting.offload:
        return StepMemory(0, 0, 0, gathered, 0, 0, 0, sum(parts))
    return StepMemory(*parts, gathered, 0, 0, 0)


def loss_room(model: ModelShape, shard: Shard) -> int:
    """Return the bytes that the loss needs: a tile of the logits, and gradients of its input."""
    wide = max(KEPT_ITEMSIZE, shard.itemsize)
    vocabulary, tokens = model.vocabulary // shard.tp, shard.tokens
    entries = max(LOSS_TILE_BYTES // (KEPT_ITEMSIZE * tokens), -(-vocabulary // LOSS_TILES))
    # Logits in their dtype, and in float32; where these are one, they share memory.
    of_tile = wide + (shard.itemsize if shard.itemsize < wide else 0)
    # The gradient is summed in float32 over the tiles, of which one is in its dtype.
    grads = model.hidden * (wide + 2 * shard.itemsize if shard.itemsize < wide else 2 * wide)
    return int(min(entries, vocabulary) * of_tile + grads) * tokens
