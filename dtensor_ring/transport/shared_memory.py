"""Memory of a rank that other ranks of its host read where it lies: a message says where.

Note [Loans]: what leaves in an exchange is packed in any case, as the heads of a peer do not lie
side by side. Packed into memory that the peer maps, it need not be sent: the peer unpacks it from
there, to where it belongs. So the only copies are those that the exchange makes itself. In each
exchange, both ranks of a pair send each other one message of 48 bytes, a loan: where the content
lies, and the last loan of the peer that was read. So no other message says that memory may be used
again, and two segments take turns. A rank may end after its last exchange, while a peer still
reads: what is mapped stays. So a peer answers the first loan of a segment once it has mapped it,
and the rank waits for that. What fails or differs is found and told as for any other message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.transport.segment import Gone, Segment, segment_of

MAX_SPARES = 3
"""Segments kept for later exchanges: two that take turns, and one of another size."""

MAX_IDLE = 64
"""Loans of a peer after which a segment that none of them was of is no longer mapped."""


class Loan(NamedTuple):
    """Where a peer reads what it gets."""

    read: int
    """The last loan of the peer that this rank has read."""
    number: int = 0
    """Of this one, counted from 1 for each peer; 0 if there is no content."""
    inode: int = 0
    fd: int = 0
    """Of its segment."""
    begin: int = 0
    """Of the content in it, in bytes."""
    is_first: int = 0
    """Whether the peer has had no loan of this segment; it answers then."""

    def message(self) -> Tensor:
        """As int64 on the CPU, also where that is not the default device."""
        return torch.tensor(self, dtype=torch.int64, device="cpu")


@dataclass
class _Peer:
    """A rank that this one lends to and borrows from."""

    pid: int
    lent: int = 0
    """Number of the last loan to it."""
    returned: int = 0
    """Number of the last one that it has read."""
    borrowed: int = 0
    """Number of the last loan from it. This rank has read it when the call ends."""
    mapped: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    """Its segments by inode, each with the number of the last loan of it."""


class SharedMemory:
    """What a rank lends to others of a group, and borrows from them; it ends with the group."""

    def __init__(self) -> None:
        self.probe: Segment | None = None
        """What others look for when they meet this rank."""
        self._peers: dict[int, _Peer | None] = {}  # None: that one does not share it
        self._spares: list[Segment] = []

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
        """Memory of at least that many bytes, of any content, that is lent to nobody.

        Raises:
            OSError: if there is no more now.
            RuntimeError: if there never is as much.
        """
        fitting = [x for x in self._spares if x.memory.numel() >= num_bytes and self._is_back(x)]
        if not fitting:
            return Segment(num_bytes)
        # The smallest that fits: larger ones stay for larger exchanges.
        found = min(fitting, key=lambda x: x.memory.numel())
        self._spares.remove(found)
        return found

    def free(self, segment: Segment) -> None:
        """Take back a segment, which may still be lent."""
        self._spares.append(segment)
        # The oldest go first: exchanges of another size may be over.
        for spare in [x for x in self._spares if self._is_back(x)][:-MAX_SPARES]:
            self._spares.remove(spare)

    def _is_back(self, segment: Segment) -> bool:
        return all(self._peer(peer).returned >= x for peer, x in segment.loans.items())

    def lend(self, peer: int, segment: Segment | None, begin: int) -> Loan:
        """The loan to send to a peer.

        Args:
            peer: that gets it.
            segment: that holds the content; `None` without content.
            begin: of it, in bytes.
        """
        its = self._peer(peer)
        if segment is None:
            return Loan(its.borrowed)
        its.lent += 1
        is_first = peer not in segment.loans
        segment.loans[peer] = its.lent
        return Loan(its.borrowed, its.lent, segment.inode, segment.fd, begin, is_first)

    def borrow(self, peer: int, loan: Loan, num_bytes: int) -> Tensor:
        """What a peer has lent, uint8, until the next exchange with it.

        Raises:
            RuntimeError: if the peer is gone.
            OSError: if this rank cannot map it.
        """
        its = self._peer(peer)
        its.returned = loan.read
        if not loan.number:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        found = its.mapped.get(loan.inode)
        try:
            memory = segment_of(its.pid, loan.fd, loan.inode) if found is None else found[0]
        except Gone as error:
            raise RuntimeError(f"its memory is closed: {error}") from error
        # Its content is read before this rank sends the next loan, which says so.
        its.borrowed = loan.number
        its.mapped[loan.inode] = memory, loan.number
        for inode, (_, last) in list(its.mapped.items()):
            if loan.number - last > MAX_IDLE:
                del its.mapped[inode]
        return memory[loan.begin : loan.begin + num_bytes]

    def _peer(self, peer: int) -> _Peer:
        found = self._peers[peer]
        assert found is not None, "only ranks that share memory lend it"
        return found
