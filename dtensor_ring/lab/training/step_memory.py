"""What a simulated training step keeps in the memory of a rank, in bytes.

Activations are those of the modules of transformers, without compilation, as `estimate` counts
them on the meta device.

Note [Pieces]: a layer is a list of pieces, in the order of its forward. Each keeps tensors for its
backward, and needs others while it runs. Forward adds up what is kept; backward goes through the
pieces from the last one, and what a piece kept is free after it. So the most bytes at once are a
maximum over pieces. Counts are those of transformers' modules without compilation; `estimate`
counts the same modules on the meta device, and tests compare both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from dtensor_ring.all_to_all.plan import all_to_all_plan
from dtensor_ring.compute.accumulate import ON_GPUS
from dtensor_ring.lab.problem import SimulatedProblem
from dtensor_ring.lab.recorded import RankAttention
from dtensor_ring.lab.training.layer_seconds import Shard
from dtensor_ring.lab.training.model_shape import LayerShape, ModelShape, Product
from dtensor_ring.lab.training.state_shape import StateShape
from dtensor_ring.lab.training.step_request import MemorySetting
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.strategy import Strategy
from dtensor_ring.planning.tile import FULL
from dtensor_ring.transport.transport import QUANTISED


class AttentionRoom(NamedTuple):
    """Bytes that an attention needs beside its inputs and results.

    Attributes:
        held: messages of other ranks in its backward, which has most.
        forward: all that its forward needs: messages and partial outputs.
        backward: all that its backward needs: messages, gradients of query, key and value, and
            what kernels on GPUs have inside.
    """

    held: int = 0
    forward: int = 0
    backward: int = 0


def attention_room(problem: SimulatedProblem, strategy: Strategy, on_gpu: bool) -> AttentionRoom:
    """Return what an attention needs on the last rank, which with a causal mask receives most.

    Note [Room of an attention]: a partial result stays in the dtype of the kernel until there are
    `num_parts` of them; then they are merged into one of float32, see Note [Partials at once]. On a
    GPU, backward kernels sum the gradient of a query in float32, too (Dao, 2023, arXiv 2307.08691,
    section 3.1), which no allocation outside of them shows. Keys and values in eight bits take less
    room in messages, and more beside them.

    Args:
        problem: the attention.
        strategy: how it is made parallel.
        on_gpu: whether it runs on GPUs.
    """
    size, rank = problem.world_size, problem.world_size - 1
    where = rank, size, problem.seq_len, problem.documents
    mask = FULL if problem.mask is None else problem.mask
    of_rank = plan(problem.layout, mask, *where, strategy=strategy)
    all_to_all = None
    if strategy.heads > 1:
        layouts = problem.layout, problem.layout
        all_to_all = all_to_all_plan(*layouts, strategy.heads, rank, size, problem.seq_len)
    sizes = problem.sizes
    forward, backward = (x.held for x in RankAttention(of_rank, all_to_all, sizes).costs())
    heads, key_heads = sizes.heads_after(all_to_all)
    tokens = of_rank.num_local[0] * sizes.batch
    query, keys = (count * sizes.head_dims[0] * tokens for count in (heads, key_heads))
    inside = query * sizes.wide_itemsize if on_gpu else 0
    narrow, wide = sizes.itemsize, sizes.wide_itemsize
    # Shares of keys and values that travel in eight bits: this rank's own, rounded, those of a step
    # in the dtype of the kernel, and those that are made eight bits.
    copies = 3 * 2 * keys * narrow if sizes.kv_dtype in QUANTISED else 0
    if of_rank.num_steps == 1:
        # One launch: its results are the final ones.
        grads = (query + 2 * keys) * narrow
        return AttentionRoom(backward, forward + copies, backward + copies + grads + inside)
    # Half a partial more: one of half of the rows leaves room for another of all rows.
    running = query * wide + int(query * (_num_parts(problem, on_gpu) + 0.5) * narrow)
    # Rounded in the end, when no message is under way any more; what is wide already stays.
    rounded = query * narrow if narrow < wide else 0
    # The sum of this rank's own keys and values, and their gradients of a step.
    sums = 2 * keys * (wide + narrow)
    moving = max(backward + copies, rounded) + inside
    # The result of the forward is not counted here, and is there in the end only.
    out = query * narrow
    ahead = running + max(forward + copies, rounded) - out
    return AttentionRoom(backward, ahead, running + sums + moving)


def _num_parts(problem: SimulatedProblem, on_gpu: bool) -> int:
    """Return how many partial results of the kernel's dtype are kept, see `TransferPolicy`."""
    is_narrow = problem.sizes.itemsize < problem.sizes.wide_itemsize
    return problem.num_parts or (ON_GPUS if on_gpu and is_narrow else 1)


