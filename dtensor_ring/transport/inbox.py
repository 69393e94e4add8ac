"""Memory for a message that begins with a word."""

from __future__ import annotations

from torch import Tensor

from dtensor_ring.transport.word import MAX_BYTES, flat

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
