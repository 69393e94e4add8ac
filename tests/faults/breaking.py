"""What a rank does when its fault comes: in the middle of a ring, before the kernel of a step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any
from unittest.mock import patch

from dtensor_ring.agreement import group_state
from dtensor_ring.compute.kernels import KERNELS
from tests.faults.worlds import DEADLINE, TIMEOUT

STOPPED = TIMEOUT + 2
"""Seconds for which a process is stopped."""


class Broken(RuntimeError):
    """What a broken kernel raises; torch's error of memory is a `RuntimeError`, too."""


def break_kernel() -> None:
    raise Broken("no memory left")


def leave() -> None:
    sys.exit(3)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    """Stop for a while, until another process wakes this one."""
    subprocess.run(["sh", "-c", f"(sleep {STOPPED}; kill -CONT {os.getpid()}) &"], check=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def at_launch(
    direction: str, number: int, fault: Callable[[], object]
) -> AbstractContextManager[object]:
    """Call `fault()` before that launch of the reference kernel in that direction.

    Without mask and with whole shards, a step has one launch.
    """
    return at_call((type(KERNELS["reference"]), direction), number, fault)


@contextmanager
def at_call(method: tuple[type, str], number: int, fault: Callable[[], object]) -> Iterator[None]:
    """Call `fault()` before that call of a method, a class and a name."""
    called, numbers = getattr(*method), count()

    def faulty(*args: Any) -> Any:
        if next(numbers) == number:
            fault()
        return called(*args)

    with patch.object(*method, faulty):
        yield


def patience() -> AbstractContextManager[object]:
    """Ranks that raise wait long for the others to raise, too.

    A machine that is busy with other tests may run one rank much later than another.
    """
    return patch.object(group_state, "OTHERS_TIMEOUT", DEADLINE / 2)
