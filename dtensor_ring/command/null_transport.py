"""A transport for runs whose messages have no other side."""

from __future__ import annotations

from collections.abc import Sequence

from dtensor_ring.transport.transport import P2P, Transport, Work


class NullTransport(Transport):
    """A transport that sends nothing: results are wrong, and only kernels take time and memory."""

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        return ()
