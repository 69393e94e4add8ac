"""Simulate a training step: what each part of it takes, on machines that nobody has to rent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from dtensor_ring.balanced.balanced import layout_for
from dtensor_ring.lab.machine import Machine
from dtensor_ring.lab.training.collectives import (
    COLLECTIVE,
    TaskSpan,
    UnitSeconds,
    all_reduce_seconds,
    collective_seconds,
    fsdp_tasks,
    run_streams,
)
from dtensor_ring.lab.training.layer_attention import (
    AttentionKind,
    AttentionSeconds,
    model_attentions,
    rank_memory,
)
from dtensor_ring.lab.training.layer_run import layer_run
from dtensor_ring.lab.training.layer_seconds import LayerClock, PartSeconds, peak_flops
from dtensor_ring.lab.training.layer_states import StateSeconds, model_states
from dtensor_ring.lab.training.model_shape import LayerShape
from dtensor_ring.lab.training.state_shape import StateShape
from dtensor_ring.lab.training.step_memory import KEPT_DTYPE, KEPT_ITEMSIZE, recorded_head
from dtensor_ring.lab.training.step_request import AUTO, StepRequest, step_request
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import Boundaries, Mask
from dtensor_ring.planning.plan import plan
from dtensor_ring.transport.transport import TransferPolicy


@dataclass(frozen=True)
class SimulatedStep:
    """What a training step takes on each rank. Printed, it is a table.

    Attributes:
        model: name of the model.
        machine: name of the machine.
        mesh: ranks by axis.
        seq_len: tokens of a sequence.
        strategy: spec of the strategy.
        dtype: of matrix products.
        parts: seconds by part; they add up to `seconds`. "attention" and "gemm" are kernels,
            "others" all other kernels, "ring", "fsdp" and "tp" what a rank waits for messages of
            context parallelism, of FSDP2 and of tensor parallelism, "states" kernels of layers with
            a state, "scan" what these wait for messages, "loss" the output projection and the
            cross-entropy, "optimizer" the update.
        flops: FLOPs of the model on each rank: six for each weight and token in matrix products,
            embeddings not counted, and 12 for each visible pair of tokens, head and number of a
            head; three times those of a forward of states. Nothing that is computed again is
            counted.
        flops_of_all_pairs: the same with pairs of tokens that masks hide, as many projects count
            (Chowdhery et al., 2022, arXiv 2204.02311): about twice as many in long sequences.
        peak_flops: FLOPs per second of a device by its data sheet.
        tokens_per_second: tokens per second and rank.
        memory: bytes of a rank by what they are, and their sum as "peak".
        capacity: bytes that a device has.
        spans: when the kernels and collectives of FSDP2 run, from the beginning of the step.
        attentions: the attention of each distinct mask.
        states: what each kind of layer with a state sends and waits for.
    """

    model: str
    machine: str
    mesh: Mapping[str, int]
    seq_len: int
    strategy: str
    dtype: str
    parts: Mapping[str, float]
    flops: float
    flops_of_all_pairs: float
    peak_flops: float
    tokens_per_second: float
    memory: Mapping[str, int]
    capacity: int
    spans: tuple[TaskSpan, ...] = field(repr=False, default=())
    attentions: Mapping[str, AttentionSeconds] = field(repr=False, default_factory=dict)
    states: Mapping[str, StateSeconds] = field(repr=False, default_factory=dict)

    @property
    def seconds(self) -> float:
        """What the step takes."""
        return sum(self.parts.values())

    @property
    def mfu(self) -> float:
        """Model FLOPs per second over those of the device; only visible pairs are counted."""
        return self.flops / self.seconds / self.peak_flops

    @property
    def why_not(self) -> str | None:
        """Why it does not fit into the memory of a device; `None` if it does."""
        peak = self.memory["peak"]
        if peak <= self.capacity:
            return None
        return f"needs {peak / 2**30:,.1f} GiB, and a device has {self.capacity / 2**30:,.1f}"

    def as_json(self) -> dict[str, Any]:
        """Return the numbers, as the command prints them in JSON."""
        return {
            "model": self.model,
            "machine": self.machine,
            "mesh": dict(self.mesh),
            "seq_len": self.seq_len,
            "strategy": self.strategy,
            "dtype": self.dtype,
            "seconds": self.seconds,
            "parts": dict(self.parts),
            "flops": self.flops,
            "tflops_per_second": self.flops / self.seconds / 1e12,
            "mfu": self.mfu,
            "flops_of_all_pairs": self.flops_of_all_pairs,
            "tflops_per_second_of_all_pairs": self.flops_of_all_pairs / self.seconds / 1e12,
            "mfu_of_all_pairs": self.mfu * self.flops_of_all_pairs / self.flops,
            "tokens_per_second": self.tokens_per_second,
            "attentions": {mask: x.as_json() for mask, x in self.attentions.items()},
            "states": {name: x.as_json() for name, x in self.states.items()},
            "memory": dict(self.memory),
            "why_not": self.why_not,
        }

    @property
    def titles(self) -> list[tuple[str, str]]:
        """The parts that such a model has, and what tables call them."""
        return [x for x in TITLES if self.states or x[0] not in OF_STATES]

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of a table: names and values."""
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        rows = [("model", f"{self.model} on {self.machine}, {axes}, {self.strategy}")]
        rows.append(("tokens of a sequence", f"{self.seq_len:,}"))
        rows.append(("dtype", f"{self.dtype} products, {KEPT_DTYPE} parameters"))
        if self.strategy == AUTO:
            chosen = ((f"strategy of {x}", y.strategy) for x, y in self.attentions.items())
            rows += chosen
        rows += [(f"layers with {name}", str(x)) for name, x in self.states.items()]
        for name, title in self.titles:
            rows.append((title, f"{self.parts[name] * 1e3:,.1f} ms"))
        rows.append(("step", f"{self.seconds * 1e3:,.1f} ms"))
        counts = ("MFU", self.flops), ("MFU, hidden pairs counted", self.flops_of_all_pairs)
        rates = [(name, flops / self.seconds) for name, flops in counts]
        rows += [
            *(
                (x, f"{y / self.peak_flops:.1%}, {y / 1e12:,.0f} TFLOP/s of a rank")
                for x, y in rates
            ),
            ("tokens per second and rank", f"{self.tokens_per_second:,.0f}"),
        ]
        for name, size in self.memory.items():
            if size:
                rows.append((name.replace("_", " "), f"{size / 2**30:,.2f} GiB"))
        return rows + ([("does not fit", self.why_not)] if self.why_not else [])

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.rows())
        return "\n".join(f"{name.ljust(width)}  {value}" for name, value in self.rows())


