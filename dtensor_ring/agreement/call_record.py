"""The record of a call, which ranks compare before data, and the error if they differ."""

from __future__ import annotations

import struct
from hashlib import blake2b
from math import inf
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.transport.transport import ABORT_TAG

# The maximum size of a record. A typical one has 500 bytes; a digest replaces long boundaries.
MAX_BYTES = 2048

# A record, with the first byte of each field. The text names what ranks agree on:
#     0        8         16       24          120     184          232
#     number | forward | digest | line      | layer | placements | text ... 0
# Number of the call, number of its forward call, digest, `CallSite`.
_HEAD = "<QQQ96s64s48s"
_HEAD_BYTES = 232  # the size of `_HEAD`


class CallSite(NamedTuple):
    """The place of a call, as far as it is known; a compiled call has none.

    Attributes:
        line: the line in the caller's code.
        layer: the name of the layer in the model, the same on all ranks.
        placements: the placements of its DTensors on all axes of their mesh.
    """

    line: str = ""
    layer: str = ""
    placements: str = ""


NO_CALL_SITE = ("", "", "")


# Note [Agreement]: each rank sends the record of its call to the next rank of the ring. With its
# first message of keys and values, it waits for the record of the previous rank. So a rank detects
# a difference from its neighbour before it uses any of the neighbour's data; closed connections
# inform the other ranks. All other messages have a tag that is computed from the record, so
# messages of different calls never match, whatever their sizes. If the first hop of a call is a
# small message between all ranks, the record and the message travel as one, see `RecvBuffer`. A
# record is no longer than its text, so one network packet can often hold both.
class CallRecord:
    """The record of a call, without its number.

    Attributes:
        fields: name and value of everything on which the ranks must agree.
        digest: a hash of them, 64 bits.

    >>> one, other = CallRecord({"scale": "0.5"}), CallRecord({"scale": "0.25"})
    >>> differences(one.message(1, 0), other.message(1, 0))
    [('scale', '0.5', '0.25')]
    """

    def __init__(self, fields: dict[str, str]) -> None:
        self.fields = fields
        text = "\n".join([f"{name}: {value}" for name, value in fields.items()]).encode()
        self.digest: int = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
        # The digest covers the whole text, also a part that is cut off. A zero ends the text.
        self._template = bytes(_HEAD_BYTES) + text[: MAX_BYTES - _HEAD_BYTES - 1] + b"\0"

    def message(
        self, number: int, forward_call: int, call_site: tuple[str, str, str] = NO_CALL_SITE
    ) -> bytearray:
        """Return the record of a call as bytes.

        Args:
            number: the number of the call, counted on its group.
            forward_call: the number of the forward call that a backward call belongs to; 0 if not
                known.
            call_site: the call site, see `CallSite`.
        """
        message = bytearray(self._template)
        line, layer, placements = call_site
        # Layer names differ at their end, so the last 64 bytes are kept.
        texts = line.encode(), layer.encode()[-64:], placements.encode()
        struct.pack_into(_HEAD, message, 0, number, forward_call, self.digest, *texts)
        return message

    def tag(self, number: int, forward_call: int) -> int:
        """Return the tag of the call's other messages; two calls rarely share one."""
        # Numbers alone would match the messages of two calls that differ, but have the same number.
        # The multipliers spread small numbers over all bits.
        mixed = self.digest ^ number * 0x9E37_79B9_7F4A_7C15 ^ forward_call * 0xC2B2_AE3D_27D4_EB4F
        return (mixed >> 16) % ABORT_TAG


def flat(message: bytearray) -> Tensor:
    """Return a message as a tensor that shares its memory."""
    return torch.frombuffer(message, dtype=torch.uint8)


def bytes_of(x: Tensor) -> np.ndarray:
    """Return the bytes of a flat tensor on the CPU, which share its memory."""
    # A view of an array costs the host less than one of a tensor, but numpy has fewer dtypes.
    is_common = x.dtype in (torch.float32, torch.float64)
    return x.numpy().view(np.uint8) if is_common else x.view(torch.uint8).numpy()


def differences(mine: bytes | bytearray, theirs: bytes | bytearray) -> list[tuple[str, str, str]]:
    """Return the fields in which two records differ: name, value of mine, value of theirs.

    Any bytes may follow a record. What is unknown of `CallSite`, as in a compiled call, equals any.
    """
    one, other = _fields(mine), _fields(theirs)
    for name in _WHERE:
        if not (one[name] and other[name]):
            one[name] = other[name]
    names = dict.fromkeys([*one, *other])  # in order
    found = [(name, one.get(name, "none"), other.get(name, "none")) for name in names]
    # The digest is reported only if no field differs.
    found = [x for x in found if x[1] != x[2]]
    return [x for x in found if x[0] != _DIGEST] or found


# The fields that differ if ranks hold different numbers of local tokens, and nothing else does.
LENGTHS = "tokens", "tokens of keys"
LENGTHS_HINT = (
    "; ranks that hold different numbers of tokens tell the length of the sequence: by DTensors, "
    "as shard_sequence returns, or by ContextParallel(..., seq_len=...)"
)


