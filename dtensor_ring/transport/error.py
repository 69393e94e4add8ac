"""The error of a ring that cannot go on."""

from __future__ import annotations


class RingError(RuntimeError):
    """A call over a ring failed, on this rank or another: a rank ended, raised, or differs.

    The group is shut down then, and refuses further calls with the first cause. Destroy it, and
    make a new one; docs/failures.md has what each failure looks like.

    Attributes:
        ring: global ranks of the ring.
        direction: `"forward"` or `"backward"`; empty before a call has begun.
        step: of the loop, `None` before its first.
        source: rank on the axis whose keys and values, or their gradients, were on the way;
            `None` if there was no such message.
        peer: global rank of the other side of the message; `None` if there was none.
        seconds: how long this rank had waited.

    >>> RingError("no answer", ring=(0, 1), direction="forward", step=0, peer=1).peer
    1
    """

    def __init__(
        self,
        message: str,
        *,
        ring: tuple[int, ...] = (),
        direction: str = "",
        step: int | None = None,
        source: int | None = None,
        peer: int | None = None,
        seconds: float = 0.0,
    ) -> None:
        super().__init__(message)
        self.ring, self.direction, self.step = ring, direction, step
        self.source, self.peer, self.seconds = source, peer, seconds