# Parts of a step, and what tables call them.
TITLES = (
    ("attention", "attention"),
    ("gemm", "matrix products"),
    ("others", "other kernels"),
    ("ring", "waits in attention"),
    ("states", "kernels of states"),
    ("scan", "waits for states"),
    ("fsdp", "waits for FSDP2"),
    ("tp", "tensor parallelism"),
    ("loss", "loss"),
    ("optimizer", "update by AdamW"),
)

# Those that only models with layers with a state have.
OF_STATES = "states", "scan"


def simulate_step(
    config: Any,
    seq_len: int,
    mesh: Mapping[str, int],
    machine: Machine | str = "h100",
    *,
    strategy: str = "ring",
    layout: Layout | str = "zigzag",
    batch: int = 1,
    dtype: torch.dtype | str = "bfloat16",
    checkpoint: str = "none",
    mlp_tile: int | None = None,
    offload: Sequence[str] = (),
    policy: TransferPolicy | None = None,
    kernel: str | None = None,
    batches: Sequence[Boundaries] | None = None,
    world_size: int | None = None,
    compiled: bool = False,
) -> SimulatedStep:
    """Simulate a training step of a language model with FSDP2, context and tensor parallelism.

    Attention is simulated by its plans, see `simulate_attention`. Of all else each launch takes
    what its FLOPs and bytes do, see Note [Roofline]; launches are those of a run of each kind of
    layer, without content, see Note [Run, not counted]. FSDP2 is as Note [Overlap] has it. Links
    have nothing else to do.

    Args:
        config: a config of transformers, a mapping with the names of a `config.json`, or the path
            of one or of its folder.
        seq_len: tokens of a sequence.
        mesh: ranks by axis: `dp_replicate`, `dp_shard` (or `dp`), `cp`, `tp`, from the outermost
            to the innermost. FSDP2 shards parameters over `dp_shard` and `cp`.
        machine: a machine, the path of its file, or the name of a preset.
        strategy: the strategy of attention, see `SequenceAxis`.
        layout: the layout of sequences.
        batch: sequences of each group of `cp` ranks.
        dtype: of matrix products, or its name; that of all else, too, except for FP8, where
            all else is bfloat16.
        checkpoint: what backward computes again: "none", "full" layers, or "attention": all of a
            layer but its attention, whose output is kept.
        mlp_tile: tokens of a rank that an MLP runs on at once, computed again in backward; `None`
            for all.
        offload: what is on the host, "checkpoints" or "optimizer" or both, see
            `longest_sequences`. Seconds are without its transfers.
        policy: the dtypes in which messages travel.
        kernel: name of the attention kernel; by default the first one that the machine has.
        batches: boundaries of documents in the batch of each data-parallel group, `(D+1,)` or
            `(B, D+1)`, as many rows in all of them. Equal batches are simulated once; the slowest
            one decides.
        world_size: ranks that the mesh must have, if it is given.
        compiled: whether kernels that only read and write memory are fused, as by `torch.compile`.
            Memory stays that of modules that are not compiled.

    Returns:
        A `SimulatedStep`; print it.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if a name is unknown, the config is not that of a model with attention that is
            simulated, a size is out of range or not divisible, or the machine lacks a speed.

    Example:
        >>> config = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8)
        >>> config |= dict(num_hidden_layers=32, intermediate_size=14336, vocab_size=128256)
        >>> step = simulate_step(config, 131_072, {"dp": 2, "cp": 8}, "h100", checkpoint="full")
        >>> 0.2 < step.mfu < 0.8
        True
    """
    return simulated_step(
        step_request(
            config,
            seq_len,
            mesh,
            machine,
            strategy=strategy,
            layout=layout,
            batch=batch,
            dtype=dtype,
            checkpoint=checkpoint,
            mlp_tile=mlp_tile,
            offload=offload,
            policy=policy,
            kernel=kernel,
            batches=batches,
            world_size=world_size,
            compiled=compiled,
        )
    )


