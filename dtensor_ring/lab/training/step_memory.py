"""What a simulated training step keeps in the memory of a rank, in bytes.

Note [Moments]: forward adds up what layers keep; backward goes through them from the last one, and
what a layer kept is free after it, while its gradients come. So the peak is that of the fullest
moment: in the loss, in the backward of one of the layers, or in the update, which has all gradients
and nothing else beside the states.
What a layer keeps and needs is recorded, see Note [Run, not counted], without compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate, repeat
from typing import NamedTuple

from dtensor_ring.lab.problem import SimulatedProblem
from dtensor_ring.lab.recorded import ShapeKernel
from dtensor_ring.lab.recorded_ranks import rank_attention
from dtensor_ring.lab.training.footprint import Storages
from dtensor_ring.lab.training.layer_run import RecordedRun, head_run, layer_run
from dtensor_ring.lab.training.layer_seconds import Shard
from dtensor_ring.lab.training.model_shape import LayerShape, ModelShape
from dtensor_ring.lab.training.step_request import MemorySetting
from dtensor_ring.planning.strategy import Strategy


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

    Note [Room of an attention]: its loops run without content, see Note [One loop, counted], and
    what they allocate is counted while it is alive. What backward kernels of GPUs have inside, no
    allocation outside of them shows: the gradient of a query in float32, and a sum for each row
    (Dao, 2023, arXiv 2307.08691, section 3.1); where heads of queries share a key, its gradients
    of each of them before they are added, as in cuDNN and flash attention 2.

    Args:
        problem: the attention.
        strategy: how it is made parallel.
        on_gpu: whether it runs on GPUs.
    """
    of_rank, sizes = rank_attention(problem, strategy, problem.world_size - 1), problem.sizes
    run = of_rank.directions(lambda _: ShapeKernel(), on_gpu)
    with Storages() as forward:
        next(run)
    with Storages() as backward:
        recorder, beside = next(run)
    # The result and the gradient of the result, and inputs, are counted where they are kept.
    rows = sizes.batch * of_rank.num_tokens
    result = rows * sizes.heads[0] * sizes.head_dims[1] * sizes.itemsize
    given = rows * sizes.heads[0] * sizes.head_dims[0]
    given += rows * sizes.heads[1] * sum(sizes.head_dims)
    lse = rows * sizes.heads[0] * sizes.wide_itemsize
    inside = lse * (sizes.head_dims[0] + 1) * on_gpu
    if on_gpu and sizes.heads[0] > sizes.heads[1]:
        inside += rows * sizes.heads[0] * sum(sizes.head_dims) * sizes.itemsize
    ahead = forward.peak - given * sizes.itemsize - result - lse
    held = recorder.cost.held + beside
    return AttentionRoom(held, max(0, ahead), backward.peak - result + inside)


# Parameters, gradients, states of AdamW, lse and norms are float32 or wider.
KEPT_DTYPE, KEPT_ITEMSIZE = "float32", 4

# Numbers that AdamW keeps for each parameter.
OPTIMIZER = 2

# The loss makes logits of a part of the vocabulary at a time: of at most this many parts, each of
# these bytes in float32 at least. `parallel_plans` has the loss, which is above this package.
LOSS_TILES, LOSS_TILE_BYTES = 64, 16 * 2**20

# Tensors on their way back from the host, as the plan for transformers has them.
AHEAD = 3


