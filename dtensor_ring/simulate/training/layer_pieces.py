"""What the pieces of a layer keep and need in the memory of a rank, in bytes.

Note [Pieces]: a layer is a list of pieces, in the order of its forward. Each keeps tensors for its
backward, and needs others while it runs. Forward adds up what is kept; backward goes through the
pieces from the last one, and what a piece kept is free after it. So the most bytes at once are a
maximum over pieces. Counts are those of transformers' modules without compilation; `estimate`
counts the same modules on the meta device, and tests compare both.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from dtensor_ring.simulate.training.attention_memory import AttentionRoom
from dtensor_ring.simulate.training.layer_seconds import Shard
from dtensor_ring.simulate.training.model_shape import LayerShape, StateShape

# Parameters, gradients, states of AdamW, lse and norms are float32 or wider.
KEPT_ITEMSIZE = 4

# Tokens of a chunk of a gated delta rule.
CHUNK = 64


class Piece(NamedTuple):
    """A part of a layer, in bytes of a rank.

    Attributes:
        name: what it is.
        kept: what it keeps for its backward.
        forward: what its forward needs besides.
        backward: what its backward needs besides, with the gradients between pieces.
    """

    name: str
    kept: int
    forward: int
    backward: int


def most_forward(pieces: Sequence[Piece]) -> int:
    """Return the most bytes at once in a forward that keeps what its backward needs.

    >>> most_forward([Piece("norm", 1, 5, 0), Piece("mlp", 4, 2, 0)])
    7
    """
    kept = accumulate(x.kept for x in pieces)
    return max(below + x.forward for below, x in zip(kept, pieces, strict=True))


def most_backward(pieces: Sequence[Piece]) -> int:
    """Return the most bytes at once in a backward.

    >>> most_backward([Piece("norm", 1, 0, 5), Piece("mlp", 4, 0, 2)])
    7
    """
    kept = accumulate(x.kept for x in pieces)
    return max(below + x.backward for below, x in zip(kept, pieces, strict=True))


def layer_pieces(
    layer: LayerShape, hidden: int, shard: Shard, room: AttentionRoom, tile: int | None = None
) -> list[Piece]:
    """Return the pieces of a layer: a norm, its attention or state, another norm, its MLP.

    Args:
        layer: the layer.
        hidden: numbers of a token between layers.
        shard: what the rank has of a batch.
        room: what the attention needs while it runs.
        tile: tokens that norms and MLPs run on at once; `None` for all.
    """
    norm = norm_piece(hidden, shard, tile)
    if layer.state is None:
        mixing = [_projections(layer, hidden, shard), _attention(layer, hidden, shard, room)]
    else:
        mixing = [_state(layer.state, hidden, shard)]
    return [norm, *mixing, norm, _mlp(layer, hidden, shard, tile)]


def stream_bytes(hidden: int, shard: Shard) -> float:
    """Return the bytes of a token between layers, where tensor parallelism shards tokens."""
    return hidden / shard.tp * shard.itemsize


def norm_kept(hidden: int, shard: Shard) -> float:
    """Return the bytes by token that an RMSNorm of transformers and the product after it keep.

    They are the input in float32, the input over its norm, and the output. The latter is gathered
    over the ranks of tensor parallelism.
    """
    wide = max(KEPT_ITEMSIZE, shard.itemsize)
    return hidden * ((wide + shard.itemsize) / shard.tp + shard.itemsize)


def norm_piece(hidden: int, shard: Shard, tile: int | None = None) -> Piece:
    """Return an RMSNorm of transformers, which computes in float32."""
    wide = max(KEPT_ITEMSIZE, shard.itemsize) * hidden / shard.tp
    stream = stream_bytes(hidden, shard)
    kept = norm_kept(hidden, shard)
    if tile is None:
        # Backward adds the gradient by way of the mean of squares: four tensors in float32.
        return _piece("norm", shard, kept, wide, stream + 4 * wide)
    # Input and output are kept. Gradients: of the residual, of tiles, and of the output or of all
    # tiles joined.
    inside = (kept + 4 * wide) * min(tile, shard.tokens)
    output = hidden * shard.itemsize
    norm = _piece("norm", shard, stream + output, output, 3 * stream)
    return norm._replace(forward=norm.forward + int(inside), backward=norm.backward + int(inside))


def attention_kept(layer: LayerShape, shard: Shard) -> tuple[float, float]:
    """Return the bytes by token of queries, keys and values, and of outputs and lse."""
    (heads, key_heads), tp = layer.heads, shard.tp
    inputs = (heads + 2 * key_heads) * layer.head_dim * shard.itemsize / tp
    out, lse = heads * layer.head_dim * shard.itemsize / tp, heads * KEPT_ITEMSIZE / tp
    return inputs, out + lse


def _projections(layer: LayerShape, hidden: int, shard: Shard) -> Piece:
    """Return what is between projections and the attention, and a gate behind it."""
    wide = max(KEPT_ITEMSIZE, shard.itemsize)
    queries = layer.heads[0] * layer.head_dim / shard.tp
    both = sum(layer.heads) * layer.head_dim / shard.tp
    kept, normed = 0.0, 0.0
    if layer.has_query_norm:
        # As any norm of transformers; its output goes to the rotary embedding, which keeps none.
        kept, normed = both * (wide + shard.itemsize), 4 * wide * both
    if layer.has_gate:
        # The gate, its sigmoid, and the product with it.
        kept += 3 * queries * shard.itemsize
    # Rotary embeddings: the query before, its halves in the other order, and two products.
    rotary = 4 * queries * shard.itemsize
    grads = stream_bytes(hidden, shard) + attention_kept(layer, shard)[0]
    return _piece("projections", shard, kept, rotary, grads + max(rotary, normed))


def _attention(layer: LayerShape, hidden: int, shard: Shard, room: AttentionRoom) -> Piece:
    inputs, results = attention_kept(layer, shard)
    query = layer.heads[0] * layer.head_dim * shard.itemsize / shard.tp
    # The gradient of the output beside that of the residual.
    grads = int((stream_bytes(hidden, shard) + query) * shard.tokens)
    kept = int((inputs + results) * shard.tokens)
    return Piece("attention", kept, room.forward, grads + room.backward)


def _state(state: StateShape, hidden: int, shard: Shard) -> Piece:
    """Return a layer's gated delta rule, by kernels that have chunks of `CHUNK` tokens.

    The count is that of flash-linear-attention's `chunk_gated_delta_rule`, which keeps its inputs
    and a triangle of each chunk, and computes states of chunks again in backward.
    """
    width, wide = shard.itemsize, max(KEPT_ITEMSIZE, shard.itemsize)
    mixed = 2 * state.keys + state.values
    # A convolution's input and output, the gate, triangles, and the result with its norm.
    kept = 2 * mixed + state.values + state.heads[1] * CHUNK + 2 * state.values
    kept_wide = 2 * state.values
    states = state.heads[1] * state.head_dims[0] * state.head_dims[1] // CHUNK
    # States of chunks, two tensors as large as values, and gradients of all inputs.
    backward = states + 2 * state.values + mixed + 2 * state.values
    by_token = kept * width + kept_wide * wide, states * width, backward * width
    kept_all, forward, needed = (x / shard.tp for x in by_token)
    return _piece("state", shard, kept_all, forward, stream_bytes(hidden, shard) + needed)


def _mlp(layer: LayerShape, hidden: int, shard: Shard, tile: int | None) -> Piece:
    stream = stream_bytes(hidden, shard)
    kept, forward, backward = _mlp_bytes(layer, hidden, shard)
    if tile is None:
        return _piece("mlp", shard, kept, stream + forward, 2 * stream + backward)
    weights = sum(x.weights for x in layer.mlp) // shard.tp * shard.itemsize
    # Of all tokens: tiles and their join, forward, and with the residual's gradient backward. A
    # tile adds its gradients of the weights to those before.
    inside = int((kept + max(forward, backward)) * min(tile, shard.tokens))
    mlp = _piece("mlp", shard, 0.0, 2 * stream, 3 * stream)
    return mlp._replace(forward=mlp.forward + inside, backward=mlp.backward + inside + weights)


def _mlp_bytes(layer: LayerShape, hidden: int, shard: Shard) -> tuple[float, float, float]:
    """Return what an MLP keeps, and needs forward and backward, in bytes of a token."""
    inner = layer.activated / shard.tp * shard.itemsize
    # Copies of a token for its experts; their results are as large.
    copies = layer.routed * hidden * shard.itemsize
    # Kept are the gate, its activation, up and their product. Backward has gradients of three of
    # them when the product is free already; before that, three gradients of experts' results.
    return 4 * inner + 2 * copies, 2 * copies, max(2 * inner, 3 * copies)


def _piece(name: str, shard: Shard, *by_token: float) -> Piece:
    return Piece(name, *(int(x * shard.tokens) for x in by_token))
