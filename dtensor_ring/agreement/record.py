"""The record of a call, and the buffer that receives it. Ranks compare records before data.

Note [Agreement]: each rank sends the word of its call to the next rank of the ring, and waits for
that of the rank before it, together with its first message of keys and values. So a difference is
seen where it is, by both sides of it, before anything of a peer is used; closed connections tell
the other ranks. All other messages carry a tag that is made of the word: messages of calls that
differ never meet, whatever their sizes. A call whose first hop is a small message between all ranks
sends each of them the word and the message as one, see `Inbox`. A word is no longer than its text,
so that what follows it fits into the same packet of the network as often as it can.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.transport.transport import ABORT_TAG

MAX_BYTES = 2048
"""Of a word. What a call is takes some 500; longer boundaries are told by their digest."""

_HEAD = "<QQQ96s64s"  # number of the call, of the forward call of a backward; digest; `Where`
_HEAD_BYTES = 184  # of that


class Where(NamedTuple):
    """Where a call stands, as far as that is known: a compiled one has no place."""

    place: str = ""
    """In the code of the caller."""
    layer: str = ""
    """Of the model, as all ranks call it."""


NOWHERE = ("", "")


class Word:
    """What a call is, without its number.

    Args:
        fields: name and value of everything on which the ranks must agree.

    >>> one, other = Word({"scale": "0.5"}), Word({"scale": "0.25"})
    >>> differences(one.message(1, 0), other.message(1, 0))
    [('scale', '0.5', '0.25')]
    """

    def __init__(self, fields: dict[str, str]) -> None:
        text = "\n".join([f"{name}: {value}" for name, value in fields.items()]).encode()
        self._digest = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
        # The digest is of all, so that what is cut off counts, too. A zero ends the text.
        self._template = bytes(_HEAD_BYTES) + text[: MAX_BYTES - _HEAD_BYTES - 1] + b"\0"

    def message(self, number: int, origin: int, where: tuple[str, str] = NOWHERE) -> bytearray:
        """The message of a call.

        Args:
            number: of the call, counted on its group.
            origin: number of the forward call that a backward call belongs to; 0 if not known.
            where: the call stands, see `Where`.
        """
        message = bytearray(self._template)
        place, layer = where
        # Of the name of a layer the end is kept, by which layers differ.
        texts = place.encode(), layer.encode()[-64:]
        struct.pack_into(_HEAD, message, 0, number, origin, self._digest, *texts)
        return message

    def tag(self, number: int, origin: int) -> int:
        """The tag of the call's other messages, which those of another call hardly have, too."""
        # The multipliers spread small numbers over all bits.
        mixed = self._digest ^ number * 0x9E37_79B9_7F4A_7C15 ^ origin * 0xC2B2_AE3D_27D4_EB4F
        return (mixed >> 16) % ABORT_TAG


def flat(message: bytearray) -> Tensor:
    """A message as a tensor that shares its memory."""
    return torch.frombuffer(message, dtype=torch.uint8)


def differences(mine: bytes | bytearray, theirs: bytes | bytearray) -> list[tuple[str, str, str]]:
    """What differs between two words: name, value of mine, value of theirs.

    Anything may follow either of them.

    A place or a layer that is not known differs from none: a compiled call has none.
    """
    one, other = _fields(mine), _fields(theirs)
    for name in (_PLACE, _LAYER):
        if not (one[name] and other[name]):
            one[name] = other[name]
    names = dict.fromkeys([*one, *other])  # in order
    found = [(name, one.get(name, "none"), other.get(name, "none")) for name in names]
    # The digest says no more than the fields, if they differ.
    found = [x for x in found if x[1] != x[2]]
    return [x for x in found if x[0] != _DIGEST] or found


_DIGEST = "what does not fit into a word"
_PLACE, _LAYER = "place of the call", "layer"


def _fields(message: bytes | bytearray) -> dict[str, str]:
    number, origin, digest, place, layer = struct.unpack_from(_HEAD, message)
    head = {
        "number of the call": f"{number:,}",
        "backward of call number": f"{origin:,}",
        _PLACE: _text(place),
        _LAYER: _text(layer),
        _DIGEST: f"{digest:x}",
    }
    lines = _text(bytes(message[_HEAD_BYTES:])).splitlines()
    return {name: value for name, _, value in (line.partition(": ") for line in lines)} | head


def _text(ended: bytes) -> str:
    # A letter may have been cut in its middle.
    return ended.partition(b"\0")[0].decode(errors="replace")


MAX_CARRIED = 1 << 16
"""Bytes that may follow a word in its message: the partial results of a decoded token take 1 to 64
KiB. Larger messages gain little: what a second one costs is then small beside them."""


class Inbox:
    """Room for the largest message that begins with a word.

    A message may be shorter than the memory that it comes to, but a longer one ends the process. A
    rank does not know what call the others make before it has their words. So every word is
    received in as much memory as any call may send.
    """

    def __init__(self) -> None:
        self._memory = bytearray(MAX_BYTES + MAX_CARRIED)
        self.flat: Tensor = flat(self._memory)
        """What a message comes to, uint8."""

    @property
    def word(self) -> bytearray:
        """The word that came, and maybe some of what followed it."""
        return self._memory[:MAX_BYTES]

    def carried(self, word_bytes: int, num_bytes: int) -> Tensor:
        """So many bytes that came after a word of that size."""
        return self.flat[word_bytes : word_bytes + num_bytes]