def simulated_step(asked: StepRequest) -> SimulatedStep:
    """Return what a step takes, see `simulate_step`."""
    attentions, states = model_attentions(asked), model_states(asked)
    clock = LayerClock(asked.machine, asked.shard, asked.model.hidden, asked.is_compiled)
    kinds = dict.fromkeys(asked.model.layers)
    of_kinds = {x: _layer(asked, clock, x, attentions, states) for x in kinds}
    layers = [of_kinds[x] for x in asked.model.layers]
    head = recorded_head(asked.model, asked.shard, asked.setting.mlp_tile)
    forward, backward = (x.total for x in clock.parts(head.forward, head.backward))
    gather, embedding = clock.tp_gather(), clock.embedding()
    # The embedding ends with a reduction over tensor parallelism, the head begins with a gather.
    first = _Unit(
        "embedding",
        forward=PartSeconds(others=embedding, tp=gather),
        backward=PartSeconds(others=2 * embedding, tp=gather),
    )
    last = _Unit(
        "head",
        forward=PartSeconds(loss=forward, tp=gather),
        backward=PartSeconds(loss=backward, tp=gather),
    )
    units = [first, *layers, last]
    spans = run_streams(
        fsdp_tasks(_with_collectives(asked, units)),
        asked.machine.beside_transfer,
        asked.machine.beside_kernel,
    )
    parts = sum((x.forward + x.backward for x in units), PartSeconds())
    memory = rank_memory(asked, {kind: x.room for kind, x in attentions.items()})
    # AdamW reads parameter, gradient and two states, and writes all but the gradient.
    optimizer = clock.memory(7 * memory.parameters)
    fsdp = max(span.end for span in spans) - parts.total
    seconds = {name: 0.0 for name, _ in TITLES} | parts._asdict()
    seconds |= {"fsdp": max(0.0, fsdp), "optimizer": optimizer}
    ranks = asked.mesh.cp * asked.mesh.tp
    return SimulatedStep(
        model=asked.model.name,
        machine=asked.machine.name,
        mesh={name: size for name, size in asked.mesh._asdict().items() if size > 1},
        seq_len=asked.seq_len,
        strategy=asked.strategy,
        dtype=asked.shard.gemm_dtype,
        parts=seconds,
        flops=_flops(asked, _pairs) / ranks,
        flops_of_all_pairs=_flops(asked, lambda x, mask: x.batch * x.seq_len**2) / ranks,
        peak_flops=peak_flops(asked.machine, asked.shard.gemm_dtype),
        tokens_per_second=asked.seq_len * asked.batch / ranks / sum(seconds.values()),
        memory=memory._asdict() | {"peak": memory.peak},
        capacity=asked.machine.memory,
        spans=tuple(spans),
        attentions={kind.name: x for kind, x in attentions.items()},
        states={kind.name: x for kind, x in states.items()},
    )