# Parameters, gradients, states of AdamW, lse and norms are float32 or wider.
KEPT_DTYPE, KEPT_ITEMSIZE = "float32", 4


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


def _layer_pieces(
    layer: LayerShape, hidden: int, shard: Shard, room: AttentionRoom, tile: int | None = None
) -> list[Piece]:
    """Return the pieces of a layer: a norm, its state and attention, another norm, its MLP.

    Args:
        layer: the layer.
        hidden: numbers of a token between layers.
        shard: what the rank has of a batch.
        room: what the attention needs while it runs.
        tile: tokens that norms and MLPs run on at once; `None` for all.
    """
    norm = _norm_piece(hidden, shard, tile)
    mixing = [] if layer.state is None else [_state(layer.state, hidden, shard)]
    if layer.heads[0]:
        mixing += [_projections(layer, hidden, shard), _attention(layer, hidden, shard, room)]
    blocks = mixing, [_mlp(layer, hidden, shard, tile)] if layer.mlp else []
    return [piece for block in blocks if block for piece in (norm, *block)]


def _stream_bytes(hidden: int, shard: Shard) -> float:
    """Return the bytes of a token between layers, where tensor parallelism shards tokens."""
    return hidden / shard.tp * shard.itemsize


def norm_kept(hidden: int, shard: Shard) -> float:
    """Return the bytes by token that an RMSNorm of transformers and the product after it keep.

    They are the input in float32, the input over its norm, and the output. The latter is gathered
    over the ranks of tensor parallelism.
    """
    wide = max(KEPT_ITEMSIZE, shard.itemsize)
    return hidden * ((wide + shard.itemsize) / shard.tp + shard.itemsize)


def _norm_piece(hidden: int, shard: Shard, tile: int | None = None) -> Piece:
    """Return an RMSNorm of transformers, which computes in float32."""
    wide = max(KEPT_ITEMSIZE, shard.itemsize) * hidden / shard.tp
    stream = _stream_bytes(hidden, shard)
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
    """Return the piece between projections and attention, with the gate after it."""
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
    grads = _stream_bytes(hidden, shard) + attention_kept(layer, shard)[0]
    return _piece("projections", shard, kept, rotary, grads + max(rotary, normed))


def _attention(layer: LayerShape, hidden: int, shard: Shard, room: AttentionRoom) -> Piece:
    inputs, results = attention_kept(layer, shard)
    query = layer.heads[0] * layer.head_dim * shard.itemsize / shard.tp
    # The gradient of the output beside that of the residual.
    grads = int((_stream_bytes(hidden, shard) + query) * shard.tokens)
    kept = int((inputs + results) * shard.tokens)
    return Piece("attention", kept, room.forward, grads + room.backward)


def _state(state: StateShape, hidden: int, shard: Shard) -> Piece:
    """Return a layer's convolution and recurrence, by kernels that have chunks of tokens.

    The count is that of flash-linear-attention's `chunk_gated_delta_rule`, which keeps its inputs
    and a triangle of each chunk, and computes states of chunks again in backward; without triangles
    in other layers.
    """
    width, wide = shard.itemsize, max(KEPT_ITEMSIZE, shard.itemsize)
    mixed, triangles = state.channels, state.heads * state.chunk * state.has_matrix
    # A convolution's input and output, the gates, and the result with its norm.
    kept = 2 * mixed + state.gates + triangles + 2 * state.values
    kept_wide = 2 * state.values
    states = state.heads * state.head_dims[0] * state.head_dims[1] // state.chunk
    # States of chunks, two tensors as large as values, and gradients of all inputs.
    backward = states + 2 * state.values + mixed + 2 * state.values
    by_token = kept * width + kept_wide * wide, states * width, backward * width
    kept_all, forward, needed = (x / shard.tp for x in by_token)
    return _piece("state", shard, kept_all, forward, _stream_bytes(hidden, shard) + needed)


def _mlp(layer: LayerShape, hidden: int, shard: Shard, tile: int | None) -> Piece:
    stream = _stream_bytes(hidden, shard)
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
    norm = _norm_piece(model.hidden, shard, setting.mlp_tile)
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
        pieces = _layer_pieces(layer, hidden, shard, room, setting.mlp_tile)
        most = max(most_backward(pieces), most_forward(pieces))
        stream = int(_stream_bytes(hidden, shard) * shard.tokens)
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
