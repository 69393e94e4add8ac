"""The error of a ring that cannot go on."""

from __future__ import annotations

# The largest number of characters that a message quotes of another error.
MAX_QUOTED = 300


class RingError(RuntimeError):
    """A call over a ring failed: a rank ended, raised, timed out, or made a different call.

    The group is then shut down, and refuses further calls with the first cause. Destroy it, and
    make a new one; docs/failures.md describes each failure.

    Attributes:
        ring: global ranks of the ring.
        direction: `"forward"`, `"backward"` or `"decode"`; `"exchange"` and `"sum"`, with the
            backward `"exchange back"` and `"sum back"`; in Hugging Face models also
            `"a sharded append step"`, `"generate"` and `"the end of generate"`, where ranks compare
            their inputs; empty before a call has begun.
        step: the step of the loop, `None` before the first one.
        source: the rank on the axis whose keys and values, or their gradients, the message has;
            `None` without a message.
        peer: the global rank of the other side of the message; `None` without one.
        seconds: how long this rank had waited, in seconds.

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


def reason_of(error: RuntimeError) -> str:
    """Explain an error of the backend, and quote it."""
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    quoted = f"({text[:MAX_QUOTED]})"
    if "timed out" in text.lower():
        return (
            "the time limit of the group is over, so that rank is stopped, cut off, elsewhere, or "
            f"slow; init_process_group(timeout=...) sets the limit {quoted}"
        )
    if any(word in text.lower() for word in ("closed", "closure", "reset", "broken pipe")):
        return f"its connection is closed, so it ended, or raised {quoted}"
    return quoted
