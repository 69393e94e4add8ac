"""What the ranks of a group tell each other where messages do not get through: its store."""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

T = TypeVar("T")

ANSWER = 0.25
"""Seconds for an answer of the store, whose host may be gone."""

OTHERS = 0.5
"""Seconds for the other ranks to raise, too: all ranks know of a failure within a second."""

_FIRST = "dtensor_ring/first cause"


class Board:
    """The store of a group, asked in the failing path only, and not for long.

    Args:
        group: whose ranks read and write it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # None if the group was destroyed meanwhile.
        self._store: Any = distributed_c10d._world.pg_map.get(group, (None, None))[1]
        self._size = group.size()

    def first_cause(self, text: str) -> str:
        """The cause that was written first, by any rank; this one, if there was none."""
        found = _answer(lambda: self._store.compare_set(_FIRST, "", text), ANSWER)
        return text if found is None else found.decode()

    def all_raised(self, where: str) -> bool:
        """Whether all ranks ask this for the same place in the same call, within `OTHERS`."""
        key = f"dtensor_ring/raised/{where}"
        return bool(_answer(lambda: self._count(key), OTHERS + ANSWER))

    def _count(self, key: str) -> bool:
        num_raised, end = self._store.add(key, 1), time.monotonic() + OTHERS
        while num_raised < self._size and time.monotonic() < end:
            time.sleep(0.005)
            num_raised = self._store.add(key, 0)
        return num_raised >= self._size


def _answer(ask: Callable[[], T], seconds: float) -> T | None:
    """The answer, `None` if it fails or does not come in time."""
    answers: list[T] = []

    def run() -> None:
        try:
            answers.append(ask())
        except (RuntimeError, AttributeError):  # the store, or its host, is gone
            return

    # In a thread: a store has one timeout for all, of minutes, and its host may hang.
    thread = Thread(target=run, name="dtensor_ring board", daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None
