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

FIRST = 5.0
"""Seconds for its first answer, when nothing has failed yet."""

OTHERS = 0.5
"""Seconds for the other ranks to raise, too: all ranks know of a failure within a second."""


class Board:
    """The store of a group, asked in the failing path only, and not for long.

    Args:
        group: whose ranks read and write it.
        generation: of the group: a store may be that of an earlier world, too.
    """

    def __init__(self, group: dist.ProcessGroup, generation: int) -> None:
        self._store, self._size = _store_of(group), group.size()
        self._prefix = f"dtensor_ring/{generation}"

    def first_cause(self, text: str) -> str:
        """The cause that was written first, by any rank; this one, if there was none."""
        found = _answer(lambda: self._store.compare_set(f"{self._prefix}/first", "", text), ANSWER)
        return text if found is None else found.decode()

    def all_raised(self, where: str) -> bool:
        """Whether all ranks ask this for the same place, within `OTHERS`; all get one answer."""
        return bool(_answer(lambda: self._verdict(f"{self._prefix}/{where}"), OTHERS + ANSWER))

    def _verdict(self, key: str) -> bool:
        num_raised, end = self._store.add(key, 1), time.monotonic() + OTHERS
        while num_raised < self._size and time.monotonic() < end:
            time.sleep(0.005)
            num_raised = self._store.add(key, 0)
        # The first to know says it for all: a rank that comes late must not think otherwise.
        mine = "all" if num_raised >= self._size else "some"
        return self._store.compare_set(f"{key}/verdict", "", mine) == b"all"


def generation_of(group: dist.ProcessGroup) -> int:
    """How many groups had this store before, if each of their ranks asked this once."""
    found = _answer(lambda: _store_of(group).add("dtensor_ring/sessions", 1), FIRST)
    return 0 if found is None else (found - 1) // group.size()


def _store_of(group: dist.ProcessGroup) -> Any:
    """The store of a group, `None` if it was destroyed."""
    return distributed_c10d._world.pg_map.get(group, (None, None))[1]


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
