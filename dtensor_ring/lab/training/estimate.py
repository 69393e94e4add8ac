"""The command `estimate` prints what a training step takes on one rank."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtensor_ring.dtensor.choice import DEFAULT_MACHINE
from dtensor_ring.dtensor.meta_model import LoadModel, MetaModel, ModelRequest
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.problem import config_json
from dtensor_ring.lab.report import Finding, refused, show
from dtensor_ring.lab.training.layer_footprint import LayerFootprint
from dtensor_ring.lab.training.longest import usable
from dtensor_ring.lab.training.model_source import check_sizes, layers_of
from dtensor_ring.lab.training.step_memory import KEPT_ITEMSIZE, StepMemory, fsdp_states
from dtensor_ring.lab.training.step_request import MemorySetting, memory_setting


@dataclass(frozen=True)
class Estimate:
    """What a training step takes on one rank; sizes are in bytes.

    The command prints it; its JSON has the same fields.

    Attributes:
        model: name of the model.
        mesh: number of ranks along each axis.
        seq_len: global length, in tokens.
        parameters: this rank's parameters.
        gradients: this rank's gradients.
        optimizer: this rank's states of AdamW.
        gathered: parameters and gradients of other ranks, while FSDP2 has them here.
        attention_kept: queries, keys, values, outputs and lse that attentions keep for backward.
        attention_working: what one attention needs besides while it runs: keys and values of other
            ranks, sums of their gradients, and partial results.
        others_kept: everything else that is kept for the backward.
        peak: the most bytes at once, with the gradients that are there then.
        host: what is in the host's memory instead.
        messages: number of messages that this rank sends in one training step, bytes sent and
            received, and bytes held.
        attentions: each kind of attention, with its number of calls in a forward.
        cache: keys and values that this rank keeps of the sequence for `generate`; `None` if they
            were not asked for.
        dtype: of the layers; parameters that FSDP2 shards are float32, as are what belongs to them.
        capacity: what a step may take of a device; `None` if no device was given.
        device: whose capacity that is.
    """

    model: str
    mesh: Mapping[str, int]
    seq_len: int
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    attention_kept: int
    attention_working: int
    others_kept: int
    peak: int
    host: int
    messages: Mapping[str, int]
    attentions: list[dict[str, Any]] = field(default_factory=list)
    cache: int | None = None
    dtype: str = ""
    capacity: int | None = None
    device: str = ""

    @property
    def why_not(self) -> str | None:
        """Why the step does not fit into the device; `None` if it does, or none was given."""
        if self.capacity is None or self.peak <= self.capacity:
            return None
        sizes = [f"{x / 2**30:,.1f} GiB" for x in (self.peak, self.capacity)]
        return f"needs {sizes[0]}, and a step may take {sizes[1]} of {self.device}"

    def rows(self) -> list[tuple[str, str]]:
        """Return the rows of a table: names and values."""
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        sizes = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "states of AdamW": self.optimizer,
            "gathered parameters": self.gathered,
            "kept by attentions": self.attention_kept,
            "kept by the rest": self.others_kept,
            "in one attention": self.attention_working,
            "peak": self.peak,
            "on the host": self.host,
            "cache of generate": self.cache or 0,
        }
        rows = [("model", self.model), ("mesh", axes), ("tokens", f"{self.seq_len:,}")]
        rows.append(("dtype of layers", self.dtype))
        rows += [(name, f"{size / 2**20:,.1f} MiB") for name, size in sizes.items() if size]
        for each in self.attentions:
            (heads, key_heads), (dim, value_dim) = each["heads"], each["head_dims"]
            dims = f"{dim}" if dim == value_dim else f"{dim} and {value_dim}"
            shape = f"{heads} heads over {key_heads}, head dim {dims}"
            if each["chosen"] is not None:
                shape += f", {each['chosen']:,} keys of a query"
            rows.append(("attention", f"{each['calls']} x {shape}, {each['hops']} hops"))
        sent, received = (f"{self.messages[x] / 2**20:,.1f}" for x in ("sent", "received"))
        reported = f"{self.messages['messages']:,}, {sent} MiB sent, {received} MiB received"
        rows.append(("messages of a step", reported))
        if self.capacity is None:
            return rows
        room = f"{self.capacity / 2**30:,.1f} GiB that a step may take of {self.device}"
        return [*rows, ("does not fit", self.why_not) if self.why_not else ("fits", f"into {room}")]

    def as_json(self) -> dict[str, Any]:
        """Return the fields, as the command prints them in JSON."""
        return asdict(self) | {"why_not": self.why_not}


def estimate(
    load: LoadModel,
    model: str,
    seq_len: int,
    mesh: Mapping[str, int],
    batch: int,
    layout: str | None,
    strategy: str,
    machine: str | None,
    memory: float | None,
    dtype: torch.dtype | None,
    checkpoint: str,
    offload: Sequence[str],
    kv_dtype: str | None,
    is_sharded: bool,
    cache_dtype: str | None,
    as_json: bool,
) -> int:
    """Print what a training step takes on one rank, and return the exit status."""
    asked = ModelRequest(
        seq_len=seq_len,
        batch=batch,
        layout=layout or "zigzag",
        strategy=strategy,
        dtype=dtype,
        machine=machine,
        cache_dtype=cache_dtype,
        kv_dtype=kv_dtype,
    )
    try:
        setting = memory_setting(checkpoint, offload=offload)
        content = config_json(Path(model)) if Path(model).exists() else None
        if isinstance(content, Mapping):
            check_sizes(content)
        device = as_machine(machine or DEFAULT_MACHINE)
        found = estimated(load, model, mesh, asked, setting, is_sharded=is_sharded)
    except (ImportError, OSError, TypeError, ValueError) as error:
        return refused(error)
    name = device.name if memory is None else f"a device of {memory:g} GiB"
    whole = device.memory if memory is None else int(memory * 2**30)
    found = replace(found, capacity=usable(whole), device=name)
    if as_json:
        print(json.dumps(found.as_json()))
    else:
        show([Finding(name, value) for name, value in found.rows()])
    return 0


def estimated(
    load: LoadModel,
    spec: str,
    mesh: Mapping[str, int],
    asked: ModelRequest,
    setting: MemorySetting | None = None,
    *,
    is_sharded: bool = True,
) -> Estimate:
    """Estimate what a training step takes, see Note [Dry run].

    Args:
        load: makes the model.
        spec: how the command line names the model.
        mesh: number of ranks along each axis.
        asked: what the model is to be run on.
        setting: what backward computes again, and what is on the host; nothing by default.
        is_sharded: whether FSDP2 shards parameters over `dp_shard` and `cp`; else they are whole.

    Raises:
        ImportError: if a package that the model needs is not installed.
        ValueError: if the model cannot be made, is not served, or has no attention.
    """
    setting = setting or MemorySetting()
    ranks = mesh.get("dp_shard", 1) * mesh.get("cp", 1) if is_sharded else 1
    with alone(mesh.get("cp", 1)) as axis:
        model = load(spec, axis, asked)
        is_here = "optimizer" not in setting.offload
        step = _run(model, setting, is_here / ranks if is_sharded or not is_here else None)
        cache = None if asked.cache_dtype is None else _cache(model)
    if not step.attentions:
        raise ValueError(f"{model.name} has no attention over its sequence, so nothing to shard")
    state, run = _states(model.module, is_sharded, ranks, setting), step.bytes
    found, (attention, others, *_) = run.fullest(state, setting), run.kept(setting)
    return Estimate(
        model=model.name,
        mesh=dict(mesh),
        seq_len=asked.seq_len,
        parameters=state.parameters,
        gradients=state.gradients,
        optimizer=state.optimizer,
        gathered=state.gathered,
        attention_kept=attention,
        attention_working=step.working,
        others_kept=others + run.before + run.head_kept,
        peak=found.peak,
        host=found.host,
        messages=asdict(step.messages),
        attentions=[
            x._asdict() | {"mask": str(x.mask), "hops": x.steps - 1, "calls": calls}
            for x, calls in step.attentions.items()
        ],
        cache=cache,
        dtype=_dtypes(model.module),
    )


def _run(model: MetaModel, setting: MemorySetting, share: float | None) -> LayerFootprint:
    """Run a training step on the meta device, and return its footprint.

    Args:
        model: the model, whose parameters are whole.
        setting: what backward computes again.
        share: see `LayerFootprint`.

    Raises:
        ValueError: if the model's code needs the content of tensors.
    """
    step = LayerFootprint(model.module, setting.checkpoint, share)
    try:
        step.run(model.loss)
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"{model.name} does not run without weights, on the meta device, which an estimate "
            f"needs ({type(error).__name__}: {error})"
        ) from error
    return step


def _dtypes(module: nn.Module) -> str:
    """Return the names of the dtypes that parameters have, the most frequent first."""
    numbers = Counter[str]()
    for x in module.parameters():
        numbers[str(x.dtype).removeprefix("torch.")] += x.numel()
    return ", ".join(name for name, _ in numbers.most_common())


def _cache(model: MetaModel) -> int:
    """Return the bytes that this rank, the last one, keeps of the sequence in a cache.

    Raises:
        ValueError: if the model has no cache.
    """
    if model.cache is None:
        raise ValueError(
            f"{model.name} has no cache that is sharded, only models of transformers that generate "
            "have; leave --cache-dtype out"
        )
    return model.cache()[-1]


def _states(
    module: nn.Module, is_sharded: bool, num_shards: int, setting: MemorySetting
) -> StepMemory:
    """Return the bytes of parameters, gradients, states of AdamW, and what FSDP2 gathers."""
    least = KEPT_ITEMSIZE if is_sharded else 1
    kept, trained = (_size(module, trained=x, least=least) for x in (False, True))
    layers = [*map(_size, layers_of(module))]
    return fsdp_states(kept, trained, layers, _size(module) - sum(layers), num_shards, setting)


def _size(module: nn.Module, trained: bool = False, least: int = 1) -> int:
    """Return the bytes of parameters, of which each number takes at least `least` bytes."""
    parameters = [x for x in module.parameters() if x.requires_grad or not trained]
    return sum(x.numel() * max(least, x.itemsize) for x in parameters)


@contextmanager
def alone(world_size: int) -> Iterator[dist.DeviceMesh]:
    """Make a mesh with this process as the last rank, and without the other ranks.

    With a causal mask, the last rank has the latest tokens and receives the most keys and values.
    The default process group ends with the context.

    Raises:
        ValueError: if there is a process group already.
    """
    # PyTorch's own tests make meshes with this backend and store.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ValueError("this process is a rank of a group; start it without a launcher")
    dist.init_process_group("fake", store=FakeStore(), rank=world_size - 1, world_size=world_size)
    try:
        yield dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()
