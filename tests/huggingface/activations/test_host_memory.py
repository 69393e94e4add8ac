"""What layers keep for backward, in host memory too: it is counted, and back when it is needed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from dtensor_ring import SequenceAxis
from dtensor_ring.lab.training.footprint import Storages
from dtensor_ring.ops.ring_op import ring_backward_op, ring_op
from parallel_plans.huggingface import ring_checkpoint_contexts
from parallel_plans.huggingface.activations import kept_for_backward
from parallel_plans.huggingface.activations.kept_for_backward import (
    AHEAD,
    HOST_MEMORY,
    HostMemory,
    StreamCopies,
    offload,
)
from parallel_plans.huggingface.activations.token_tiles import tokenwise_modules
from tests.dense import largest
from tests.families import VOCABULARY, small_model
from tests.huggingface.planned import relative, shard_weights, under_plan
from tests.huggingface.test_families_trained import RingCalls
from tests.pool import on_ranks

LAYER = nn.Identity()


def sines(memory: HostMemory, x: Tensor, number: int) -> Tensor:
    """A chain of ops that each save their input."""
    memory.open(LAYER)
    for _ in range(number):
        x = x.sin()
    memory.close(LAYER)
    return x


def test_order_of_copies() -> None:
    """Tensors leave the device `AHEAD` later, and their copies start `AHEAD` earlier."""
    copies, number = PlayedCopies(), 6
    memory, x = HostMemory(copies, 0), torch.linspace(0, 1, 5, requires_grad=True)
    y = sines(memory, x, number)
    expected = [("out", k) for k in range(AHEAD)]
    for k in range(AHEAD, number):
        expected += [("out", k), ("wait out", k - AHEAD)]
    assert copies.log == expected
    copies.log.clear()
    y.sum().backward()
    expected = []
    for k in reversed(range(number)):
        expected += [("in", k - AHEAD)] if k >= AHEAD else []
        expected.append(("wait out" if k >= number - AHEAD else "wait in", k))
    assert copies.log == expected
    grad, x.grad = x.grad, None
    sines(HostMemory(copies, 2**20), x, number).sum().backward()
    assert torch.equal(x.grad, grad)


def test_a_second_backward() -> None:
    x = torch.linspace(0, 1, 5, requires_grad=True)
    y = sines(HostMemory(PlayedCopies(), 0), x, 6).sum()
    first, second = (torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_two_graphs_at_once() -> None:
    memory = HostMemory(PlayedCopies(), 0)
    inputs = [torch.linspace(0, k, 5, requires_grad=True) for k in (1, 2)]
    expected = [torch.autograd.grad(sines(HostMemory(), x, 5).sum(), x)[0] for x in inputs]
    outputs = [sines(memory, x, 5).sum() for x in inputs]
    found = [torch.autograd.grad(y, x)[0] for y, x in zip(outputs, inputs, strict=True)]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_what_stays() -> None:
    """What is small, no real number, listed by its storage, or in host memory already."""
    copies = PlayedCopies()
    memory, kept = HostMemory(copies, 40), torch.ones(100)
    views = torch.ones(9, 9)[:, 1:], torch.ones(9).expand(9, 9)
    for x in (torch.ones(9), torch.ones(9, dtype=torch.long), kept[:50], *views):
        assert memory.pack([{"weight": kept, "bias": None}], x) is x
        assert memory.unpack(x) is x
    assert not copies.log
    for device in ("cpu", "meta"):
        assert not StreamCopies().takes(torch.ones(1, device=device))
    x = torch.ones(2**19)
    assert HostMemory().pack([], x) is x


def test_a_tensor_that_changes_meanwhile() -> None:
    memory, x = HostMemory(PlayedCopies(), 0), torch.ones(5)
    saved = memory.pack([], x)
    x.add_(1)
    with pytest.raises(RuntimeError, match=r"\(5,\) was changed in place while it was copied"):
        memory.unpack(saved)


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_models_that_are_checkpointed(is_training: bool, is_checkpointed: bool) -> None:
    """Each layer's input goes, with the last norm's, where backward computes layers again."""
    model, copies, inputs = small_model("Llama").train(is_training), PlayedCopies(), []
    memory = HostMemory(copies, 0)
    for _ in range(2):  # once more, as by a second plan
        offload(model.model, memory)
    for module in (*model.model.layers, model.model.norm):
        module.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    if is_checkpointed:
        model.activation_checkpointing_enable()
    tokens = torch.arange(18).view(2, 9) % VOCABULARY
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    if not (is_training and is_checkpointed):
        assert not copies.log
        return
    assert len(inputs) == 3
    for x, host in zip(inputs, copies.hosts, strict=False):
        assert torch.equal(x, host)
    num_moved = len(copies.hosts)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    assert len(copies.hosts) == num_moved
    assert copy.deepcopy(memory) is memory


def test_an_error_in_a_model_ends_it() -> None:
    model, tokens = small_model("Llama").model.train(), torch.ones(1, 3, dtype=torch.long)
    offload(model, HostMemory(PlayedCopies(), 0))
    model.activation_checkpointing_enable()
    for hook in (model.layers[0].register_forward_pre_hook, model.register_forward_pre_hook):
        hook(lambda *_: 1 / 0, prepend=True)
        with pytest.raises(ZeroDivisionError):
            model(tokens)
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


class PlayedStream:
    """Notes what is done on it."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name

    def wait_stream(self, other: PlayedStream) -> None:
        self._log.append(f"{self._name} waits for {other._name}")

    def record_event(self) -> str:
        self._log.append(f"event on {self._name}")
        return "event"

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self._name} waits for {event}")

    def __enter__(self) -> None:
        self._log.append(f"on {self._name}")

    def __exit__(self, *_: Any) -> None:
        self._log.append(f"off {self._name}")