class _Unit(NamedTuple):
    """A layer, the embedding or the head: its seconds by part."""

    label: str
    forward: PartSeconds
    backward: PartSeconds


def _layer(
    asked: StepRequest,
    clock: LayerClock,
    layer: LayerShape,
    attentions: Mapping[AttentionKind, AttentionSeconds],
    states: Mapping[StateShape, StateSeconds],
) -> _Unit:
    """Return the seconds of a layer; its backward has what it computes again."""
    run = layer_run(asked.model.source, layer.index, asked.shard, tile=asked.setting.mlp_tile)
    forward, backward = clock.parts(run.forward, run.backward)
    collectives = PartSeconds(tp=run.blocks * clock.tp_collectives())
    attention = PartSeconds(), PartSeconds()
    if layer.heads[0]:
        attention = attentions[AttentionKind.of(layer)].parts()
    forward, backward = forward + collectives, backward + collectives + attention[1]
    if layer.state is not None:
        forward += PartSeconds(scan=states[layer.state].forward)
        backward += PartSeconds(scan=states[layer.state].backward)
    if asked.setting.checkpoint != "none":
        backward += forward
    if asked.setting.checkpoint == "full":
        backward += attention[0]
    copies = [PartSeconds(others=x) for x in _copies(asked, clock, layer)]
    return _Unit("layer", forward + attention[0] + copies[0], backward + copies[1])


def _copies(asked: StepRequest, clock: LayerClock, layer: LayerShape) -> tuple[float, float]:
    """Return the seconds in which FSDP2 copies parameters from what it gathered, and gradients."""
    if asked.mesh.shards(asked.machine).ranks == 1:
        return 0.0, 0.0
    weights = asked.model.layer_weights(asked.shard.tp)[layer.index]
    width = asked.shard.itemsize
    gathered = clock.memory(2 * weights * width)
    return gathered, gathered + clock.memory(weights * (width + KEPT_ITEMSIZE))


