"""The error of a ring that cannot go on."""

from __future__ import annotations

MAX_QUOTED = 300
"""Characters of another error that a message quotes."""


class RingError(RuntimeError):
    """A call over a ring failed, on this rank or another: a rank ended, raised, or differs.

    The group is shut down then, and refuses further calls with the first cause. Destroy it, and
    make a new one; docs/failures.md has what each failure looks like.

    Attributes:
        ring: global ranks of the ring.
        direction: `"forward"`, `"backward"` or `"decode"`; `"exchange"` and `"sum"`, whose
            backward is `"exchange back"` and `"sum back"`; of Hugging Face models also
            `"a dealt turn"`, `"generate"` and `"the end of generate"`, where ranks compare what
            they got; empty before a call has begun.
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


def reason_of(error: RuntimeError) -> str:
    """What an error of the backend means."""
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