def difference_text(
    mine: bytes | bytearray, theirs: bytes | bytearray, here: int, there: int
) -> str:
    """Describe in what the calls of two ranks differ; empty if they are the same call.

    Args:
        mine: the record of this rank's call.
        theirs: the record of the other rank's call.
        here: the global rank of this rank.
        there: the global rank of the other rank.
    """
    differing, both = differences(mine, theirs), _fields(mine).keys() & _fields(theirs).keys()
    shared = [x for x in differing if x[0] in both]
    listed = "; ".join(
        f"{name}: {one} on rank {here}, {other} on rank {there}"
        for name, one, other in shared or differing
    )
    # Calls of different kinds have other fields: which kinds they are says enough.
    num_more = len(differing) - len(shared) if shared else 0
    listed += f"; and {num_more} more, which only one of these calls has" if num_more else ""
    same = "the ranks of a ring must make the same call"
    hint = LENGTHS_HINT if all(name in LENGTHS for name, *_ in differing) else ""
    return f"{same}, they differ in {listed}{hint}" if listed else ""


def renumbered(message: bytes, number: int, forward_call: int) -> bytearray:
    """Return a record of a call of the same kind, with its own numbers, see `message`."""
    record = bytearray(message)
    struct.pack_into("<QQ", record, 0, number, forward_call)
    return record


_DIGEST = "what does not fit into the record"
_WHERE = "call site", "layer", "placements"


def _fields(message: bytes | bytearray) -> dict[str, str]:
    number, forward_call, digest, *call_site = struct.unpack_from(_HEAD, message)
    head = {
        "number of the call": f"{number:,}",
        "backward of call number": f"{forward_call:,}",
        **dict(zip(_WHERE, map(_text, call_site), strict=True)),
        _DIGEST: f"{digest:x}",
    }
    lines = _text(bytes(message[_HEAD_BYTES:])).splitlines()
    return {name: value for name, _, value in (line.partition(": ") for line in lines)} | head


def _text(ended: bytes) -> str:
    # The cut may have split a character.
    return ended.partition(b"\0")[0].decode(errors="replace")


# The largest number of bytes that may follow a record in its message: the partial results of a
# decoded token take 1 to 64 KiB, those of 16 requests together more. For larger messages, the cost
# of a second one is small.
MAX_PAYLOAD = 1 << 18


class RecvBuffer:
    """A buffer for the largest message that begins with a record.

    A message may be shorter than the buffer that receives it, but a longer one ends the process. A
    rank does not know the call of another rank before it has the record. So each record is received
    in a buffer for the largest message of any call.

    Attributes:
        flat: the buffer as a tensor, uint8.
    """

    def __init__(self) -> None:
        self._memory = bytearray(MAX_BYTES + MAX_PAYLOAD)
        self.flat: Tensor = flat(self._memory)
        # Not of the tensor, whose storage a tracker of tensors would then see alive.
        self._content = np.frombuffer(self._memory, np.uint8)

    def begins_with(self, record: bytearray) -> bool:
        """Return whether the received record is this one."""
        return self._memory.startswith(record)

    @property
    def record(self) -> bytearray:
        """Return the received record; a part of what follows it may be included."""
        return self._memory[:MAX_BYTES]

    def payload(self, record_bytes: int, num_bytes: int) -> np.ndarray:
        """Return `num_bytes` bytes that follow a record of `record_bytes` bytes, uint8."""
        # A slice of a tensor costs the host ten times as much.
        return self._content[record_bytes : record_bytes + num_bytes]


# The largest number of characters that a message quotes of another error.
MAX_QUOTED = 300


class RingError(RuntimeError):
    """A call over a ring failed: a rank ended, raised, timed out, or made a different call.

    The group is then shut down, and refuses further calls with the first cause. Destroy it, and
    make a new one; docs/failures.md describes each failure.

    Attributes:
        ring: global ranks of the ring.
        direction: `"forward"`, `"backward"`, `"decode"` or `"select keys"`; `"exchange"` and
            `"sum"`, with the backward `"exchange back"` and `"sum back"`; in Hugging Face models
            also `"a sharded append step"`, `"generate"` and `"the end of generate"`, where ranks
            compare their inputs; `"hand over"` of caches; empty before a call has begun.
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


def reason_of(error: RuntimeError, waited: float = 0.0, limit: float = inf) -> str:
    """Explain an error of the backend, and quote it.

    Args:
        error: the error that ended a wait.
        waited: how long the wait took, in seconds.
        limit: the time limit of the group, in seconds.
    """
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    quoted = f"({text[:MAX_QUOTED]})"
    # Gloo closes all connections of a rank whose wait times out. Another rank, whose wait ends at
    # the same time, may see that first.
    if "timed out" in text.lower() or waited >= 0.99 * limit:
        return (
            "the time limit of the group is over, so that rank is stopped, cut off, elsewhere, or "
            f"slow; init_process_group(timeout=...) sets the limit {quoted}"
        )
    if any(word in text.lower() for word in ("closed", "closure", "reset", "broken pipe")):
        return f"its connection is closed, so it ended, or raised {quoted}"
    return quoted
