"""Memory of a rank that other ranks of its host read where it lies: a message says where.

Note [Loans]: what leaves in an exchange is packed in any case, as the heads of a peer do not lie
side by side. Packed into memory that the peer maps, it need not be sent: the peer unpacks it from
there, to where it belongs. So the only copies are those that the exchange makes itself. In each
exchange, both ranks of a pair send each other one message of 40 bytes, a loan: where the content
lies, and which loans of the peer are over. So the end of a loan costs no message of its own: its
memory serves the exchange after the next one. What fails or differs is found and told as for any
other message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dtensor_ring.transport.segment import Segment, segment_of

MAX_SPARES = 3
"""Segments kept for later exchanges: two that take turns, and one of another size."""

MAX_MAPPED = 2 * MAX_SPARES
"""Segments of a peer that stay mapped: those that it keeps, and some that are lent."""


def new_loan() -> Tensor:
    """A loan that is to come, see `SharedMemory.lend`."""
    return torch.empty(5, dtype=torch.int64)


@dataclass
class _Peer:
    """A rank that this one lends to and borrows from."""

    pid: int
    lent: int = 0
    """Number of the last loan to it, counted from 1."""
    returned: int = 0
    """The last one that is over."""
    borrowed: int = 0
    """Number of its last loan, which is over with the call."""
    mapped: dict[int, Tensor] = field(default_factory=dict)
    """Its segments by serial, the one used last at the end."""


class SharedMemory:
    """What a rank lends to others of a group, and borrows from them; it ends with the group."""

    def __init__(self) -> None:
        self.probe: Segment | None = None
        """What others look for when they meet this rank."""
        self._peers: dict[int, _Peer | None] = {}  # None: that one does not share it
        self._spares: list[tuple[Segment, dict[int, int]]] = []  # with the last loan to each peer
        self._loans: dict[int, dict[int, int]] = {}  # the same, of segments in use, by serial

    def unknown(self, peers: Iterable[int]) -> list[int]:
        """Those of the peers that this rank has not met."""
        return sorted(peer for peer in peers if peer not in self._peers)

    def meet(self, pids: Mapping[int, int | None]) -> None:
        """Remember the process IDs of peers that share memory, and `None` of those that do not."""
        self._peers |= {peer: None if pid is None else _Peer(pid) for peer, pid in pids.items()}

    def sharing(self, peers: Iterable[int]) -> frozenset[int]:
        """Those of the peers, all of which were met, that share memory with this rank."""
        return frozenset(peer for peer in peers if self._peers[peer] is not None)

    def allocate(self, num_bytes: int) -> Segment:
        """Memory of at least that many bytes, of any content, that is lent to nobody."""
        fitting = [x for x in self._spares if len(x[0].memory) >= num_bytes and self._is_back(x[1])]
        if not fitting:
            return Segment(num_bytes)
        # The smallest that fits: larger ones stay for larger exchanges.
        found = min(fitting, key=lambda x: len(x[0].memory))
        self._spares.remove(found)
        return found[0]

    def free(self, segment: Segment) -> None:
        """Take back a segment, which may still be lent."""
        self._spares.append((segment, self._loans.pop(segment.serial, {})))
        back = [x for x in self._spares if self._is_back(x[1])]
        # The oldest go first: exchanges of another size may be over.
        for spare in back[:-MAX_SPARES]:
            self._spares.remove(spare)

    def _is_back(self, loans: dict[int, int]) -> bool:
        return all(self._peer(peer).returned >= number for peer, number in loans.items())

    def lend(self, peer: int, segment: Segment | None, begin: int) -> Tensor:
        """The loan to send to a peer: five numbers.

        They are the peer's loan that is over, the number of this one, and the serial, the file
        descriptor and the first byte of its memory; 0 without content.

        Args:
            peer: that gets it.
            segment: where the content is; `None` if there is none.
            begin: of it, in bytes.
        """
        its = self._peer(peer)
        if segment is None:
            return torch.tensor([its.borrowed, 0, 0, 0, 0])
        its.lent += 1
        self._loans.setdefault(segment.serial, {})[peer] = its.lent
        return torch.tensor([its.borrowed, its.lent, segment.serial, segment.fd, begin])

    def borrow(self, peer: int, loan: Tensor, num_bytes: int) -> Tensor:
        """What a peer has lent, uint8, until the next exchange with it.

        Raises:
            RuntimeError: if the peer is gone.
        """
        its = self._peer(peer)
        its.returned, number, serial, fd, begin = loan.tolist()
        if not number:
            return torch.empty(0, dtype=torch.uint8)
        # Its content is read before this rank sends the next loan, which says so.
        its.borrowed = number
        found = its.mapped.pop(serial, None)
        if found is None:
            try:
                found = segment_of(its.pid, fd, serial)
            except OSError as error:
                raise RuntimeError(f"its memory is closed: {error}") from error
        its.mapped[serial] = found
        if len(its.mapped) > MAX_MAPPED:
            its.mapped.pop(next(iter(its.mapped)))
        return found[begin : begin + num_bytes]

    def _peer(self, peer: int) -> _Peer:
        found = self._peers[peer]
        assert found is not None, "only ranks that share memory lend it"
        return found
