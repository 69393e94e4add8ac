"""Ranks as processes of this machine, which meet over gloo, and what moves a GPU's tensors there.

NCCL refuses two ranks on one GPU. Gloo does not, but sends tensors of CPUs only.
"""

import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from dtensor_ring import Transport
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport, Work


def run_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, seconds: float
) -> list[Any]:
    """Return what the function returns on each rank of a gloo group, as JSON has it.

    Raises:
        TimeoutError: if a rank takes longer than `seconds`.
        torch.multiprocessing.ProcessRaisedException: what a rank raised.
    """
    end = time.monotonic() + seconds
    with TemporaryDirectory() as folder:
        ranks = mp.start_processes(
            *(_rank, (world_size, folder, function, arguments), world_size),
            join=False,
            start_method="spawn",
        )
        try:
            while not ranks.join(1.0):
                if time.monotonic() > end:
                    raise TimeoutError(f"no end after {seconds:.0f} s")
        finally:
            for process in ranks.processes:
                process.kill()
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world_size)]


def _rank(
    rank: int,
    world_size: int,
    folder: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    store = dist.FileStore(f"{folder}/store", world_size)
    how = {"store": store, "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", timeout=timedelta(minutes=2), **how)
    try:
        Path(folder, f"{rank}.json").write_text(json.dumps(function(*arguments)))
        # No barrier: what ranks try may end with their connections closed.
        while len(list(Path(folder).glob("*.json"))) < world_size:
            time.sleep(0.02)
    finally:
        dist.destroy_process_group()


class ByHost(Transport):
    """Messages of a GPU that gloo moves between the hosts' memories. The host waits for them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._by_gloo = ProcessGroupTransport(group)

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        arriving = [x._replace(flat=torch.empty_like(x.flat, device="cpu")) for x in receives]
        # The copy waits for the kernels that write what is sent.
        leaving = [x._replace(flat=x.flat.cpu()) for x in sends]
        works = self._by_gloo.start(arriving, leaving)
        targets = [x.flat for x in receives] + [x.flat for x in sends]
        found = [x.flat for x in arriving] + [None] * len(sends)
        return [_Landing(*x) for x in zip(works, targets, found, strict=True)]


class _Landing:
    """A message on its way to a GPU, or from there."""

    def __init__(self, work: Work, target: Tensor, found: Tensor | None) -> None:
        self._work, self._target, self._found = work, target, found

    def wait(self) -> None:
        self._work.wait()
        if self._found is not None:
            self._target.copy_(self._found)
