"""What layers keep for backward goes to host memory, and is back before it is needed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_plans.huggingface.activations import kept_for_backward
from parallel_plans.huggingface.activations.kept_for_backward import (
    AHEAD,
    HostMemory,
    StreamCopies,
    offload,
)
from tests.families import VOCABULARY, small_model
from tests.huggingface.activations.played_copies import PlayedCopies

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
