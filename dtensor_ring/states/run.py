"""Sends the maps of ranks, and joins them: the state before the tokens of each map.

A map takes the state before some tokens to the one after them, `A * before + state`. `A` is one of
three kinds: the exponential of a decay for each number, or for all numbers with the same leading
indices; a matrix from the left; or zero. Decays are sums of logarithms until a state is multiplied,
so a product of many small factors loses nothing to underflow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.trace import Label
from dtensor_ring.states.plan import MAX_AT_ONCE, num_sent_at_once, steps_of
from dtensor_ring.transport.transport import P2P, Transport


class Maps(NamedTuple):
    """Maps of one kind: a single one, or several along dim 0.

    Attributes:
        state: the state after the tokens if there was none before, `(..., K, V)` or any shape.
        decay: the logarithm of `A`, with the leading dims of `state`.
        matrix: `A` of shape `(..., K, K)`. Without both `A` is zero.
    """

    state: Tensor
    decay: Tensor | None = None
    matrix: Tensor | None = None

    def after(self, before: Tensor) -> Tensor:
        """Return the state after the tokens."""
        if self.decay is not None:
            return self.state + factors(self.decay, before) * before
        return self.state if self.matrix is None else self.state + self.matrix @ before

    def following(self, earlier: Maps) -> Maps:
        """Return the map of the tokens of both, of which `earlier` has the first ones."""
        decay, matrix = self.decay, self.matrix
        if decay is not None and earlier.decay is not None:
            decay = decay + earlier.decay
        if matrix is not None and earlier.matrix is not None:
            matrix = matrix @ earlier.matrix
        return Maps(self.after(earlier.state), decay, matrix)

    def reversed(self) -> Maps:
        """Return the maps of gradients, which go from the last map to the first one."""
        decay, matrix = self.decay, self.matrix
        return Maps(
            self.state.flip(0),
            None if decay is None else decay.flip(0),
            None if matrix is None else matrix.flip(0).mT,
        )

    def packed(self) -> Tensor:
        """Return all numbers of each map in a row, `(M, numbers)`."""
        parts = [x.flatten(1) for x in self if x is not None]
        return torch.cat(parts, 1) if len(parts) > 1 else parts[0].contiguous()

    def unpacked(self, flat: Tensor) -> Maps:
        """Return a single map, `(numbers,)`, whose tensors have the shapes of these ones'."""
        shapes = [x.shape[1:] for x in self if x is not None]
        parts = flat.split([x.numel() for x in shapes])
        views = iter(x.view(shape) for x, shape in zip(parts, shapes, strict=True))
        return Maps._make(None if x is None else next(views) for x in self)


def factors(decay: Tensor, state: Tensor) -> Tensor:
    """Return the exponential of decays, in dims that broadcast to those of the state."""
    return decay.exp().view((*decay.shape, *[1] * (state.dim() - decay.dim())))


def scan(
    transport: Transport, rank: int, owners: Sequence[int], maps: Maps, is_back: bool
) -> Tensor:
    """Return the state before the tokens of each of this rank's maps, in the shape of `maps.state`.

    Args:
        transport: moves the messages.
        rank: this rank's index on the axis.
        owners: the rank of each place, see `plan.py`.
        maps: this rank's maps in the order of their places, along dim 0.
        is_back: whether states go from the last place to the first one, through transposed maps,
            as gradients do.
    """
    # Backward is the same scan from the other end, of transposed maps.
    if is_back:
        return scan(transport, rank, owners[::-1], maps.reversed(), False).flip(0)
    transport.prepare(maps.state.device)
    size = max(owners) + 1
    is_zero = maps.decay is None and maps.matrix is None
    # A few ranks send all maps at once; of more ranks, steps send fewer.
    if size <= MAX_AT_ONCE and not is_zero:
        return _at_once(transport, rank, owners, maps)
    return _by_steps(transport, rank, owners, maps, steps_of(2 if is_zero else len(owners)))


def _at_once(transport: Transport, rank: int, owners: Sequence[int], maps: Maps) -> Tensor:
    """Send maps to all ranks that need them, and join them on each of these."""
    mine, size = maps.packed(), max(owners) + 1
    rows = {rank: iter(mine)}
    receives, sends = [], []
    # Each rank begins with the next one, so that no rank is the first peer of all others.
    for peer in (*range(rank + 1, size), *range(rank)):
        if number := num_sent_at_once(owners, peer, rank):
            received = mine.new_empty(number, mine.shape[1])
            rows[peer] = iter(received)
            receives.append(P2P(received.view(-1), peer))
        if number := num_sent_at_once(owners, rank, peer):
            sends.append(P2P(mine[:number].view(-1), peer))
    _move(transport, 0, receives, sends)
    out, state = torch.empty_like(maps.state, memory_format=torch.contiguous_format), None
    done = 0
    for owner in owners:
        if owner == rank:
            # The first place has no state before it.
            out[done] = torch.zeros_like(out[done]) if state is None else state
            done += 1
            # Maps of places after the last own one were not sent to this rank.
            if done == len(out):
                break
        # A state goes through the maps one by one, which multiplies no matrices by one another.
        found = maps.unpacked(next(rows[owner]))
        state = found.state if state is None else found.after(state)
    return out


def _by_steps(
    transport: Transport, rank: int, owners: Sequence[int], maps: Maps, steps: Sequence[int]
) -> Tensor:
    """Join maps of neighbours, then of neighbours twice as far, and so on."""
    places = [place for place, owner in enumerate(owners) if owner == rank]
    known = dict(zip(places, maps.packed().unbind(), strict=True))
    for number, step in enumerate(steps):
        received = _stepped(transport, rank, owners, known, number, step)
        if number == 0:
            # Place 0 has no map before it; the others have that of one.
            known = received
            continue
        for place, flat in received.items():
            # The map of many tokens, not a state: a place does not know yet what is before them.
            joined = maps.unpacked(known[place]).following(maps.unpacked(flat))
            known[place] = torch.cat([x.flatten() for x in joined if x is not None])
    out = torch.zeros_like(maps.state, memory_format=torch.contiguous_format)
    for index, place in enumerate(places):
        if place in known:
            out[index] = maps.unpacked(known[place]).state
    return out


def _stepped(
    transport: Transport,
    rank: int,
    owners: Sequence[int],
    known: dict[int, Tensor],
    number: int,
    step: int,
) -> dict[int, Tensor]:
    """Bring each of this rank's places what the place `step` before it knows, if that is any."""
    received: dict[int, Tensor] = {}
    receives, sends = [], []
    like = next(iter(known.values()), None)
    # In the first round every place has a map; later place 0 has none.
    for place in range(step + (number > 0), len(owners)):
        there, here = owners[place - step], owners[place]
        if here == rank:
            assert like is not None
            received[place] = known[place - step] if there == rank else torch.empty_like(like)
            if there != rank:
                receives.append(P2P(received[place], there))
        elif there == rank:
            sends.append(P2P(known[place - step], here))
    _move(transport, number, receives, sends)
    return received


def _move(transport: Transport, number: int, receives: list[P2P], sends: list[P2P]) -> None:
    """Exchange the messages of a round."""
    transport.at(Label("states", number, 0))
    for work in transport.start(receives, sends):
        work.wait()
