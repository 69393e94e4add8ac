"""Blocks of a pool that go to another pool, layer by layer, each of them once.

Eight bits stay as they are: full units move with their scales, see Note [Open units] in
`dtensor_ring/paged/page_memory.py`, and the tokens after them as they are kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from dtensor_ring.handover.call import handing_over
from dtensor_ring.handover.plan import BlockMove, MovedTokens, block_moves
from dtensor_ring.handover.run import Content, Incoming, Outgoing, Posts
from dtensor_ring.paged.api import PagedCache
from dtensor_ring.paged.block_pool import BlockPool
from dtensor_ring.paged.page_memory import PageMemory, PlainPages, QuantisedPages, _tensors
from dtensor_ring.planning.ranges import expanded, numbered


class PagedHandOver:
    """Tokens of sequences of one pool that go to sequences of another pool, within `handing_over`.

    All ranks know both pools, and compute the same moves without a message. A rank that has no
    source posts all receives at once, others with what they send of the layer. What moved is there
    once all messages have arrived.

    Args:
        posts: the messages.
        rank: this rank, among the ranks of the hand-over.
        caches: the caches of this rank in both pools; `None` if it has none there.
        moves: what moves.

    Attributes:
        posts: the messages.
    """

    def __init__(
        self,
        posts: Posts,
        rank: int,
        caches: tuple[PagedCache | None, PagedCache | None],
        moves: Sequence[BlockMove],
    ) -> None:
        self.posts = posts
        self._given: list[tuple[int, MovedPages, MovedPages | None]] = []
        self._taken: list[tuple[int, MovedPages]] = []
        source, target = caches
        for move in moves:
            here, there, num_tokens = move.blocks.T
            given = taken = None
            if move.source == rank and source is not None:
                given = moved_pages(source._memory, here, num_tokens)
            if move.target == rank and target is not None:
                taken = moved_pages(target._memory, there, num_tokens)
            # A move within this rank is a copy, so both of its ends stand together.
            if given is not None:
                self._given.append((move.target, given, taken))
            elif taken is not None:
                self._taken.append((move.source, taken))
        # A rank that only receives calls no `send`, so all of its receives are posted here.
        if target is not None and source is None:
            for layer in range(target.num_layers):
                posts.post(layer, self._incoming(layer), [])

    def send(self, layer: int) -> None:
        """Send what a layer has of these tokens; what stays on this rank is copied."""
        outgoing = []
        with torch.inference_mode(False), torch.no_grad():
            for peer, given, taken in self._given:
                if taken is None:
                    outgoing.append(Outgoing(peer, given.contents, partial(given.fill, layer)))
                else:
                    self._copy(layer, given, taken)
            self.posts.post(layer, self._incoming(layer), outgoing)

    def _copy(self, layer: int, given: MovedPages, taken: MovedPages) -> None:
        device = self.posts.device
        # By way of a message's form: the pages of both pools may lie in memory in other ways.
        content = [torch.empty(x.shape, dtype=x.dtype, device=device) for x in given.contents]
        given.fill(layer, content)
        taken.put(layer, content)

    def _incoming(self, layer: int) -> list[Incoming]:
        """Return the messages of a layer that this rank gets."""
        return [
            Incoming(peer, taken.contents, partial(_put, taken, layer))
            for peer, taken in self._taken
        ]


class MovedPages(ABC):
    """The first tokens of some pages of a rank, in any layer."""

    contents: list[Content]

    @abstractmethod
    def fill(self, layer: int, packed: Sequence[Tensor]) -> None:
        """Copy them to the tensors of a message, which are as `contents` says."""

    @abstractmethod
    def put(self, layer: int, packed: Sequence[Tensor]) -> None:
        """Copy the tensors of a message to them."""


class MovedPlainPages(MovedPages):
    """Of pages as they are.

    Args:
        memory: the memory of all pages.
        pages: the indices of the pages, `(P,)`.
        num_tokens: the number of tokens of each, `(P,)`.
    """

    def __init__(self, memory: PlainPages, pages: np.ndarray, num_tokens: np.ndarray) -> None:
        self._memory, like = memory, memory.like
        first = pages * like[0].shape[1]
        _, slots = expanded(first, first + num_tokens)
        self._slots = torch.from_numpy(slots).to(like[0].device)
        self.contents = [Content((len(slots), *x.shape[2:]), x.dtype) for x in like]

    def fill(self, layer: int, packed: Sequence[Tensor]) -> None:
        for pages, into in zip(self._memory._pages, packed, strict=True):
            torch.index_select(pages[layer].flatten(0, 1), 0, self._slots, out=into)

    def put(self, layer: int, packed: Sequence[Tensor]) -> None:
        for pages, x in zip(self._memory._pages, packed, strict=True):
            pages[layer].flatten(0, 1)[self._slots] = x


class MovedQuantisedPages(MovedPages):
    """Of pages whose full units are in eight bits: those units, and the first tokens of others.

    Args:
        memory: the memory of all pages.
        pages: the indices of the pages, `(P,)`.
        num_tokens: the number of tokens of each, `(P,)`.
    """

    def __init__(self, memory: QuantisedPages, pages: np.ndarray, num_tokens: np.ndarray) -> None:
        self._memory, unit = memory, memory._unit
        # With units of 16, the first 40 tokens of a page are units 0 and 1, and 8 tokens of unit 2.
        # A page is some units. Tokens fill it from the front, so at most one unit of it is open.
        first, (num_full, rest) = pages * (memory._page // unit), np.divmod(num_tokens, unit)
        _, self._full = expanded(first, first + num_full)
        self._open = (first + num_full)[rest > 0]
        self._rest = rest[rest > 0]
        self.contents = [
            Content((len(self._full), *x.shape[1:]), x.dtype)
            for q in memory._closed
            for x in _tensors(q)
        ]
        total = int(self._rest.sum())
        self.contents += [Content((total, x.shape[1], x.shape[3]), x.dtype) for x in memory._open]

    def fill(self, layer: int, packed: Sequence[Tensor]) -> None:
        remaining = list(packed)
        rows = self._units(layer, self._full)
        for q in self._memory._closed:
            for x in _tensors(q):
                torch.index_select(x, 0, rows, out=remaining.pop(0))
        numbers, places = self._places()
        units = self._open + layer * self._memory._num_units
        for which, into in enumerate(remaining):
            into.copy_(self._memory._content(which, units)[numbers, :, places])

    def put(self, layer: int, packed: Sequence[Tensor]) -> None:
        tensors = list(packed)
        rows = self._units(layer, self._full)
        for q in self._memory._closed:
            for x in _tensors(q):
                x[rows] = tensors.pop(0)
        memory = self._memory
        # These units are full now; if one was open before, its slot is free.
        memory._release(self._full + layer * memory._num_units)
        if not len(self._open):
            return
        numbers, places = self._places()
        content = []
        for x, new in zip(memory._open, tensors, strict=True):
            whole = x.new_zeros((len(self._open), *x.shape[1:]))
            whole[numbers, :, places] = new
            content.append(whole)
        memory._keep_open(self._open + layer * memory._num_units, content)

    def _units(self, layer: int, units: np.ndarray) -> Tensor:
        # Units of all layers are in one tensor, layer by layer, so one index reads any of them.
        where = torch.from_numpy(units + layer * self._memory._num_units)
        return where.to(self._memory.like[0].device)

    def _places(self) -> tuple[Tensor, Tensor]:
        """Return the number of the unit of each token after full units, and its place there."""
        numbers, places = numbered(self._rest)
        device = self._memory.like[0].device
        return torch.from_numpy(numbers).to(device), torch.from_numpy(places).to(device)


def moved_pages(memory: PageMemory, pages: np.ndarray, num_tokens: np.ndarray) -> MovedPages:
    """Return the first tokens of some pages."""
    if isinstance(memory, QuantisedPages):
        return MovedQuantisedPages(memory, pages, num_tokens)
    assert isinstance(memory, PlainPages)
    return MovedPlainPages(memory, pages, num_tokens)


def _put(taken: MovedPages, layer: int, packed: list[Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        taken.put(layer, packed)


@contextmanager
def moving_blocks(
    group: ProcessGroup,
    device: torch.device,
    moved: Sequence[MovedTokens],
    pools: tuple[BlockPool, BlockPool],
    ranks: tuple[Sequence[int], Sequence[int]],
    caches: tuple[PagedCache | None, PagedCache | None],
    facts: dict[str, Any],
) -> Iterator[PagedHandOver]:
    """Return a context in which tokens of sequences of one pool go to those of another pool.

    All ranks of the group call it with the same numbers. Within it, a rank of the first pool calls
    `send` for each layer, in order, once the layer has written these tokens. Other calls may run
    meanwhile, but none over this group, see `group_beside`. The end waits for all messages. Then
    commit the tokens in the second pool.

    Args:
        group: the ranks of both pools; nothing else uses this group meanwhile.
        device: the device of this rank's tensors.
        moved: what moves.
        pools: both pools, which all ranks know; their blocks have the same size.
        ranks: the ranks of each pool, in its order, counted in the group.
        caches: the caches of this rank in each pool; `None` if it has none there.
        facts: what else must be equal on all ranks.

    Raises:
        ValueError: if the pools have blocks of different sizes.
        RingError: on every rank, if they differ, or a rank ended, raised, or did not answer in
            time.

    >>> group = init_device_mesh("cpu", (1,)).get_group()
    >>> pools = BlockPool(num_blocks=4, block=4), BlockPool(num_blocks=2, block=4)
    >>> caches = tuple(PagedCache(pool, 2, head_dim=8, num_layers=1) for pool in pools)
    >>> one, other = (pool.add([5, 6, 7]) for pool in pools)
    >>> PagedBatch(caches[0], [one], 3).write(0, *torch.randn(2, 1, 2, 3, 8))
    >>> moved = [MovedTokens(one, other, 0, 3)]
    >>> cpu = torch.device("cpu")
    >>> with moving_blocks(group, cpu, moved, pools, ([0], [0]), caches, {}) as moving:
    ...     moving.send(0)
    >>> torch.equal(caches[0].gather(0, one)[0], caches[1].gather(0, other)[0])
    True
    """
    moves = block_moves(moved, (pools[0].dealing, pools[1].dealing), ranks)
    numbers = b"".join(x.blocks.tobytes() for x in moves)
    places = [(x.source, x.target, len(x.blocks)) for x in moves]
    facts = facts | {"blocks that move": f"{places}, checksum {crc32(numbers):08x}"}
    with handing_over(group, facts, device) as posts:
        moving = PagedHandOver(posts, group.rank(), caches, moves)
        yield moving
