"""What a simulated training step keeps in the memory of a rank, in bytes.

Activations are those of the modules of transformers, without compilation, as `estimate` counts
them on the meta device.
"""

from __future__ import annotations

from typing import NamedTuple

from dtensor_ring.simulate.training.layer_seconds import Shard
from dtensor_ring.simulate.training.model_shape import LayerShape, ModelShape, Product

# How much of a layer its backward computes again: nothing; all but its attention; all of it.
CHECKPOINTS = ("none", "attention", "full")

# Parameters, gradients and the two states of AdamW are float32, as FSDP2 keeps them in mixed
# precision.
KEPT_ITEMSIZE = 4


class StepMemory(NamedTuple):
    """Bytes of one rank.

    Attributes:
        parameters: its shard of the parameters.
        gradients: its shard of their gradients.
        optimizer: its shard of the states of AdamW.
        gathered: parameters and gradients of other ranks, while FSDP2 has them here.
        attention_kept: queries, keys, values, outputs and lse that attentions keep for backward.
        others_kept: what else is kept for the backward.
        working: keys, values and sums of other ranks that an attention holds, and what one layer
            computes again.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    attention_kept: int
    others_kept: int
    working: int

    @property
    def peak(self) -> int:
        """A bound of the most bytes at once: their sum."""
        return sum(self)


def numbers_of(product: Product, tp: int) -> int:
    """Return the weights of a product that a rank of tensor parallelism has."""
    return product.weights // tp if product.divided else product.weights


def layer_weights(layer: LayerShape, tp: int) -> int:
    """Return the weights of a layer that a rank of tensor parallelism has."""
    return sum(numbers_of(x, tp) for x in layer.products)


def step_memory(
    model: ModelShape, shard: Shard, num_shards: int, checkpoint: str, held: int
) -> StepMemory:
    """Return what a rank keeps.

    Args:
        model: the model.
        shard: what the rank has of a batch.
        num_shards: ranks that FSDP2 shards parameters over.
        checkpoint: one of `CHECKPOINTS`.
        held: bytes that an attention holds of other ranks, at most.
    """
    layers = [layer_weights(x, shard.tp) for x in model.layers]
    root = model.embedded * (1 if model.tied else 2) // shard.tp
    kept = -(-(sum(layers) + root) * KEPT_ITEMSIZE // num_shards)
    # In backward: two layers of parameters, and the gradients of one.
    gathered = (root + 3 * max(layers)) * shard.itemsize if num_shards > 1 else 0
    attention, others = (
        sum(x)
        for x in zip(
            *(_kept(x, model.hidden, shard, checkpoint) for x in model.layers), strict=True
        )
    )
    # All layers share the sines and cosines of rotary embeddings; a last norm precedes the head.
    tables = 2 * max(x.head_dim for x in model.layers) * shard.itemsize
    others += int((norm_kept(model.hidden, shard) + tables) * shard.tokens)
    again = 0
    if checkpoint != "none":
        again = max(sum(_kept(x, model.hidden, shard, "none")) for x in model.layers)
    return StepMemory(kept, kept, 2 * kept, gathered, attention, others, held + again)


def _kept(layer: LayerShape, hidden: int, shard: Shard, checkpoint: str) -> tuple[int, int]:
    """Return what the attention of a layer keeps for its backward, and what the rest of it does."""
    (heads, key_heads), tp = layer.heads, shard.tp
    out, lse = heads * layer.head_dim * shard.itemsize / tp, heads * KEPT_ITEMSIZE / tp
    # Between layers, tokens are sharded over the ranks of tensor parallelism.
    stream = hidden / tp * shard.itemsize
    if checkpoint == "full":
        attention, others = 0.0, stream
    elif checkpoint == "attention":
        attention, others = out + lse, stream
    else:
        inputs = (heads + 2 * key_heads) * layer.head_dim * shard.itemsize / tp
        attention = inputs + out + lse
        # Gate, its activation, up and their product; and copies of a token for its experts.
        mlp = 4 * layer.activated / tp + layer.routed * hidden
        others = 2 * norm_kept(hidden, shard) + mlp * shard.itemsize
    return int(attention * shard.tokens), int(others * shard.tokens)


def norm_kept(hidden: int, shard: Shard) -> float:
    """Return the bytes by token that an RMSNorm of transformers and the product after it keep.

    They are the input in float32, the input over its norm, and the output. The latter is gathered
    over the ranks of tensor parallelism.
    """
    wide = max(KEPT_ITEMSIZE, shard.itemsize)
    return hidden * ((wide + shard.itemsize) / shard.tp + shard.itemsize)