def test_copies_on_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    kernels, real = PlayedStream(log, "kernels"), torch.empty_like

    def empty_like(x: Tensor, **how: Any) -> Tensor:
        log.append(f"memory {how}")
        return real(x)

    monkeypatch.setattr(torch, "Stream", lambda device: PlayedStream(log, "copies"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: kernels)
    monkeypatch.setattr(kept_for_backward.torch, "empty_like", empty_like)
    copies, x = StreamCopies(), torch.arange(4.0)
    copy_and_wait = [
        *("copies waits for kernels", "on copies", "off copies", "event on copies"),
        "kernels waits for event",
    ]

    def check(copy: tuple[Tensor, Callable[[], None]], memory: dict[str, Any]) -> None:
        found, wait = copy
        assert torch.equal(found, x)
        wait()
        assert log == [f"memory {memory}", *copy_and_wait]
        log.clear()

    check(copies.to_host(x), {"device": "cpu", "pin_memory": True})
    check(copies.to_device(x, x.device), {"device": x.device})


STEPS, SEQ_LEN = 3, 24
KEPT = {"mlp_tile": 5, "offload": True}
SELECTIVE = {"use_reentrant": False, "context_fn": ring_checkpoint_contexts}


class Case(NamedTuple):
    """A model, and how it is trained on (dp, cp) ranks."""

    family: str = "Llama"
    has_lora: bool = False
    is_compiled: bool = False
    layout: str | None = "zigzag"
    dtype: torch.dtype = torch.float64


def trained(case: Case, is_kept: bool) -> tuple[list[float], dict[str, Any], int]:
    """Losses, parameters, and how many tensors went to host memory."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = small_model(case.family).to(case.dtype).train()
    under_plan(model, case.layout, mesh=mesh["cp"], **KEPT if is_kept else {})
    copies = played(model)
    trains = model
    if case.has_lora:
        targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
        adapters = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        torch.manual_seed(1)
        trains = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    model.activation_checkpointing_enable(SELECTIVE)
    layers, everyone = model.base_model.layers, mesh["dp", "cp"]._flatten("dp_cp")
    for layer in layers if case.is_compiled else ():
        layer.compile(backend="aot_eager", fullgraph=True)
    shard_weights(model, layers, everyone)
    trainable = [x for x in trains.parameters() if x.requires_grad]
    # In float32 the sign of gradients near zero is a matter of rounding, see test_trainer_steps.
    eps = 1e-8 if case.dtype == torch.float64 else 1e-2
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, eps=eps)
    losses, row = [], mesh["dp"].get_local_rank()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(2, VOCABULARY, (2, SEQ_LEN), generator=generator)[row, None]
        loss = trains(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = {name: x.full_tensor() for name, x in trains.named_parameters()}
    return losses, whole, len(copies.hosts)


def played(model: Any) -> PlayedCopies:
    """Let the CPU stand for a device, if the model has a plan that offloads."""
    copies = PlayedCopies()
    if memory := vars(model.base_model).get(HOST_MEMORY):
        memory.copies, memory.min_bytes = copies, 0
    return copies


@pytest.mark.parametrize(
    "case",
    [
        *(Case(has_lora=True), Case("Qwen3-MoE, router loss", dtype=torch.float32)),
        *(
            pytest.param(case, marks=pytest.mark.repeats)
            for case in (
                *(Case(), Case("Gemma 3"), Case("gpt-oss", dtype=torch.float32)),
                # Not Qwen3-Next: a change of its weights by 1e-7 grows to 6e-4 in ten steps.
                *(Case("LFM2", layout=None), Case("OLMo hybrid", layout=None)),
                *(Case(is_compiled=True), Case(has_lora=True, is_compiled=True)),
            )
        ),
    ],
    ids=str,
)
@on_ranks(4)
def test_steps_equal_those_without(case: Case) -> None:
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    (losses, parameters, kept), (expected, whole, none) = (trained(case, x) for x in (True, False))
    found = [abs(x - y) for x, y in zip(losses, expected, strict=True)]
    assert len(set(losses)) == STEPS
    found += [relative(parameters[k], x) for k, x in whole.items()]
    assert largest(found) < 1e-6, found
    assert kept > 0 == none


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.repeats)])
@on_ranks(1)
def test_compiled(is_whole: bool) -> None:
    """As under a plain plan; a graph of the whole model moves nothing."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    found, copies = [], PlayedCopies()
    for options in ({}, KEPT):
        model = small_model("Llama", num_hidden_layers=1).double().train()
        under_plan(model, **options)
        copies = played(model)
        if options:
            model.activation_checkpointing_enable(SELECTIVE)
            part = model if is_whole else model.model.layers[0]
            part.compile(backend="aot_eager", fullgraph=True)
        tokens = torch.arange(2, 11).unsqueeze(0)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        found.append([loss, *(x.grad for x in model.parameters())])
    for x, y in zip(*found, strict=True):
        assert (x - y).norm() < 1e-6
    num_moved = len(copies.hosts)
    # A layer's input and results of its attention, and the input of the last norm.
    assert num_moved == 0 if is_whole else num_moved >= 4


HIDDEN, HEADS, HEAD_DIM = 32, 4, 8
WIDE = {"hidden_size": HIDDEN, "intermediate_size": 128, "max_position_embeddings": 512}


def bytes_of_step(num_layers: int, num_tokens: int, options: dict[str, Any]) -> tuple[int, int]:
    """Bytes that a forward keeps, and the most of the step, beside parameters and gradients."""
    model = small_model("Llama", num_hidden_layers=num_layers, **WIDE).train()
    under_plan(model, **options)
    played(model)
    model.activation_checkpointing_enable(SELECTIVE)
    tokens = torch.arange(num_tokens).unsqueeze(0) % VOCABULARY
    for x in model.parameters():
        x.grad = torch.zeros_like(x)
    with Storages() as storages:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        kept = storages.alive
        loss.backward()
    return kept, storages.peak


def bytes_by_token(options: dict[str, Any]) -> list[tuple[float, float]]:
    """What a token more adds to both, with two layers and with four."""
    shorter, longer = ([bytes_of_step(n, length, options) for n in (2, 4)] for length in (256, 512))
    return [
        ((more[0] - less[0]) / 256, (more[1] - less[1]) / 256)
        for less, more in zip(shorter, longer, strict=True)
    ]


@on_ranks(1)
def test_bytes_of_a_token() -> None:
    """A layer keeps its input and the results of its attention; moved, it keeps nothing."""
    by_layer = 4 * HIDDEN + 4 * HEADS * HEAD_DIM + 4 * HEADS
    (plain, plain_peak), (deeper, deeper_peak) = bytes_by_token({})
    assert deeper - plain == deeper_peak - plain_peak == 2 * by_layer
    few, more = bytes_by_token({"mlp_tile": 16, "offload": True})
    assert few == more
    # What attention, norms and the residual hold of one layer remains.
    assert few[1] < 13 * 4 * HIDDEN < plain_peak / 2.5


@on_ranks(1)
def test_modules_of_a_model_without_weights() -> None:
    for family in ("Llama", "Qwen3-MoE"):
        with torch.device("meta"):
            model = type(stock := small_model(family))(stock.config)
        under_plan(model, mlp_tile=5)
        tiled = {name for name, x in model.named_modules() if "forward" in vars(x)}
        assert tiled == {"", *tokenwise_modules(stock)}


SHAPE = (1, 2, 6, 4)


@on_ranks(2)
def test_hooks_get_inputs_and_results_of_attention() -> None:
    axis = SequenceAxis(init_device_mesh("cpu", (dist.get_world_size(),)), "zigzag")
    packed: list[tuple[int, ...]] = []

    def layer(x: Tensor) -> Tensor:
        return axis.attention(x, x.cos(), x.sin()).tanh()

    def pack(x: Tensor) -> Tensor:
        packed.append(tuple(x.shape))
        return x.clone()

    grads, how = [], {"use_reentrant": False, "context_fn": ring_checkpoint_contexts}
    x = torch.linspace(-1, 1, 48).view(SHAPE).requires_grad_()
    for is_kept in (False, True):
        with RingCalls() as calls, saved_tensors_hooks(pack, lambda y: y):
            if is_kept:
                packed.clear()
                out = checkpoint(layer, x, **how)
                seen = list(packed)
            else:
                out = layer(x)
            grads.append(torch.autograd.grad(out.sum(), x, retain_graph=is_kept)[0])
    with pytest.raises(RuntimeError, match=r"second backward of a layer .* retain_graph=True"):
        torch.autograd.grad(out.sum(), x)
    counts = calls.counts[ring_op], calls.counts[ring_backward_op]
    found = {"error": (grads[0] - grads[1]).abs().max().item(), "seen": seen, "calls": counts}
    assert found == {"error": 0, "seen": [SHAPE, SHAPE, SHAPE[:3]], "calls": (1, 1)}


class PlayedCopies:
    """Takes a CPU for a device. Host memory is that of numpy, which no counter of tensors sees.

    Attributes:
        log: ("out" or "in" of a copy, or what waits for it, and the number of the tensor).
        hosts: all copies to the host.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []
        self.hosts: list[Tensor] = []

    def takes(self, x: Tensor) -> bool:
        return type(x) is Tensor

    def to_host(self, x: Tensor) -> tuple[Tensor, Callable[[], None]]:
        memory = torch.from_numpy(np.empty(x.nbytes, np.uint8)).view(x.dtype)
        host = memory.as_strided(x.shape, x.stride()).copy_(x)
        self.hosts.append(host)
        return host, self._noted("out", len(self.hosts) - 1)

    def to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, Callable[[], None]]:
        number = next(index for index, x in enumerate(self.hosts) if x is host)
        return torch.empty_like(host).copy_(host), self._noted("in", number)

    def _noted(self, what: str, number: int) -> Callable[[], None]:
        self.log.append((what, number))
        return partial(self.log.append, (f"wait {what}", number))
