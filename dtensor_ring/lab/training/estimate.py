"""The command `estimate` prints what a training step takes on one rank."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dtensor_ring.dtensor.choice import DEFAULT_MACHINE
from dtensor_ring.dtensor.meta_model import LoadModel, MetaModel, ModelRequest
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.problem import config_json
from dtensor_ring.lab.report import Finding, refused, show
from dtensor_ring.lab.training.footprint import Attention, Footprint
from dtensor_ring.lab.training.longest import usable
from dtensor_ring.lab.training.model_source import check_sizes, layers_of
from dtensor_ring.lab.training.step_memory import (
    KEPT_ITEMSIZE,
    StepMemory,
    fetched_layers,
    fsdp_states,
)
from dtensor_ring.lab.training.step_request import MemorySetting, memory_setting
from dtensor_ring.ops.ring_op import ring_op
from dtensor_ring.selected.op import select_op, selected_op


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
        *(seq_len, batch, layout or "zigzag", strategy, dtype, machine, cache_dtype, kv_dtype)
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
        _show(found)
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
    host = FarInputs() if "checkpoints" in setting.offload else None
    ranks = mesh.get("dp_shard", 1) * mesh.get("cp", 1) if is_sharded else 1
    with alone(mesh.get("cp", 1)) as axis:
        model = load(spec, axis, asked)
        if setting.checkpoint != "none":
            checkpoint_layers(model.module, setting.checkpoint, host)
        step, forward = _run(model, ranks if is_sharded else None, setting)
        cache = None if asked.cache_dtype is None else _cache(model)
    if not forward.attentions:
        raise ValueError(f"{model.name} has no attention over its sequence, so nothing to shard")
    states = _states(model.module, is_sharded, ranks, setting)
    # What runs has whole parameters.
    running, on_host = step.peak - _size(model.module), states.host
    if host is not None:
        fetched = fetched_layers(setting.checkpoint)
        far = _far_results(forward, fetched)
        # All backwards of layers are alike then, so the fullest one is the last, with gradients.
        running += (fetched - 1) * host.largest - far + states.gradients
        on_host += host.held + far
    return Estimate(
        model=model.name,
        mesh=dict(mesh),
        seq_len=asked.seq_len,
        parameters=states.parameters,
        gradients=states.gradients,
        optimizer=states.optimizer,
        gathered=states.gathered,
        attention_kept=forward.kept,
        attention_working=step.working,
        others_kept=forward.others,
        # In the update, all gradients are there, and nothing runs.
        peak=states.parameters
        + states.optimizer
        + max(states.gathered + running, states.gradients),
        host=on_host,
        messages=asdict(step.messages),
        attentions=[
            x._asdict() | {"mask": str(x.mask), "hops": x.steps - 1, "calls": calls}
            for x, calls in forward.attentions.items()
        ],
        cache=cache,
        dtype=_dtypes(model.module),
    )


class _Forward(NamedTuple):
    """What is known after the forward, before the backward computes a part of it again.

    Attributes:
        attentions: number of calls of each kind of attention.
        kept: bytes that attentions keep for the backward.
        others: bytes that everything else keeps for the backward.
    """

    attentions: Counter[Attention]
    kept: int
    others: int


def _run(model: MetaModel, ranks: int | None, setting: MemorySetting) -> tuple[Footprint, _Forward]:
    """Run a training step on the meta device, and return its footprint and its forward.

    Args:
        model: the model, whose parameters are whole.
        ranks: number of ranks that FSDP2 shards them over; `None` without FSDP2.
        setting: what is on the host.

    Raises:
        ValueError: if the model's code needs the content of tensors.
    """
    step = Footprint()
    if ranks is not None or setting.offload:
        _reduce_gradients(model.module, step, 0 if setting.offload else 1 / (ranks or 1))
    try:
        with step:
            step.count(list(model.module.parameters()))
            before = step.alive
            loss = model.loss()
            # Read before the backward: only what the forward keeps is still alive.
            kept, whole = step.kept, step.alive - before
            forward = _Forward(step.attentions.copy(), kept, whole - kept)
            loss.backward()
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"{model.name} does not run without weights, on the meta device, which an estimate "
            f"needs ({type(error).__name__}: {error})"
        ) from error
    return step, forward


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


def _far_results(forward: _Forward, fetched: int) -> int:
    """Return the bytes of attention's results that go to the host with the inputs of layers.

    A checkpoint keeps them apart from what hooks see, so the dry run has them on the device, where
    only those of `fetched` layers are.
    """
    calls = forward.attentions.total()
    return forward.kept * max(0, calls - fetched) // calls


def _reduce_gradients(module: nn.Module, step: Footprint, share: float) -> None:
    """Keep a share of each gradient once it is there, as FSDP2 does after it has reduced it."""

    def reduce(parameter: Tensor) -> None:
        parameter.grad = None
        step.keep(int(parameter.numel() * max(KEPT_ITEMSIZE, parameter.itemsize) * share))

    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(reduce)


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


def _show(found: Estimate) -> None:
    show([Finding(*row) for row in found.rows()])


@contextmanager
def alone(world_size: int) -> Iterator[DeviceMesh]:
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
        yield init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    finally:
        dist.destroy_process_group()


class AbsentTensor(NamedTuple):
    """A tensor that is on the host, without its content, which a dry run does not have."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class FarInputs:
    """Keeps the inputs of layers off the device until their backward.

    Attributes:
        held: bytes moved off the device.
        largest: bytes of the largest tensor; copies of its size are in flight while a layer runs.
    """

    def __init__(self) -> None:
        self.held = self.largest = 0

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a checkpointed layer whose inputs are kept here."""
        # The checkpoint's own hooks see all that its layer saves; these hooks see its inputs only.
        with saved_tensors_hooks(self.pack, self.unpack), warnings.catch_warnings():
            # Of torch 2.15: what an attention returned may go through these hooks one day.
            warnings.filterwarnings("ignore", "A saved_tensors_hooks context", FutureWarning)
            return forward(*args, **kwargs)

    def pack(self, x: Tensor) -> Any:
        """Take a tensor off the device."""
        self.held += x.nbytes
        self.largest = max(self.largest, x.nbytes)
        return AbsentTensor(x.shape, x.stride(), x.dtype, x.device)

    def unpack(self, x: Any) -> Tensor:
        """Return a tensor of that shape on the device."""
        return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=x.device)


def checkpoint_layers(module: nn.Module, kind: str, host: FarInputs | None = None) -> None:
    """Make each layer keep its input only, and compute its forward again in its backward.

    Args:
        module: the model.
        kind: "full", or "attention" to keep what attentions return, too.
        host: where the inputs of layers are kept; `None` for the device.
    """
    contexts = {} if kind == "full" else {"context_fn": _keeping_attention}
    # On the meta device there are no random numbers to reproduce.
    options: Any = {"use_reentrant": False, "preserve_rng_state": False, **contexts}
    for layer in layers_of(module):
        forward = partial(checkpoint, layer.forward, **options)
        layer.forward = forward if host is None else partial(host.run, forward)


def _keeping_attention() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts([ring_op, select_op, selected_op])
