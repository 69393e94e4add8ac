"""The memory of a rank's blocks of a pool: keys and values as they are, or in eight bits.

Words: a *page* is a block of the pool. In eight bits, a page is one block of scales, or several:
a *unit* is the tokens that share scales, `BLOCK_SIZE` or a page, whichever is less.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.memory import Numbers
from dtensor_ring.paged.block_pool import BlockPool
from dtensor_ring.quantised import kept_tokens
from dtensor_ring.quantised.block_scales import Format, Quantised, dequantise
from dtensor_ring.quantised.kept_tokens import KINDS, blocks_at_once

Pair = tuple[Tensor, Tensor]
# Shapes of keys and of values: `(layers, pages, tokens of a page, N, H)`.
Shapes = tuple[tuple[int, ...], tuple[int, ...]]


class PageMemory(ABC):
    """Keys and values of all layers, in pages.

    Attributes:
        like: empty keys and values `(0, page, N, H)`, with the dtype and device of all.
    """

    like: Pair

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Return the bytes of all pages."""

    @abstractmethod
    def write(self, layer: int, slots: Numbers, tokens: Pair) -> None:
        """Write tokens of some sequences, up to the end of each.

        Args:
            layer: the number of the layer.
            slots: where the tokens go, `(T,)`, among all tokens of all pages.
            tokens: keys and values `(T, N, H)`.
        """

    @abstractmethod
    def read(self, layer: int, pages: np.ndarray) -> Pair:
        """Return copies of some pages of a layer, `(P, page, N, H)`."""

    @abstractmethod
    def to_attend(self, layer: int, pages: np.ndarray | None) -> Pair:
        """Return the memory of all pages or, of rounded ones, copies of these, or of all."""

    @abstractmethod
    def copy(self, source: int, target: int) -> None:
        """Copy a page in all layers."""


