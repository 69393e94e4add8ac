"""What `simulate_step` is asked for, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Boundaries, Documents, as_documents
from dtensor_ring.planning.ranges import as_count
from dtensor_ring.planning.strategy import check_strategy
from dtensor_ring.simulate.machine import Machine
from dtensor_ring.simulate.machine_files import as_machine
from dtensor_ring.simulate.training.layer_seconds import Shard, gemm_rate, itemsize
from dtensor_ring.simulate.training.memory_setting import MemorySetting, memory_setting
from dtensor_ring.simulate.training.model_shape import ModelShape
from dtensor_ring.simulate.training.step_mesh import StepMesh
from dtensor_ring.transport.transport import TransferPolicy

# The strategy that takes least time, for each kind of attention.
AUTO = "auto"

# Matrix products in FP8 leave everything else, attention too, in 16 bits.
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


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
    with_states: bool = False,
) -> StepRequest:
    """Check the arguments of `simulate_step`, which has their meaning.

    `with_states` lets layers with a state through, whose memory is counted, and not their seconds.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a name is unknown, the config is not that of a model that is simulated, or a
            size is out of range or not divisible.
    """
    model = ModelShape.of(config, with_states=with_states)
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
    if kernel is not None and not isinstance(kernel, str):
        raise TypeError(f"kernel must be the name of a kernel or None, got {kernel!r}")
    documents = _documents(batches, axes)
    rows = max(rows, *(len(x or ()) for x in documents))  # boundaries by row say how many
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
        shard=Shard(tokens * rows // axes.cp, axes.tp, width, dtype),
        dtype=kept,
        setting=setting,
        kernel=kernel,
        batches=documents,
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
