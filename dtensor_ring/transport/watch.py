"""Warns of waits that last, long before the time limit of a group, which is 30 minutes by default.

A wait for a message cannot be cut into slices: gloo closes all connections of a rank that waited in
vain. So one thread looks at the waits of the others.
"""

from __future__ import annotations

import logging
import time
from threading import Lock, Thread, get_ident
from typing import NamedTuple

PERIOD = 5.0
"""Seconds between two looks."""

FIRST_WARNING = 30.0
"""Seconds after which a wait is told; then whenever it has lasted twice as long."""

_LOG = logging.getLogger("dtensor_ring")


class Wait(NamedTuple):
    """A wait for a message, since a time of `time.monotonic`; `what` says which, as a string."""

    since: float
    what: object


class Watch:
    """The waits of this process.

    >>> watch = Watch()
    >>> watch.waits[0] = Wait(0.0, "rank 1 waits for rank 0")
    >>> watch.due(31.0), watch.due(40.0), watch.due(70.0)
    (['rank 1 waits for rank 0: 31 s'], [], ['rank 1 waits for rank 0: 70 s'])
    """

    def __init__(self) -> None:
        self.waits: dict[int, Wait] = {}  # by thread
        self._next: dict[tuple[int, float], float] = {}  # by thread and begin: a wait ends
        self._thread: Thread | None = None
        self._lock = Lock()

    def begin(self, what: object, since: float) -> None:
        """This thread waits from that time of `time.monotonic` on."""
        self.waits[get_ident()] = Wait(since, what)

    def end(self) -> None:
        """This thread waits no more."""
        self.waits.pop(get_ident(), None)

    def due(self, now: float) -> list[str]:
        """What is to be told at a time."""
        waits = {(thread, wait.since): wait.what for thread, wait in list(self.waits.items())}
        self._next = {wait: self._next.get(wait, FIRST_WARNING) for wait in waits}
        late = [wait for wait in waits if now - wait[1] >= self._next[wait]]
        self._next |= {wait: 2 * (now - wait[1]) for wait in late}
        return [f"{waits[wait]}: {now - wait[1]:.0f} s" for wait in late]

    def start(self) -> None:
        """Look from now on, in a thread that ends with the process."""
        with self._lock:
            # A process that was forked has none of the threads of its parent.
            if self._thread is None or not self._thread.is_alive():
                self._thread = Thread(target=self._look, name="dtensor_ring watch", daemon=True)
                self._thread.start()

    def _look(self) -> None:
        while True:
            time.sleep(PERIOD)
            for text in self.due(time.monotonic()):
                _LOG.warning("%s; init_process_group(timeout=...) sets the limit", text)


WATCH = Watch()
"""One for the process: it costs a thread."""