class PlainPages(PageMemory):
    """Pages as they are."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype | None, device: torch.device) -> None:
        # Zeros, because kernels load slots after the last key: a NaN there times weight 0 is NaN.
        keys, values = (torch.zeros(shape, dtype=dtype, device=device) for shape in shapes)
        self._pages = keys, values
        self.like = keys[0, :0], values[0, :0]

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for x in self._pages)

    def write(self, layer: int, slots: Numbers, tokens: Pair) -> None:
        (where,) = slots.on(self.like[0].device)
        for pages, x in zip(self._pages, tokens, strict=True):
            pages[layer].flatten(0, 1)[where] = x

    def read(self, layer: int, pages: np.ndarray) -> Pair:
        keys, values = (x[layer][_indices(pages, x)] for x in self._pages)
        return keys, values

    def to_attend(self, layer: int, pages: np.ndarray | None) -> Pair:
        return self._pages[0][layer], self._pages[1][layer]

    def copy(self, source: int, target: int) -> None:
        for x in self._pages:
            x[:, target] = x[:, source]


# Note [Open units]: a unit is closed when its last token is written: it is in eight bits from then
# on, in one layer after the other. Until then it is as it is, in memory that a layer has for open
# units only: a sequence has one at most, on the rank of its last token. So what is kept depends on
# the tokens alone, not on how many came at a time. A write into a closed unit, after a crop, opens
# it again, with the numbers that it was rounded to.
class QuantisedPages(PageMemory):
    """Pages whose full units are in eight bits, see Note [Open units].

    Units are numbered through all layers. A unit is a row of a batch of one block.

    Args:
        shapes: of keys and values.
        dtype: the dtype of keys and values before they are rounded.
        device: the device of all memory.
        format: the format of 8 bits.
        held: returns which pages sequences hold: what is open in others is of no use.
    """

    def __init__(
        self,
        shapes: Shapes,
        dtype: torch.dtype | None,
        device: torch.device,
        format: Format,
        held: Callable[[], np.ndarray],
    ) -> None:
        (layers, pages, self._page, heads, _), _ = shapes
        self._unit, self._format, self._held = unit_of(self._page), format, held
        self._num_pages, self._num_units = pages, pages * self._page // self._unit  # of a layer
        total = layers * self._num_units
        none = [torch.empty(0, heads, self._unit, x[4], dtype=dtype, device=device) for x in shapes]
        # Pages of two units, where the sequence that ends in page 1 has one open unit:
        #     page    0      1      2
        #     unit    0  1   2  3   4  5
        #     slot   -1 -1  -1  0  -1 -1
        self._open = none  # (slots, N, unit, H)
        self._slot = np.full(total, -1)  # of each unit; closed ones have none
        self._free: list[int] = []
        self.like = (
            none[0].new_empty(0, self._page, heads, shapes[0][4]),
            none[1].new_empty(0, self._page, heads, shapes[1][4]),
        )
        kinds = zip(KINDS.values(), none, strict=True)
        self._closed = [_zeros(quantise(x[:0], format, self._unit), total) for quantise, x in kinds]

    @property
    def num_bytes(self) -> int:
        kept = [*self._open, *(x for q in self._closed for x in _tensors(q))]
        return sum(x.nbytes for x in kept)

    def write(self, layer: int, slots: Numbers, tokens: Pair) -> None:
        where = slots.on(torch.device("cpu"))[0].numpy()
        units, number = np.unique(where // self._unit, return_inverse=True)
        units, places = units + layer * self._num_units, where % self._unit
        # Tokens come up to the end of a sequence, so a unit whose last place is written is full.
        is_full = np.isin(units, units[number[places == self._unit - 1]])
        has_more = ~np.isin(units, units[number[places == 0]])  # tokens before those of this write
        written = []
        for which, x in enumerate(tokens):
            content = x.new_zeros(len(units), x.shape[1], self._unit, x.shape[2])
            content[_indices(has_more, x)] = self._content(which, units[has_more])
            content[_indices(number, x), :, _indices(places, x)] = x
            written.append(content)
        self._close(units[is_full], [x[_indices(is_full, x)] for x in written])
        self._keep_open(units[~is_full], [x[_indices(~is_full, x)] for x in written])

    def read(self, layer: int, pages: np.ndarray) -> Pair:
        per_page = self._page // self._unit
        units = (pages[:, None] * per_page + np.arange(per_page)).reshape(-1)
        units = units + layer * self._num_units
        found = [self._content(which, units).transpose(1, 2) for which in (0, 1)]
        keys, values = (x.reshape((len(pages), self._page, *x.shape[2:])) for x in found)
        return keys, values

    def to_attend(self, layer: int, pages: np.ndarray | None) -> Pair:
        return self.read(layer, np.arange(self._num_pages) if pages is None else pages)

    def copy(self, source: int, target: int) -> None:
        per_page = self._page // self._unit
        layers = np.arange(0, len(self._slot), self._num_units)[:, None]
        here, there = (
            (layers + np.arange(per_page) + x * per_page).ravel() for x in (source, target)
        )
        is_open = self._slot[here] >= 0
        for q in self._closed:
            for x in _tensors(q):
                x[_indices(there, x)] = x[_indices(here, x)]
        self._release(there[~is_open])
        # An open unit is stored in a slot, so its copy gets its own slot.
        slots = self._slot[here[is_open]]
        self._keep_open(there[is_open], [x[_indices(slots, x)] for x in self._open])

    def _content(self, which: int, units: np.ndarray) -> Tensor:
        """Return keys (0) or values (1) of some units, `(U, N, unit, H)`."""
        opened, q = self._open[which], self._closed[which]
        out = opened.new_empty((len(units), *opened.shape[1:]))
        slots = self._slot[units]
        out[_indices(slots >= 0, out)] = opened[_indices(slots[slots >= 0], opened)]
        # Units without a slot are in eight bits, and are dequantised a few at a time.
        at = np.flatnonzero(slots < 0)
        for begin in range(0, len(at), step := _at_once(out)):
            some = at[begin : begin + step]
            rows = _indices(units[some], out)
            out[_indices(some, out)] = dequantise(_rows(q, rows), out.dtype)
        return out

    def _close(self, units: np.ndarray, content: list[Tensor]) -> None:
        for q, quantise, x in zip(self._closed, KINDS.values(), content, strict=True):
            for begin in range(0, len(units), step := _at_once(x)):
                part = slice(begin, begin + step)
                new, rows = quantise(x[part], self._format, self._unit), _indices(units[part], x)
                for into, y in zip(_tensors(q), _tensors(new), strict=True):
                    into[rows] = y
        self._release(units)

    def _keep_open(self, units: np.ndarray, content: list[Tensor]) -> None:
        missing = units[self._slot[units] < 0]
        self._make_room(len(missing))
        for unit in missing:
            self._slot[unit] = self._free.pop()
        slots = self._slot[units]
        for opened, x in zip(self._open, content, strict=True):
            opened[_indices(slots, opened)] = x

    def _release(self, units: np.ndarray) -> None:
        slots = self._slot[units]
        self._free.extend(slots[slots >= 0].tolist())
        self._slot[units] = -1

    def _make_room(self, num_slots: int) -> None:
        """Have this many free slots: those of pages that nobody holds, else new ones."""
        if len(self._free) >= num_slots:
            return
        is_held = np.repeat(self._held(), self._page // self._unit)
        opened = np.flatnonzero(self._slot >= 0)
        self._release(opened[~is_held[opened % self._num_units]])
        before = len(self._open[0])
        more = num_slots - len(self._free)
        if more > 0:
            more = max(more, before)  # so that all copies together cost little
            self._open = [torch.cat([x, x.new_zeros((more, *x.shape[1:]))]) for x in self._open]
            self._free.extend(range(before, before + more))


def unit_of(page: int) -> int:
    """Return the number of tokens of a page that share scales.

    Raises:
        ValueError: if they do not divide the page.

    >>> unit_of(256), unit_of(16)
    (64, 16)
    """
    unit = min(kept_tokens.BLOCK_SIZE, page)
    if page % unit:
        raise ValueError(
            f"eight bits have one scale for {unit} tokens, which do not divide blocks of {page}; "
            f"make the pool with block={page // unit * unit}, or with fewer than {unit}"
        )
    return unit


def page_memory(
    pool: BlockPool,
    rank: int,
    shapes: Shapes,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    format: Format | None,
) -> PageMemory:
    """Return the memory of a rank's pages.

    Raises:
        ValueError: if a format is given, and the dtype is not floating, or its units do not divide
            the pages.
    """
    made = torch.empty(0, dtype=dtype, device=device)
    with torch.inference_mode(False):  # tensors made in inference mode are read-only outside of it
        if format is None:
            return PlainPages(shapes, made.dtype, made.device)
        kept_tokens.check_floating(made.dtype)
        held = partial(pool.held_blocks, rank)
        return QuantisedPages(shapes, made.dtype, made.device, format, held)


def _tensors(q: Quantised) -> list[Tensor]:
    """Return all tensors; numbers of 8 bits as bytes, as few kernels know all their dtypes."""
    return [x for x in (q.data.view(torch.uint8), q.scales, q.means) if x is not None]


def _zeros(like: Quantised, num_rows: int) -> Quantised:
    """Return as many rows of zeros in the format of `like`, which has none."""
    made = [x.new_zeros((num_rows, *x.shape[1:])) for x in _tensors(like)]
    means = None if like.means is None else made[2]
    return replace(like, data=made[0].view(like.data.dtype), scales=made[1], means=means)


def _rows(q: Quantised, rows: Tensor) -> Quantised:
    data = q.data.view(torch.uint8)[rows].view(q.data.dtype)
    means = None if q.means is None else q.means[rows]
    return replace(q, data=data, scales=q.scales[rows], means=means)


def _at_once(content: Tensor) -> int:
    """Return how many units `(U, N, unit, H)` are rounded, or read, at a time."""
    return blocks_at_once(content.shape[1:].numel(), content.device)


def _indices(numbers: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(numbers).to(like.device)
