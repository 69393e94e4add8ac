"""Keys or values of tokens that are kept: as they are, or full blocks of them in eight bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dtensor_ring.quantised.block_scales import (
    BLOCK_SIZE,
    FORMATS,
    Format,
    Quantised,
    dequantise,
    num_bytes,
    quantise_keys,
    quantise_values,
)

SEQUENCE = 2  # the dim of the tokens
KINDS: dict[str, Callable[..., Quantised]] = {"keys": quantise_keys, "values": quantise_values}

# Numbers that are rounded, or read, at a time. What is computed between stays in the cache of a CPU
# then, and takes little memory of a GPU.
AT_ONCE_ON_CPU, AT_ONCE = 2**18, 2**24


def blocks_at_once(num_in_block: int, device: torch.device) -> int:
    """Return how many blocks of so many numbers are rounded, or read, at a time.

    >>> blocks_at_once(8 * 64 * 128, torch.device("cpu"))
    4
    """
    most = AT_ONCE_ON_CPU if device.type == "cpu" else AT_ONCE
    return max(1, most // max(1, num_in_block))


def format_named(kv_dtype: str | None) -> Format | None:
    """Return the format in which a cache keeps keys and values, `None` for their own dtype.

    Raises:
        ValueError: if there is no such format.
        TypeError: if it is not a name.

    >>> format_named("int8").dtype
    torch.int8
    """
    if kv_dtype is None:
        return None
    known = ", ".join(f'"{name}"' for name in FORMATS)
    message = f"kv_dtype of a cache must be one of {known}, or None to round nothing"
    if not isinstance(kv_dtype, str):
        raise TypeError(f"{message}; got {kv_dtype!r}")
    if kv_dtype not in FORMATS:
        raise ValueError(f"{message}; got {kv_dtype!r}")
    return FORMATS[kv_dtype]


def check_floating(dtype: torch.dtype) -> None:
    """Refuse keys and values that cannot be rounded to eight bits.

    Raises:
        ValueError: if their dtype is not floating.
    """
    if not dtype.is_floating_point:
        raise ValueError(
            f"keys and values of {dtype} have no eight bits, only those of a floating dtype have; "
            "leave kv_dtype out"
        )


def kept_bytes(shape: Sequence[int], dtype: torch.dtype, format: Format | None, kind: str) -> int:
    """Return the bytes of kept tokens.

    Args:
        shape: `(B, N, L, H)`.
        dtype: the dtype of keys or values before they are rounded.
        format: the format of closed blocks; `None` if nothing is rounded.
        kind: `"keys"` or `"values"`.

    >>> kept_bytes((1, 2, 100, 8), torch.bfloat16, FORMATS["int8"], "keys")  # 64 and 36 tokens
    2184
    """
    batch, heads, num_tokens, head_dim = shape
    num_closed = 0 if format is None else num_tokens // BLOCK_SIZE * BLOCK_SIZE
    num_open = batch * heads * (num_tokens - num_closed) * head_dim * dtype.itemsize
    if format is None:
        return num_open
    return num_open + num_bytes((batch, heads, num_closed, head_dim), format, BLOCK_SIZE, kind)


# Note [Open block]: kept tokens fill blocks of `BLOCK_SIZE` tokens, from the first one on. A block
# is closed when it is full: it is in eight bits from then on, and is read dequantised. The last,
# open block stays as it is. So what is kept depends on the tokens alone, not on how many came at a
# time. A crop into a closed block opens it again, with the numbers that it was rounded to.
class KeptTokens(ABC):
    """Keys or values of some tokens, `(B, N, L, H)`. A frozen value: changes make another one.

    Attributes:
        block_size: tokens of a block; only whole blocks can be dropped from the beginning.
    """

    block_size: int

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Return the number of tokens, L."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Return the bytes that are kept."""

    @abstractmethod
    def read(self) -> Tensor:
        """Return the tokens `(B, N, L, H)` in their own dtype."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return all that is kept, as it is kept; numbers of 8 bits as bytes."""

    @abstractmethod
    def of_tensors(self, tensors: Sequence[Tensor]) -> KeptTokens:
        """Return the tokens that have these `tensors`, in the format of these tokens."""

    @abstractmethod
    def append(self, x: Tensor) -> KeptTokens:
        """Return these tokens, and `x` `(B, N, T, H)` after them."""

    @abstractmethod
    def select(self, rows: Tensor) -> KeptTokens:
        """Return these rows of the batch, in this order."""

    @abstractmethod
    def crop(self, num_tokens: int) -> KeptTokens:
        """Return the first tokens; all, if there are fewer. See Note [Open block]."""

    @abstractmethod
    def drop(self, num_tokens: int) -> KeptTokens:
        """Return the tokens without the first `num_tokens`, which are whole blocks."""


