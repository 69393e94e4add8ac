"""Keys that queries selected travel to them, and their gradients home.

Each rank knows which keys its queries need. It asks each other rank for them with one bit for each
of that rank's keys, and gets one message from it. The backward pass asks again, and sends the
gradients of these keys home, where they are added in the order of the ranks. On a GPU the host
waits once for the requests, which decide the sizes of messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.kernels.kernel import Saved
from dtensor_ring.compute.memory import TOKEN_MAJOR, empty
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.ranges import Span
from dtensor_ring.selected.listed_attention import Residents, listed_backward, listed_forward
from dtensor_ring.selected.plan import ALL, KeyPositions, request_bytes
from dtensor_ring.transport.transport import P2P, Transport, hold_until_complete


@cached_bytes(2**26, lambda found: found.nbytes)
def _numbers_on(positions: KeyPositions, device: torch.device) -> Tensor:
    """Return the positions of all keys on a device, int64 `(S,)`."""
    with torch.inference_mode(False):
        return torch.from_numpy(positions.numbers.astype(np.int64)).to(device)


class Moved(NamedTuple):
    """Keys at hand, and what the gradients need to go home.

    Attributes:
        residents: this rank's keys, followed by those that it asked for, by rank.
        spans: of each rank, the rows of the residents.
        given: of each rank, the columns of this rank's keys that it asked for; empty for itself.
    """

    residents: Residents
    spans: list[Span]
    given: list[Tensor]


# What two ranks send each other, in this order; without requests if all keys travel:
#     forward     requests, then keys with their values
#     backward    requests, then keys with their values, then gradients of both
class SelectedKeys:
    """Brings the keys that local queries selected, and takes their gradients home.

    Args:
        rows: this rank's keys and values, `(B, Nkv, C, D)`.
        shape: the head dim, and the span of the values in a row.
        positions: the positions of all keys.
        rank: this rank.
        transport: what moves the messages.
        ring: "forward" or "backward".
    """

    def __init__(
        self,
        rows: Tensor,
        shape: tuple[int, Span],
        positions: KeyPositions,
        rank: int,
        transport: Transport,
        ring: str,
    ) -> None:
        transport.prepare(rows.device)
        self._rows, self._shape, self._positions = rows, shape, positions
        self._rank, self._transport, self._ring = rank, transport, ring
        self._num_rounds = 0

    def moved(self, selected: Tensor, route: str) -> Moved:
        """Bring the keys at these positions, or all keys if the route is "all".

        Args:
            selected: int32 `(B, G, L, K)`, -1 for none.
            route: "selected" or "all".
        """
        wanted, given = self._all() if route == ALL else self._requests(selected)
        # Token first: the rows from a rank are then one span of memory, which a message fills.
        own = self._rows.permute(2, 0, 1, 3).contiguous()
        lengths = [len(own) if peer == self._rank else len(x) for peer, x in enumerate(wanted)]
        ends = np.cumsum([0, *lengths]).tolist()
        spans = list(pairwise(ends))
        rows = own if len(wanted) == 1 else own.new_empty((ends[-1], *own.shape[1:]))
        parts = [rows[begin:end] for begin, end in spans]
        if len(wanted) > 1:
            parts[self._rank].copy_(own)
            # Columns have no duplicates: a request for as many as this rank has is for all of them.
            self._exchange(parts, [own if len(x) == len(own) else own[x] for x in given])
        head_dim, values = self._shape
        residents = Residents(rows, self._places(wanted, spans), head_dim, values)
        return Moved(residents, spans, given)

    def summed(self, moved: Moved, grad: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the gradient of this rank's keys and values, `(B, Nkv, C, D)`, over all ranks.

        Args:
            moved: what `moved` returned.
            grad: the gradient of the residents' rows, wide.
            dtype: the dtype in which gradients travel.
        """
        begin, end = moved.spans[self._rank]
        total = grad[begin:end]
        if len(moved.spans) > 1:
            arrived = [grad.new_empty((len(x), *grad.shape[1:]), dtype=dtype) for x in moved.given]
            self._exchange(arrived, [grad[a:b].to(dtype) for a, b in moved.spans])
            # Messages arrive in any order; floats added in that order would differ from run to run.
            for cols, part in zip(moved.given, arrived, strict=True):  # in the order of the ranks
                total.index_add_(0, cols, part.to(total.dtype))
        own = empty(self._rows, self._rows.shape, TOKEN_MAJOR)
        return own.copy_(total.permute(1, 2, 0, 3))

    def _all(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return all columns of the other ranks, and this rank's columns once for each of them."""
        ranks = range(self._positions.world_size)
        device, num_local = self._rows.device, self._positions.num_local
        wanted = [torch.arange(num_local(peer), device=device) for peer in ranks]
        none = wanted[0][:0]
        own = wanted[self._rank]
        given = [none if peer == self._rank else own for peer in ranks]
        return [none if peer == self._rank else x for peer, x in enumerate(wanted)], given

    def _requests(self, selected: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Exchange requests: return the columns that this rank needs of each, and gives to each."""
        own, ranks = self._num_own, range(self._positions.world_size)
        # A request has a bit for each column of its owner, so its size needs no message.
        asked = [
            selected.new_empty(request_bytes(0 if x == self._rank else own), dtype=torch.uint8)
            for x in ranks
        ]
        needs = self._needs(selected)
        self._exchange(asked, [_bits(x) for x in needs])
        return self._wanted(needs), self._given(asked)

    @property
    def _num_own(self) -> int:
        return self._positions.num_local(self._rank)

    def _needs(self, selected: Tensor) -> list[Tensor]:
        """Return whether each key of each rank is needed; nothing for this rank."""
        positions, device = self._positions, selected.device
        is_needed = torch.zeros(positions.end + 1, dtype=torch.bool, device=device)
        # By parts: as int64 indices, long lists would take twice their own memory again.
        for part in selected.split(_rows_at_a_time(selected), 2):
            is_needed[part.flatten().long()] = True  # -1 is the last entry, which is no key
        numbers = _numbers_on(positions, device)
        spans = map(positions.span, range(positions.world_size))
        needs = [is_needed[columns_of(numbers, span)] for span in spans]
        needs[self._rank] = needs[self._rank][:0]
        return needs

    def _wanted(self, needs: list[Tensor]) -> list[Tensor]:
        """Return the columns that this rank needs of each rank."""
        return [x.nonzero().flatten() for x in needs]

    def _given(self, asked: list[Tensor]) -> list[Tensor]:
        """Return the columns that each rank asked for."""
        return [_from_bits(x, self._num_own).nonzero().flatten() for x in asked]

    def _places(self, wanted: Sequence[Tensor], spans: Sequence[Span]) -> Tensor:
        """Return the row of each position, int32 `(S + 1,)`, see `Residents`."""
        positions, device = self._positions, self._rows.device
        places = torch.full((positions.end + 1,), -1, dtype=torch.int32, device=device)
        numbers = _numbers_on(positions, device)
        for peer, (begin, end) in enumerate(spans):
            of_peer = columns_of(numbers, positions.span(peer))
            # A rank holds its whole shard, and of other shards only the rows that it asked for.
            at = of_peer if peer == self._rank else of_peer[wanted[peer]]
            places[at] = torch.arange(begin, end, dtype=torch.int32, device=device)
        return places

    def _exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Exchange one dense message with every other rank; skip empty ones."""
        label = Label(self._ring, self._num_rounds, self._rank)
        self._num_rounds += 1
        self._transport.at(label)
        # Named here, so that memory stays until the wait.
        receives, sends = (self._messages(side) for side in (received, sent))
        works = self._transport.start(receives, sends)
        self._transport.at(label)
        try:
            for work in works:
                work.wait()
        except BaseException:
            hold_until_complete(works, [message.flat for message in (*receives, *sends)])
            raise

    def _messages(self, by_rank: Sequence[Tensor]) -> list[P2P]:
        """Return the messages that are not empty, of all ranks but this one."""
        found = [P2P(x.view(-1), peer) for peer, x in enumerate(by_rank) if x.numel()]
        return [message for message in found if message.peer != self._rank]


# Numbers of a list of positions that are converted at once.
LISTED = 1 << 22


def _rows_at_a_time(selected: Tensor) -> int:
    batch, groups, _, width = selected.shape
    return max(1, LISTED // max(1, batch * groups * width))


def columns_of(numbers: Tensor, span: Span) -> Tensor:
    """Return a span of a tensor of one dimension."""
    return numbers[span[0] : span[1]]


def _bits(is_set: Tensor) -> Tensor:
    """Return booleans as bits, 8 to a byte.

    >>> _bits(torch.tensor([True, False, True])).tolist()
    [5]
    """
    padded = torch.nn.functional.pad(is_set.to(torch.uint8), (0, -len(is_set) % 8)).view(-1, 8)
    return (padded << _shifts(padded)).sum(-1, dtype=torch.uint8)


def _from_bits(bits: Tensor, length: int) -> Tensor:
    """Return the booleans of `_bits`; `False` for all if there are no bits."""
    found = (bits.unsqueeze(-1) >> _shifts(bits)) & 1
    return found.flatten()[:length].bool()


def _shifts(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def selected_forward(
    query: Tensor,
    keys: SelectedKeys,
    selected: Tensor,
    route: str,
    scale: float,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of the local queries over the keys that they selected."""
    moved = keys.moved(selected, route)
    return listed_forward(query, moved.residents, selected, scale, sinks)


def selected_backward(
    saved: Saved,
    query: Tensor,
    keys: SelectedKeys,
    selected: Tensor,
    route: str,
    scale: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the local queries and of the local keys and values."""
    moved = keys.moved(selected, route)
    # Asked for again: kept from forward, the keys of all layers would be in memory at once.
    grad_query, grad_rows = listed_backward(saved, query, moved.residents, selected, scale)
    return grad_query, keys.summed(moved, grad_rows, dtype)
