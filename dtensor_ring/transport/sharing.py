"""Which ranks read each other's memory: two that meet for the first time try it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.trace import Label
from dtensor_ring.transport.protocol import P2P, Transport
from dtensor_ring.transport.segment import Gone, Segment, host_of_process, segment_of
from dtensor_ring.transport.shared_memory import SharedMemory

NUM_ROUNDS = 2
"""Of messages, when ranks meet: cards, and what was found."""


class Card(NamedTuple):
    """What a rank tells another one, which then looks for the token."""

    host: int
    """Its `host_of_process`; 0 if it has no memory to share."""
    pid: int
    fd: int
    inode: int
    """Of memory that has the token in it."""
    token: int


def sharing_peers(
    memory: SharedMemory, peers: Collection[int], transport: Transport, label: Label
) -> frozenset[int]:
    """Those of the peers that share memory with this rank.

    Args:
        memory: of this rank and the group.
        peers: of this rank; each has this rank as a peer, and asks this at the same time.
        transport: of the call.
        label: of it.
    """
    new = memory.unknown(peers)
    if new:
        memory.meet(_try_with(new, _probe_of(memory), transport, label))
    else:
        for _ in range(NUM_ROUNDS):  # all ranks count alike, also those that meet nobody
            transport.at(label)
    return memory.sharing(peers)


def _probe_of(memory: SharedMemory) -> Segment | None:
    """Where others look for this rank's token; `None` if there is no such memory."""
    if memory.probe is None:
        with suppress(OSError):
            memory.probe = Segment(8)
    return memory.probe


def _try_with(
    peers: Collection[int], probe: Segment | None, transport: Transport, label: Label
) -> dict[int, int | None]:
    """The process ID of each peer where both found the other's token; `None` for other peers."""
    mine = Card(0, 0, 0, 0, 0)
    if probe is not None:
        mine = Card(host_of_process(), os.getpid(), probe.fd, probe.inode, secrets.randbits(62))
        probe.memory.view(torch.int64).fill_(mine.token)
    cards = _swapped(dict.fromkeys(peers, torch.tensor(mine, device="cpu")), transport, label)
    theirs = {peer: Card(*card.tolist()) for peer, card in cards.items()}
    found = {peer: _finds(card, mine.host) for peer, card in theirs.items()}
    # Either may be kept from it, as by the rights of its process.
    told = {peer: torch.tensor([is_found], device="cpu") for peer, is_found in found.items()}
    verdicts = _swapped(told, transport, label)
    return {x: theirs[x].pid if found[x] and verdicts[x] else None for x in peers}


def _finds(card: Card, host: int) -> bool:
    """Whether the memory of a card is on this host, and has the token in it."""
    if not host or card.host != host:
        return False
    with suppress(OSError, Gone):
        return bool(segment_of(*card[1:4]).view(torch.int64) == card.token)
    return False


def _swapped(mine: Mapping[int, Tensor], transport: Transport, label: Label) -> dict[int, Tensor]:
    """What each peer sends, for what it gets."""
    theirs = {peer: torch.empty_like(x) for peer, x in mine.items()}
    receives, sends = (
        [P2P(x.view(torch.uint8), peer, source=peer) for peer, x in side.items()]
        for side in (theirs, mine)
    )
    transport.at(label)
    for work in transport.start(receives, sends):
        work.wait()
    return theirs
