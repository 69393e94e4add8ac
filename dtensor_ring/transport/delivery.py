"""The two sides of an exchange on one rank: what leaves, and what comes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dtensor_ring.compute.ranges import pack
from dtensor_ring.planning.values.span import length
from dtensor_ring.transport.messages import ALIGNED, Copy, Mail, Message
from dtensor_ring.transport.protocol import P2P, Transport
from dtensor_ring.transport.segment import Segment
from dtensor_ring.transport.shared_memory import Loan, SharedMemory


class Outgoing:
    """What leaves this rank.

    Args:
        mail: where it is.
        tensors: of which it is parts.
        transport: of the call.
        memory: what it lends to peers that share memory with it, if there are any.
    """

    def __init__(
        self,
        mail: Mail,
        tensors: Sequence[Tensor],
        transport: Transport,
        memory: SharedMemory | None,
    ) -> None:
        self._mail, self._tensors, self._transport, self._memory = mail, tensors, transport, memory
        self._segment: Segment | None = None
        self._buffer: Tensor | None = None
        self._first_to: list[int] = []
        if memory is not None and any(x.is_lent and length(x.at) for x in mail.messages):
            self._segment = memory.allocate(mail.num_bytes)
        elif mail.copies:  # of an empty batch, they are empty
            self._buffer = transport.allocate(mail.num_bytes, tensors[0].device)

    @property
    def _place(self) -> Tensor | None:
        return self._buffer if self._segment is None else self._segment.memory

    def pack(self) -> None:
        """Copy into the memory what is not sent from where it lies."""
        views = _views(self._mail.copies, {None: self._place}, self._tensors)
        for packed, copy in zip(views, self._mail.copies, strict=True):
            pack(packed, copy.part.heads_of(self._tensors), copy.part.cols)

    def messages(self) -> list[P2P]:
        """The messages to start."""
        return [P2P(self._flat(x), x.peer, source=x.peer) for x in self._mail.messages]

    def _flat(self, message: Message) -> Tensor:
        if not message.is_lent:
            return _flat(message, self._place, self._tensors)
        assert self._memory is not None
        segment = self._segment if length(message.at) else None
        loan = self._memory.lend(message.peer, segment, message.at[0])
        if loan.is_first:
            self._first_to.append(message.peer)
        return loan.message().view(torch.uint8)

    def answers(self) -> list[P2P]:
        """The messages to receive from peers that have mapped a segment for the first time."""
        return [P2P(_answer(), peer, source=peer) for peer in self._first_to]

    def free(self) -> None:
        """Give the memory back, once all messages are complete."""
        if self._segment is not None:
            assert self._memory is not None
            self._memory.free(self._segment)
        if self._buffer is not None:
            self._transport.free(self._buffer)


class Incoming:
    """What comes to this rank.

    Args:
        mail: where it is.
        results: of which it is parts.
        transport: of the call.
        memory: what peers lend to this rank, if some do.
    """

    def __init__(
        self,
        mail: Mail,
        results: Sequence[Tensor],
        transport: Transport,
        memory: SharedMemory | None,
    ) -> None:
        self._mail, self._results, self._transport, self._memory = mail, results, transport, memory
        self._loans = {x.peer: Loan(0).message() for x in mail.messages if x.is_lent}
        self._lent: dict[int, Tensor] = {}
        self._first_of: list[int] = []
        self._buffer: Tensor | None = None
        if any(copy.lender is None for copy in mail.copies):
            self._buffer = transport.allocate(mail.num_bytes, results[0].device)

    def loans(self) -> list[P2P]:
        """The messages to expect."""
        return [P2P(x.view(torch.uint8), peer, source=peer) for peer, x in self._loans.items()]

    def messages(self) -> list[P2P]:
        """The messages to start."""
        return [
            P2P(_flat(x, self._buffer, self._results), x.peer, source=x.peer)
            for x in self._mail.messages
            if not x.is_lent
        ]

    def borrow(self) -> None:
        """Map what peers have lent, once all messages are complete."""
        for message in self._mail.messages:
            if message.is_lent:
                self._borrow(message.peer, length(message.at))

    def _borrow(self, peer: int, num_bytes: int) -> None:
        assert self._memory is not None
        loan = Loan(*self._loans[peer].tolist())
        try:
            self._lent[peer] = self._memory.borrow(peer, loan, num_bytes)
        except RuntimeError:  # rare, and a context costs the host as much as a message
            with self._transport.naming(P2P(self._loans[peer], peer, source=peer)):
                raise
        if loan.is_first:
            self._first_of.append(peer)

    def answers(self) -> list[P2P]:
        """The messages to send to peers whose segments were mapped for the first time."""
        return [P2P(_answer(), peer, source=peer) for peer in self._first_of]

    @property
    def copies(self) -> list[Tensor]:
        """`(B, n, C, H)`, as `Mail.copies` has them."""
        return _views(self._mail.copies, {None: self._buffer, **self._lent}, self._results)

    def free(self) -> None:
        """Give the memory back, once it was read."""
        self._lent = {}
        if self._buffer is not None:
            self._transport.free(self._buffer)


def _answer() -> Tensor:
    """A message that says all by its arrival."""
    return torch.zeros(1, dtype=torch.uint8, device="cpu")


def _views(
    copies: Sequence[Copy], memory: Mapping[int | None, Tensor | None], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """The copies `(B, n, C, H)` in the memory of those that lend them, or of this rank."""
    typed: dict[tuple[int | None, torch.dtype], Tensor] = {}
    views = []
    for (number, _, _), geometry, begin, lender in copies:
        key = lender, tensors[number].dtype
        if key not in typed:  # a view costs the host as much as a small copy
            found = memory[lender]
            assert found is not None
            typed[key] = found[: found.numel() // ALIGNED * ALIGNED].view(key[1])
        offset = typed[key].storage_offset() + begin // geometry.itemsize
        views.append(typed[key].as_strided(geometry.shape, geometry.strides, offset))
    return views


def _flat(message: Message, buffer: Tensor | None, tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of a message, in the buffer or in the tensor that it lies in."""
    begin, end = message.at
    if message.number is None:
        assert buffer is not None
        return buffer[begin:end]
    x = tensors[message.number]
    return x.as_strided((end - begin,), (1,), x.storage_offset() + begin).view(torch.uint8)