def no_tokens(like: Tensor, format: Format | None, kind: str) -> KeptTokens:
    """Return no tokens yet.

    Args:
        like: keys or values `(B, N, L, H)`, as those that will be appended.
        format: the format of closed blocks; `None` to round nothing.
        kind: `"keys"` or `"values"`, which are rounded differently.

    Raises:
        ValueError: if a format is given, and `like` is not floating-point, or has a head dim of 0.

    >>> keys = no_tokens(torch.randn(1, 2, 9, 8), FORMATS["int8"], "keys")
    >>> keys.append(torch.randn(1, 2, 100, 8)).read().shape
    torch.Size([1, 2, 100, 8])
    """
    if format is not None:
        return QuantisedTokens.empty(like, format, kind)
    return PlainTokens(like.new_empty((*like.shape[:SEQUENCE], 0, like.shape[3])))


@dataclass(frozen=True)
class PlainTokens(KeptTokens):
    """Tokens as they are."""

    whole: Tensor
    block_size = 1

    @property
    def num_tokens(self) -> int:
        return self.whole.shape[SEQUENCE]

    @property
    def num_bytes(self) -> int:
        return self.whole.nbytes

    def read(self) -> Tensor:
        return self.whole

    def tensors(self) -> list[Tensor]:
        return [self.whole]

    def of_tensors(self, tensors: Sequence[Tensor]) -> PlainTokens:
        (whole,) = tensors
        return PlainTokens(whole)

    def append(self, x: Tensor) -> PlainTokens:
        return PlainTokens(torch.cat([self.whole, x], SEQUENCE))

    def select(self, rows: Tensor) -> PlainTokens:
        return PlainTokens(self.whole.index_select(0, rows.to(self.whole.device)))

    def crop(self, num_tokens: int) -> PlainTokens:
        return PlainTokens(self.whole[:, :, :num_tokens])

    def drop(self, num_tokens: int) -> PlainTokens:
        # A view: it keeps the few tokens before it until the next change, and copies nothing.
        return PlainTokens(self.whole[:, :, num_tokens:])


