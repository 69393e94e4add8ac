"""Stand-ins for streams, events and graphs of CUDA, so that code for GPUs runs on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Event:
    """Tells the time of the host."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._is_timed, self._time = enable_timing, 0.0

    def record(self) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        assert self._is_timed
        assert end._is_timed
        return 1e3 * (end._time - self._time)


class Stream:
    """Everything is done at once, so there is nothing to wait for."""

    def wait_stream(self, stream: Stream) -> None:
        assert isinstance(stream, Stream)

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)

    def record_event(self) -> Event:
        return Event()

    def synchronize(self) -> None:
        """Done."""


class Graph(TorchDispatchMode):
    """Remembers what ran, and runs it again into the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self._calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self._calls:
            again = func(*args, **kwargs)
            for x, y in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(x, Tensor) and x is not y:
                    x.copy_(y)


@contextmanager
def capture(cuda_graph: Graph) -> Iterator[None]:
    with cuda_graph:
        yield


def _bound(real: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """The stand-in; a call that the real one would not take fails."""
    takes = signature(real)

    def call(*args: Any, **kwargs: Any) -> Any:
        takes.bind(*args, **kwargs)
        return fake(*args, **kwargs)

    return call


def set_mode(mode: str) -> None:
    assert mode in ("default", "warn", "error")


@contextmanager
def fake_cuda() -> Iterator[None]:
    """Whatever asks for a GPU gets a CPU; tensors are where they are made."""
    functions: dict[str, Callable[..., Any]] = {
        "current_stream": lambda device=None: Stream(),
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device=None: None,
        "_sleep": lambda cycles: None,
        "set_sync_debug_mode": set_mode,
        "get_device_name": lambda device=None: "A GPU that is played",
    }
    bound = {name: _bound(getattr(torch.cuda, name), fake) for name, fake in functions.items()}
    classes = {"Event": Event, "Stream": Stream, "CUDAGraph": Graph, "graph": capture}
    with patch.multiple(torch.cuda, **bound, **classes):
        yield
