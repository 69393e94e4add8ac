"""Symmetric memory of CPUs: outboxes and signals are files, which threads or processes map."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dtensor_ring.transport.symmetric import PeerMemory

DEADLINE = 60
"""Seconds that a rank waits for a signal."""
MAX_CHANNELS = 8


class FileMemory:
    """What `CudaMemory` offers, in a folder that all ranks have.

    Args:
        folder: an empty folder.
        rank: this rank.
        size: the number of ranks.
        is_late: whether copies run when somebody waits for them, and not at once: so what is read
            before the wait, or written, is wrong in every run.
    """

    def __init__(self, folder: Path, rank: int, size: int, is_late: bool = False) -> None:
        self._folder, self._rank, self._size, self._is_late = folder, rank, size, is_late
        self._queue: list[Callable[[], None]] = []
        self.num_bytes = 0
        """What this rank has registered."""

    def check(self, device: torch.device, group_name: str) -> None:
        assert device.type == "cpu"

    def empty(self, num_bytes: int, device: torch.device) -> Tensor:
        assert not self.num_bytes, "once is enough"
        self.num_bytes = num_bytes
        return self._mapped("outbox", self._rank, num_bytes).fill_(255)  # not a number

    def rendezvous(self, outbox: Tensor, group_name: str) -> PeerMemory:
        ranks, num_signals = range(self._size), self._size * MAX_CHANNELS
        sizes = [self._mapped("size", rank, 8).view(torch.int64) for rank in ranks]
        sizes[self._rank].fill_(outbox.numel())
        signals = [self._mapped("signals", rank, num_signals) for rank in ranks]
        # All outboxes have one size; ranks that differ wait until they are told so.
        self.wait(lambda: {int(x) for x in sizes} == {outbox.numel()})
        outboxes = [self._mapped("outbox", rank, outbox.numel()) for rank in ranks]
        return FilePeers(self, self._rank, outboxes, signals)

    def run(self, device: torch.device, operations: Callable[[], None]) -> Callable[[], None]:
        self._queue.append(operations)
        if not self._is_late:
            self._run_until(operations)
        return lambda: self._run_until(operations)

    def _run_until(self, last: Callable[[], None]) -> None:
        while last in self._queue:
            self._queue.pop(0)()

    def fail(self) -> None:
        """Let no rank wait any more."""
        (self._folder / "failed").touch()

    def _mapped(self, what: str, rank: int, num_bytes: int) -> Tensor:
        path = self._folder / f"{what} {rank}"
        with path.open("ab") as file:
            # PyTorch stretches a file that is too short, and then writes a zero as its first byte:
            # over what another rank has written meanwhile.
            file.truncate(num_bytes)
        return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)

    def wait(self, is_there: Callable[[], object]) -> None:
        """Wait until another rank has written.

        Raises:
            RuntimeError: if it failed, or takes too long.
        """
        end = time.monotonic() + DEADLINE
        while not is_there():
            if time.monotonic() > end or (self._folder / "failed").exists():
                raise RuntimeError("another rank failed, differs, or is not in time")
            time.sleep(1e-4)


class FilePeers:
    """The outboxes and signals of all ranks; the signals of a rank are those that it waits for."""

    def __init__(
        self, memory: FileMemory, rank: int, outboxes: list[Tensor], signals: list[Tensor]
    ) -> None:
        self._memory, self._rank, self._outboxes = memory, rank, outboxes
        self._signals = [x.view(MAX_CHANNELS, -1).numpy() for x in signals]

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, at: int) -> Tensor:
        (size,) = sizes
        return self._outboxes[rank].view(dtype)[at : at + size]

    def put_signal(self, peer: int, channel: int) -> None:
        signals = self._signals[peer][channel]
        assert not signals[self._rank], "a GPU would wait here until the peer has seen the last one"
        signals[self._rank] = 1

    def wait_signal(self, peer: int, channel: int) -> None:
        signals = self._signals[self._rank][channel]
        self._memory.wait(lambda: signals[peer])
        signals[peer] = 0
