"""A transport without messages."""

from __future__ import annotations

from collections.abc import Sequence

from dtensor_ring.transport.protocol import P2P, Transport, Work


class Silent(Transport):
    """Sends nothing: what is computed is wrong, and takes the time and memory of the kernels."""

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        return ()
