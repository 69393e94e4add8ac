"""What `simulate_step` is asked for, checked: sizes, the mesh, and ways to take less memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from dtensor_ring.lab.machine import Machine
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.training.collectives import RankGroup, rank_group
from dtensor_ring.lab.training.layer_seconds import FLOAT8, Shard, gemm_rate, itemsize
from dtensor_ring.lab.training.model_shape import ModelShape
from dtensor_ring.lab.training.names import CHECKPOINTS, MESH_AXES
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Boundaries, Documents, as_documents
from dtensor_ring.planning.ranges import MAX_RANKS, as_count
from dtensor_ring.planning.strategy import check_strategy
from dtensor_ring.transport.transport import DEFAULT_POLICY, TransferPolicy


class StepRequest(NamedTuple):
    """A training step, checked.

    Attributes:
        model: the model.
        seq_len: tokens of a sequence.
        batch: sequences of each group of `cp` ranks.
        mesh: ranks by axis.
        machine: the machine.
        strategy: spec of the strategy of all layers.
        layout: the layout of the sequence.
        shard: what one rank has.
        dtype: dtype between layers.
        setting: what it does to take less memory.
        kernel: name of the attention kernel; `None` for the first one of the machine.
        batches: documents of each data-parallel group, or one for all; `None` for whole sequences.
        is_compiled: whether kernels that only read and write memory are fused.
    """

    model: ModelShape
    seq_len: int
    batch: int
    mesh: StepMesh
    machine: Machine
    strategy: str
    layout: Layout | str
    shard: Shard
    dtype: str
    setting: MemorySetting
    kernel: str | None
    batches: tuple[Documents | None, ...]
    is_compiled: bool = False


class MemorySetting(NamedTuple):
    """What a training step does to take less memory.

    Attributes:
        checkpoint: one of `CHECKPOINTS`.
        mlp_tile: tokens of a rank that MLPs, experts and norms run on at once; they are computed
            again in backward. `None` for all tokens.
        offload: which of `OFFLOADS` live on the host.
        policy: in which dtype keys and values travel, and how many partial results a rank keeps.

    >>> print(MemorySetting("full", 4096, ("checkpoints",)))
    full checkpoints, MLP tiles of 4,096, checkpoints on the host
    """

    checkpoint: str = "none"
    mlp_tile: int | None = None
    offload: tuple[str, ...] = ()
    policy: TransferPolicy = DEFAULT_POLICY

    def __str__(self) -> str:
        named = [f"{self.checkpoint} checkpoints" if self.checkpoint != "none" else "nothing"]
        if self.mlp_tile is not None:
            named.append(f"MLP tiles of {self.mlp_tile:,}")
        if self.offload:
            named.append(f"{' and '.join(self.offload)} on the host")
        if self.policy.num_parts is not None:
            named.append(f"num_parts={self.policy.num_parts}")
        if self.policy.kv_dtype is not None:
            named.append(f"keys as {str(self.policy.kv_dtype).removeprefix('torch.')}")
        # Something else makes "nothing" wrong.
        return ", ".join(named[1:] if named[0] == "nothing" and len(named) > 1 else named)

    def as_json(self) -> dict[str, Any]:
        """Return its fields, as the command prints them in JSON."""
        kind = self.policy.kv_dtype
        return {
            "checkpoint": self.checkpoint,
            "mlp_tile": self.mlp_tile,
            "offload": list(self.offload),
            "kv_dtype": None if kind is None else str(kind).removeprefix("torch."),
            "num_parts": self.policy.num_parts,
        }


# What may live on the host: what layers with checkpoints keep until their backward; parameters,
# their gradients and the states of AdamW, as `CPUOffloadPolicy` of FSDP2 does it.
OFFLOADS = ("checkpoints", "optimizer")


def memory_setting(
    checkpoint: Any = "none", mlp_tile: Any = None, offload: Any = (), policy: Any = None
) -> MemorySetting:
    """Check the fields of a `MemorySetting`.

    Raises:
        TypeError: if a field is of another type.
        ValueError: if a name is unknown or there twice, a number is out of range, or checkpoints
            are offloaded and none are made.

    >>> memory_setting("full", offload=["checkpoints"]).offload
    ('checkpoints',)
    """
    if not isinstance(checkpoint, str) or checkpoint not in CHECKPOINTS:
        raise ValueError(f"checkpoint must be one of {', '.join(CHECKPOINTS)}, got {checkpoint!r}")
    if isinstance(offload, str) or not isinstance(offload, Iterable):
        raise TypeError(
            f"offload must be a list of names, such as ['checkpoints'], got {offload!r}"
        )
    names = tuple(offload)
    if not set(names) <= set(OFFLOADS) or len(set(names)) < len(names):
        raise ValueError(
            f"offload takes {' and '.join(OFFLOADS)}, each once, got {', '.join(map(str, names))}"
        )
    if "checkpoints" in names and checkpoint == "none":
        raise ValueError(
            "offload of checkpoints needs checkpoint 'full' or 'attention', got 'none': without "
            "checkpoints there is nothing to bring to the host"
        )
    policy = DEFAULT_POLICY if policy is None else policy
    if not isinstance(policy, TransferPolicy):
        raise TypeError(f"policy must be a TransferPolicy, got {policy!r}")
    policy.refuse_order("a simulated step")
    tile = None if mlp_tile is None else as_count("mlp_tile", mlp_tile, 1)
    return MemorySetting(checkpoint, tile, names, policy)


# A time of each pair of ranks is kept, which are 0.3 GB.
MAX_CP = 4096


class StepMesh(NamedTuple):
    """Ranks by axis, from the outermost to the innermost.

    Attributes:
        dp_replicate: copies of the parameters.
        dp_shard: batches of one copy; FSDP2 shards parameters over them and `cp` together.
        cp: ranks that share sequences.
        tp: ranks that share heads and weights; neighbours.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, axes: Mapping[str, int], world_size: int | None = None) -> StepMesh:
        """Check the axes of a mesh.

        Args:
            axes: ranks by name; "dp" is "dp_shard".
            world_size: what they must multiply to, if it is given.

        Raises:
            TypeError: if it is no mapping, or a number is not an integer.
            ValueError: if a name is unknown or there twice, a number is out of range, or the
                product is another one.

        >>> StepMesh.of({"dp": 4, "cp": 8}).world_size
        32
        """
        if not isinstance(axes, Mapping):
            raise TypeError(f"mesh must be ranks by axis, such as {{'cp': 8}}, got {axes!r}")
        named = {"dp_shard" if name == "dp" else name: size for name, size in axes.items()}
        if not set(named) <= set(MESH_AXES) or len(named) < len(axes):
            raise ValueError(
                f"a mesh has axes of {', '.join(MESH_AXES)} and dp, which is dp_shard, each once; "
                f"got {', '.join(map(str, axes))}"
            )
        limits = {name: MAX_CP if name == "cp" else MAX_RANKS for name in named}
        mesh = cls(
            **{name: as_count(f"{name} of mesh", x, 1, limits[name]) for name, x in named.items()}
        )
        if world_size is not None and mesh.world_size != as_count("world_size", world_size):
            spelled = " x ".join(f"{name} {size}" for name, size in axes.items())
            raise ValueError(
                f"mesh {spelled} has {mesh.world_size} ranks, and world_size is {world_size}"
            )
        return mesh

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return prod(self)

    def shards(self, machine: Machine) -> RankGroup:
        """Return the ranks that FSDP2 shards parameters over."""
        return rank_group(machine, self.dp_shard * self.cp, self.tp)

    def replicas(self, machine: Machine) -> RankGroup:
        """Return the ranks that have the same shard."""
        return rank_group(machine, self.dp_replicate, self.dp_shard * self.cp * self.tp)

    def check(self, model: ModelShape, seq_len: int) -> None:
        """Refuse a model or length that this mesh does not divide.

        Raises:
            ValueError: if heads, inner sizes or tokens do not divide.
        """
        for layer in model.layers:
            for count, what in zip(layer.heads, ("heads", "key heads"), strict=True):
                self._divide(f"{count} {what} of {model.name}", count, "tp")
            if layer.state is not None:
                for count in (layer.state.heads, layer.state.groups):
                    self._divide(f"{count} heads of states of {model.name}", count, "tp")
        model.layer_weights(self.tp)
        self._divide(f"seq_len of {seq_len} tokens", seq_len, "cp")

    def _divide(self, what: str, size: int, axis: str) -> None:
        ranks = getattr(self, axis)
        if size % ranks:
            raise ValueError(f"{what} cannot be divided over the {ranks} ranks of {axis}")