class StepMemory(NamedTuple):
    """Bytes of one rank.

    Attributes:
        parameters: its shard of the parameters.
        gradients: its shard of their gradients, those that are there in the fullest moment.
        optimizer: its shard of the states of AdamW.
        gathered: parameters and gradients of other ranks while FSDP2 has them here, as layers take
            them.
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


class LayerBytes(NamedTuple):
    """What a layer keeps until its backward, and what that needs at its fullest moment.

    Attributes:
        attention: what its attention keeps.
        others: what else it keeps.
        most: the peak of its forward and backward, above what was allocated before.
    """

    attention: int
    others: int
    most: int


class RunBytes(NamedTuple):
    """What a run of the modules of a model needs, without what belongs to parameters.

    Attributes:
        before: what is allocated before the first layer, and stays until its backward.
        layers: from the first to the last.
        head_kept: what comes after the layers keeps.
        head_most: the peak of that, forward and backward.
        waiting: gradients of it that wait for the end of the backward.
    """

    before: int
    layers: Sequence[LayerBytes]
    head_kept: int
    head_most: int
    waiting: int = 0

    def fullest(
        self, state: StepMemory, setting: MemorySetting, gradients: Sequence[int] = ()
    ) -> StepMemory:
        """Return the bytes of the fullest moment, see Note [Moments].

        Args:
            state: the bytes of parameters, and of what belongs to each.
            setting: what is on the host.
            gradients: those that are there in the loss and in the backward of each layer, the last
                one first; none if the run has them.
        """
        attention, others, below, on_host = self.kept(setting)
        kept = self.before + attention + others + self.head_kept
        later = self.before + self.waiting
        backwards = [x + layer.most + later for x, layer in zip(below, self.layers, strict=True)]
        moments = [kept - self.head_kept + self.head_most, *reversed(backwards)]
        size, there = max(zip(moments, gradients or repeat(0), strict=bool(gradients)), key=sum)
        state = state._replace(host=state.host + on_host)
        running = state._replace(
            gradients=there,
            attention_kept=attention,
            others_kept=kept - attention,
            working=size - kept,
        )
        update = state._replace(gathered=0)
        return max(running, update, key=lambda moment: moment.peak)

    def kept(self, setting: MemorySetting) -> tuple[int, int, list[int], int]:
        """Return what attentions keep, all else, both of all layers before each, and the host's."""
        layers = self.layers
        attention, others = (sum(x[i] for x in layers) for i in range(2))
        below = [*accumulate((x.attention + x.others for x in layers), initial=0)][:-1]
        if "checkpoints" not in setting.offload or not layers:
            return attention, others, below, 0
        on_host, there = attention + others, min(fetched_layers(setting.checkpoint), len(layers))
        attention, others = (there * max(x[i] for x in layers) for i in range(2))
        below = [(attention + others) // there * (there - 1)] * len(layers)
        return attention, others, below, on_host


def step_memory(
    model: ModelShape,
    shard: Shard,
    num_shards: int,
    setting: MemorySetting,
    rooms: Sequence[AttentionRoom],
) -> StepMemory:
    """Return what a rank keeps, see Note [Moments].

    Args:
        model: the model.
        shard: what the rank has of a batch.
        num_shards: ranks that FSDP2 shards parameters over.
        setting: what the step does to take less.
        rooms: what the attention of each layer needs while it runs.
    """
    weights = model.layer_weights(shard.tp)
    of_layer = lru_cache(partial(_layer_bytes, model, shard, setting))
    layers = [of_layer(layer, room) for layer, room in zip(model.layers, rooms, strict=True)]
    # All layers share the tables of rotary embeddings.
    tables = int(2 * max(x.head_dim for x in model.layers) * shard.itemsize * shard.tokens)
    head = recorded_head(model, shard, setting.mlp_tile)
    embedded = model.embedded // shard.tp
    root = embedded * (1 if model.tied else 2)
    # The gradient of the head waits for that of the embedding.
    waiting = embedded * shard.itemsize
    run = RunBytes(tables, layers, sum(head.saved.values()), head.most, waiting)
    kept = (sum(weights) + root) * KEPT_ITEMSIZE
    gathered = [x * shard.itemsize for x in weights]
    state = fsdp_states(kept, kept, gathered, root * shard.itemsize, num_shards, setting)
    # FSDP2 reduces those of embedding and head in the end.
    there = accumulate(reversed(weights[1:]), initial=0)
    is_here = "optimizer" not in setting.offload
    gradients = [-(-x * KEPT_ITEMSIZE * is_here // num_shards) for x in (0, *there)]
    return run.fullest(state, setting, gradients)


def _layer_bytes(
    model: ModelShape,
    shard: Shard,
    setting: MemorySetting,
    layer: LayerShape,
    room: AttentionRoom,
) -> LayerBytes:
    found = layer_run(model.source, layer.index, shard, room[1:], setting.mlp_tile)
    if setting.checkpoint == "none":
        return LayerBytes(found.attention_kept, found.others_kept, found.most)
    stream = model.hidden * shard.tokens // shard.tp * shard.itemsize
    # The input of the layer stays beside what is computed again.
    most = found.most + (0 if found.keeps_input else stream)
    results = found.results if setting.checkpoint == "attention" else 0
    return LayerBytes(results, stream, most)


def recorded_head(model: ModelShape, shard: Shard, mlp_tile: int | None) -> RecordedRun:
    """Run the last norm and the loss, with the tiles that the loss of the plan has."""
    vocabulary, tokens = model.vocabulary // shard.tp, shard.tokens
    fitting = LOSS_TILE_BYTES // (KEPT_ITEMSIZE * tokens)
    entries = min(vocabulary, max(1, fitting, -(-vocabulary // LOSS_TILES)))
    return head_run(model.source, entries, -(-vocabulary // entries), shard, mlp_tile)


def fetched_layers(checkpoint: str) -> int:
    """Return how many layers' checkpoints are on a device while all others are on the host.

    They are the layer whose backward runs, and those on their way. A layer keeps its input; or its
    input and two results of its attention.

    >>> fetched_layers("full"), fetched_layers("attention")
    (4, 2)
    """
    return 1 + AHEAD // (1 if checkpoint == "full" else 3)


def fsdp_states(
    kept: int,
    trained: int,
    layers: Sequence[int],
    root: int,
    num_shards: int,
    setting: MemorySetting,
) -> StepMemory:
    """Return a rank's bytes of parameters, gradients and states of AdamW, and what FSDP2 gathers.

    Args:
        kept: bytes of all parameters, in the dtype in which they are kept.
        trained: those of parameters that are trained.
        layers: bytes of the parameters of each layer, in the dtype in which it takes them.
        root: those of all other parameters.
        num_shards: ranks that FSDP2 shards parameters over.
        setting: what is on the host.
    """
    parts = [-(-x // num_shards) for x in (kept, trained, OPTIMIZER * trained)]
    is_gathered = num_shards > 1 or kept > sum(layers) + root
    # In backward: two layers of parameters, and the gradients of one.
    gathered = (root + 3 * max(layers, default=0)) * is_gathered
    if "optimizer" in setting.offload:
        return StepMemory(0, 0, 0, gathered, 0, 0, 0, sum(parts))
    parameters, gradients, optimizer = parts
    return StepMemory(parameters, gradients, optimizer, gathered, 0, 0, 0)