@dataclass(frozen=True)
class QuantisedTokens(KeptTokens):
    """Tokens of which full blocks are in eight bits, see Note [Open block].

    Attributes:
        closed: the full blocks.
        open: the tokens after them, fewer than a block, `(B, N, T, H)`.
        format: the format of 8 bits.
    """

    closed: Quantised
    open: Tensor
    format: Format

    @classmethod
    def empty(cls, like: Tensor, format: Format, kind: str) -> QuantisedTokens:
        """Return no tokens yet, see `no_tokens`."""
        check_floating(like.dtype)
        none = like.new_empty((*like.shape[:SEQUENCE], 0, like.shape[3]))
        return cls(KINDS[kind](none, format, BLOCK_SIZE), none, format)

    @property
    def block_size(self) -> int:  # type: ignore[override]
        return self.closed.block_size

    @property
    def num_tokens(self) -> int:
        return self._num_closed + self.open.shape[SEQUENCE]

    @property
    def num_bytes(self) -> int:
        closed = self.closed.data, self.closed.scales, self.closed.means, self.open
        return sum(x.nbytes for x in closed if x is not None)

    def read(self) -> Tensor:
        out = self.open.new_empty((*self.open.shape[:2], self.num_tokens, self.open.shape[3]))
        for begin in range(0, self._num_closed, step := self._at_once):
            part = _part(self.closed, begin, min(begin + step, self._num_closed))
            into = out.narrow(SEQUENCE, begin, part.data.shape[SEQUENCE])
            into.copy_(dequantise(part, out.dtype))
        out[:, :, self._num_closed :] = self.open
        return out

    def tensors(self) -> list[Tensor]:
        found = self.closed.data.view(torch.uint8), self.closed.scales, self.closed.means
        return [x for x in (*found, self.open) if x is not None]

    def of_tensors(self, tensors: Sequence[Tensor]) -> QuantisedTokens:
        data, scales, *means, open = tensors
        data = data.view(self.closed.data.dtype)
        closed = replace(self.closed, data=data, scales=scales, means=means[0] if means else None)
        return replace(self, closed=closed, open=open)

    def append(self, x: Tensor) -> QuantisedTokens:
        open = torch.cat([self.open, x], SEQUENCE)
        # Only a full block is rounded: its scale is that of all of its tokens.
        num_full = open.shape[SEQUENCE] // self.block_size * self.block_size
        if not num_full:
            return replace(self, open=open)
        # Only values have means, so these tell which of both they are.
        quantise = KINDS["keys" if self.closed.means is None else "values"]
        parts = open[:, :, :num_full].split(self._at_once, SEQUENCE)
        new = [quantise(part, self.format, self.block_size) for part in parts]
        closed = _changed(lambda same: torch.cat(same, SEQUENCE), [self.closed, *new])
        # A clone, as a view would keep the memory of the rounded tokens.
        return replace(self, closed=closed, open=open[:, :, num_full:].clone())

    def select(self, rows: Tensor) -> QuantisedTokens:
        rows = rows.to(self.open.device)
        closed = _changed(lambda same: same[0].index_select(0, rows), [self.closed])
        return replace(self, closed=closed, open=self.open.index_select(0, rows))

    def crop(self, num_tokens: int) -> QuantisedTokens:
        if num_tokens >= self.num_tokens:
            return self
        end = min(num_tokens // self.block_size * self.block_size, self._num_closed)
        open = self.open
        # The cut is within a closed block: its first tokens are open again, as they were rounded.
        if end < self._num_closed:
            open = dequantise(_part(self.closed, end, end + self.block_size), open.dtype)
        return self._of(_part(self.closed, 0, end), open[:, :, : num_tokens - end])

    def drop(self, num_tokens: int) -> QuantisedTokens:
        return self._of(_part(self.closed, num_tokens, self._num_closed), self.open)

    @property
    def _at_once(self) -> int:
        """Return how many tokens are rounded, or read, at a time."""
        batch, heads, _, head_dim = self.open.shape
        num_in_block = batch * heads * self.block_size * head_dim
        return self.block_size * blocks_at_once(num_in_block, self.open.device)

    @property
    def _num_closed(self) -> int:
        return self.closed.data.shape[SEQUENCE]

    def _of(self, closed: Quantised, open: Tensor) -> QuantisedTokens:
        """Return views of a part of the tokens; they are copied, so that the rest is freed."""
        if closed.data.shape != self.closed.data.shape:
            closed = _changed(lambda same: same[0].clone(), [closed])
        return replace(self, closed=closed, open=open.clone())


def _part(q: Quantised, begin: int, end: int) -> Quantised:
    """Return some tokens, which are whole blocks, as views."""
    blocks = slice(begin // q.block_size, end // q.block_size)
    means = None if q.means is None else q.means[:, :, blocks]
    return replace(q, data=q.data[:, :, begin:end], scales=q.scales[:, :, blocks], means=means)


def _changed(change: Callable[[list[Tensor]], Tensor], given: list[Quantised]) -> Quantised:
    """Apply a change to each tensor of quantised tokens, or to the tensors of several."""
    first, found = given[0], dict[str, Any]()
    # Numbers of 8 bits as bytes: few kernels know all their dtypes.
    data = change([q.data.view(torch.uint8) for q in given]).view(first.data.dtype)
    for name in ("scales", "means"):
        if getattr(first, name) is not None:
            found[name] = change([getattr(q, name) for q in given])
    return replace(first, data=data, **found)
