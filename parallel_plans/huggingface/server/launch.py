"""`python -m dtensor_ring serve`: starts the ranks of a server, and watches over them.

Under torchrun the ranks are there already. Else each one is a process of its own, all of them on
this machine. Signals that end the command go to the first rank, which lets open requests end and
then says so to the others. If a rank dies, or does not answer within `rank_timeout`, the first one
answers what is open by an error, and all of them end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import wait
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from parallel_plans.huggingface.server.rank import ServerOptions, first_line, handled, run_rank


def launch(options: ServerOptions) -> int:
    """Serve until a signal ends it, and return the exit status: 0, or 1 if a rank failed."""
    if dist.is_torchelastic_launched():
        dist.init_process_group(timeout=options.group_timeout)
        return _served(options)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = _starting()
    ranks = [
        context.Process(target=start_rank, args=(rank, store.port, options), name=f"rank {rank}")
        for rank in range(options.num_ranks)
    ]
    with handled(lambda *_: ranks[0].terminate()):
        for process in ranks:
            process.start()
        return watched(ranks)


def _starting() -> Any:
    """Return how ranks start: on CPUs forked from a process that has imported what they need."""
    # A process that has asked for GPUs cannot be forked by one that uses them.
    if torch.accelerator.is_available():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__, "transformers.modeling_utils"])
    return context


def start_rank(rank: int, port: int, options: ServerOptions) -> None:
    """Serve as one rank, in a process of its own, and end with the process that started it."""
    Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command hears it, and tells the first rank
    if not torch.accelerator.is_available():
        # Each rank would start a thread for each core of the machine that they share.
        torch.set_num_threads(max(1, torch.get_num_threads() // options.num_ranks))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    how = {"rank": rank, "world_size": options.num_ranks, "timeout": options.group_timeout}
    dist.init_process_group(store=store, **how)
    sys.exit(_served(options))


def _end_with_parent() -> None:
    # A command that is killed can end no rank, so each rank watches it.
    parent = mp.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _served(options: ServerOptions) -> int:
    """Serve as this rank, and return the exit status."""
    rank = dist.get_rank()
    try:
        if dist.get_world_size() != options.num_ranks:
            raise ValueError(
                f"--mesh has {options.num_ranks} ranks, and torchrun started "
                f"{dist.get_world_size()}; they must be as many"
            )
        run_rank(options)
    except Exception as error:
        print(f"rank {rank}: {type(error).__name__}: {first_line(error)}", file=sys.stderr)
        sys.stderr.flush()
        # Groups whose ranks are gone would wait for them.
        os._exit(1)
    dist.destroy_process_group()
    return 0


# Seconds that the other ranks have to end after one that died.
GRACE_SECONDS = 15


def watched(ranks: list[Any]) -> int:
    """Wait until all ranks have ended, and return 0 if all is well.

    After one that died, the others have `GRACE_SECONDS` to answer what is open.
    """
    left, end = {process.sentinel: process for process in ranks}, float("inf")
    while left:
        timeout = None if end == float("inf") else max(0.0, end - time.monotonic())
        ended = wait(list(left), timeout)
        for sentinel in ended:
            process = left.pop(sentinel)
            process.join()
            if process.exitcode and end == float("inf"):
                # The first failure ends the rest: without that rank they cannot go on.
                end = time.monotonic() + GRACE_SECONDS
                print(f"{process.name} ended with {_how(process.exitcode)}", file=sys.stderr)
        if not ended:
            for process in left.values():
                process.kill()
    return int(any(process.exitcode for process in ranks))


def _how(exit_code: int) -> str:
    """Return how a process ended.

    >>> _how(-9)
    'signal SIGKILL'
    """
    return f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"status {exit_code}"