# The strategy that takes least time, for each kind of attention.
AUTO = "auto"


def step_request(
    config: Any,
    seq_len: int,
    mesh: Mapping[str, int],
    machine: Machine | str = "h100",
    *,
    strategy: str = "ring",
    layout: Layout | str = "zigzag",
    batch: int = 1,
    dtype: Any = "bfloat16",
    checkpoint: str = "none",
    mlp_tile: int | None = None,
    offload: Sequence[str] = (),
    policy: TransferPolicy | None = None,
    kernel: str | None = None,
    batches: Sequence[Boundaries] | None = None,
    world_size: int | None = None,
    compiled: bool = False,
) -> StepRequest:
    """Check the arguments of `simulate_step`, which has their meaning.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a name is unknown, the config is not that of a model that is simulated, or a
            size is out of range or not divisible.
    """
    model = ModelShape.of(config)
    axes = StepMesh.of(mesh, world_size)
    tokens, rows = as_count("seq_len", seq_len, 1), as_count("batch", batch, 1, MAX_BATCH)
    if tokens**2 * rows > MAX_PAIRS:
        raise ValueError(
            f"seq_len {tokens:,} with batch {rows:,} has more pairs of tokens than {MAX_PAIRS:,}, "
            "which is all that is counted"
        )
    axes.check(model, tokens)
    if not isinstance(strategy, str):
        raise TypeError(f"strategy must be a name, a str, got {strategy!r}")
    if strategy != AUTO:
        check_strategy(strategy, axes.cp)
    dtype = str(dtype).removeprefix("torch.")
    setting = memory_setting(checkpoint, mlp_tile, offload, policy)
    if not isinstance(compiled, bool):
        raise TypeError(f"compiled must be True or False, got {compiled!r}")
    if kernel is not None and not isinstance(kernel, str):
        raise TypeError(f"kernel must be the name of a kernel or None, got {kernel!r}")
    documents = _documents(batches, axes)
    rows = max(rows, len(documents[0] or ()))  # boundaries by row say how many, alike in all
    found = as_machine(machine)
    kept = "bfloat16" if dtype in FLOAT8 else dtype
    width = itemsize(kept)
    gemm_rate(found, dtype)  # raises before attentions are simulated
    return StepRequest(
        model=model,
        seq_len=tokens,
        batch=rows,
        mesh=axes,
        machine=found,
        strategy=strategy,
        layout=layout,
        shard=Shard(tokens * rows // axes.cp, axes.tp, width, dtype, axes.cp > 1),
        dtype=kept,
        setting=setting,
        kernel=kernel,
        batches=documents,
        is_compiled=compiled,
    )


# Sequences of a step: planning them takes longer the more there are.
MAX_BATCH = 4096
# Pairs of tokens are counted in int64.
MAX_PAIRS = 2**60


def _documents(
    batches: Sequence[Boundaries] | None, mesh: StepMesh
) -> tuple[Documents | None, ...]:
    """Return the documents of each data-parallel group; one `None` for whole sequences.

    Raises:
        ValueError: if there is not one batch for each group, or they have different numbers of
            rows.
    """
    if batches is None:
        return (None,)
    if isinstance(batches, str) or not isinstance(batches, Sequence):
        raise TypeError(f"batches must be a list of boundaries, got {batches!r}")
    groups = mesh.dp_replicate * mesh.dp_shard
    if len(batches) != groups:
        raise ValueError(f"{groups} data-parallel groups need as many batches, got {len(batches)}")
    try:
        found = tuple(map(as_documents, batches))
    except (TypeError, ValueError) as error:
        raise type(error)(f"batches are boundaries of documents: {error}") from None
    if len({len(x or ()) for x in found}) > 1:
        raise ValueError("batches must have equal numbers of rows")
    return found