def _with_collectives(asked: StepRequest, units: Sequence[_Unit]) -> list[UnitSeconds]:
    """Return the units with the seconds of FSDP2's collectives for them."""
    model, tp = asked.model, asked.shard.tp
    ends = model.embedded // tp
    # A tied projection is gathered with the embedding.
    weights = [ends, *model.layer_weights(tp), 0 if model.tied else ends]
    found = []
    for unit, number in zip(units, weights, strict=True):
        gather, reduce = _fsdp(asked, number)
        forward, backward = unit.forward.total, unit.backward.total
        found.append(UnitSeconds(unit.label, forward, backward, gather, reduce))
    return found


def _fsdp(asked: StepRequest, weights: int) -> tuple[float, float]:
    """Return the seconds of gathering parameters, and of reducing their gradients in float32."""
    machine, shards = asked.machine, asked.mesh.shards(asked.machine)
    gather = collective_seconds(machine, shards, "all_gather", weights * asked.shard.itemsize)
    size = weights * KEPT_ITEMSIZE
    reduce = collective_seconds(machine, shards, "reduce_scatter", size)
    copies = asked.mesh.replicas(machine)
    return gather, reduce + all_reduce_seconds(machine, copies, size / shards.ranks)


def _flops(asked: StepRequest, count: Callable[[StepRequest, Mask], float]) -> float:
    """Return the model FLOPs of one group of `cp` and `tp` ranks; `count` counts pairs."""
    products = 3 * asked.model.flops * asked.seq_len * asked.batch
    pairs = {mask: count(asked, mask) for mask in {x.mask for x in asked.model.layers}}
    return products + sum(12 * pairs[x.mask] * x.heads[0] * x.head_dim for x in asked.model.layers)


def _pairs(asked: StepRequest, mask: Mask) -> float:
    """Return the visible pairs of the sequences of a group; the mean over all groups."""
    found = 0.0
    for documents, groups in Counter(asked.batches).items():
        layout = layout_for(asked.layout, mask, asked.seq_len, 1, documents, None)
        tiles = plan(layout, mask, 0, 1, asked.seq_len, documents).steps[0].tiles
        # A tile without a row is of all rows.
        found += groups * sum(x.area * (asked.batch if x.batch is None else 1) for x in tiles)
    return found / len(asked.batches)


def step_trace(step: SimulatedStep) -> dict[str, Any]:
    """Return a trace of a step, in the JSON format of Chrome's trace events.

    Times are in microseconds. Process 0 has the streams of a rank in the whole step. Each kind of
    attention follows with a process for each rank of its axis, in one forward and one backward.

    Args:
        step: the simulated step.
    """
    events, process = [*_events(step)], 1
    for mask, attention in step.attentions.items():
        found = json.loads(attention.timeline.chrome_trace())["traceEvents"]
        events += [_moved(event, process, mask) for event in found]
        process += 1 + max((event["pid"] for event in found), default=0)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _moved(event: dict[str, Any], process: int, mask: str) -> dict[str, Any]:
    """Return a trace event of an attention, which is a process named by its mask."""
    event = event | {"pid": event["pid"] + process}
    if event["name"] == "process_name":
        event["args"] = {"name": f"attention, {mask}, {event['args']['name']}"}
    return event


def _events(step: SimulatedStep) -> Iterator[dict[str, Any]]:
    yield named("process_name", 0, 0, f"{step.model}, {step.strategy}")
    for stream, name in enumerate(("kernels", "FSDP2")):
        yield named("thread_name", 0, stream, name)
    for span in step.spans:
        yield {
            "name": span.label,
            "cat": "collective" if span.stream == COLLECTIVE else "kernels",
            "ph": "X",
            "pid": 0,
            "tid": span.stream,
            "ts": span.begin * 1e6,
            "dur": (span.end - span.begin) * 1e6,
        }


def named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    """Return the event that names a process or a thread."""
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
