"""Merge the partial results that all ranks have for the same queries.

Note [Bitwise equal ranks]: a row is merged from the same W partials in the order of the ranks,
either on every rank or on one rank that sends the result. So all ranks get the same bits, and
sample the same token.

On a GPU, nothing runs beside the messages: the current stream waits for a round as soon as it is
started, see Note [Streams] in `dtensor_ring/transport/rotation.py`. The host does not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.merge import UNSEEN, merge_outputs, merge_stacked
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.layout import shard_length
from dtensor_ring.transport.transport import P2P, Transport

# "one_shot": every rank gets all partials and merges all rows. "two_shot": each rank merges a part
# of the rows, and a second round sends the merged parts to all ranks.
MERGES = ("one_shot", "two_shot")

# A second round must save this many received bytes to pay: a link of 2.5 GB/s moves them in the
# 100 us that a round takes over gloo on one machine.
WORTH_A_ROUND = 1 << 18


def merge_by_size(num_bytes: int, world_size: int) -> str:
    """Return the faster merge for a partial of `num_bytes`; all ranks decide alike.

    >>> merge_by_size(1 << 14, 8), merge_by_size(1 << 20, 8), merge_by_size(1 << 20, 2)
    ('one_shot', 'two_shot', 'one_shot')
    """
    others = world_size - 1
    # "two_shot" receives 1/W of the rows from each rank, twice; "one_shot" all rows, once.
    saved = others * num_bytes - 2 * others * num_bytes // world_size
    return "two_shot" if saved > WORTH_A_ROUND else "one_shot"


class _Parts(NamedTuple):
    """Memory for what all ranks have: each row is an output and its lse, so one message has both.

    Attributes:
        like: shape and dtype of an output of one rank.
        num_bytes: bytes of `rows`.
        buffer: the memory.
        rows: `(W, B, N, M, Hv + 1)`, its views `outs` and `lses`, `(W, B, N, M, 1)`, and of these
            those of this rank.
        receives: the messages that each other rank sends, parts of `rows`.
        sends: this rank's message, to each other rank.
    """

    like: tuple[Any, ...]
    num_bytes: int
    buffer: Tensor
    rows: Tensor
    outs: Tensor
    lses: Tensor
    own_out: Tensor
    own_lse: Tensor
    receives: list[P2P]
    sends: list[P2P]


class Combine:
    """Merges the partial results `(out, lse)` of W ranks.

    Args:
        transport: moves the messages.
        rank: this rank's index on the axis.
        world_size: the number of ranks on the axis.
        merge: one of `MERGES`.
    """

    def __init__(self, transport: Transport, rank: int, world_size: int, merge: str) -> None:
        self._transport, self._rank, self._size, self._merge = transport, rank, world_size, merge
        self._label = Label("decode", 0, rank)
        self._last: _Parts | None = None
        self.begin()

    def begin(self) -> None:
        """Begin a call, the first one or another one over the same transport."""
        self._transport.at(self._label)

    def __call__(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Merge this rank's out `(B, N, M, Hv)` and lse `(B, N, M)` with those of the other ranks.

        Both have the same dtype. The results are new tensors.
        """
        parts = self._own(out, out.dtype)
        parts.own_lse.copy_(lse)
        if self._merge == "one_shot":
            self._exchange(parts.receives, parts.sends)
            merged = merge_stacked(parts.outs, parts.lses.squeeze(-1))
        else:
            outs, lses = self._in_two(parts.rows.flatten(1, -2))
            merged = outs.view(out.shape), lses.view(lse.shape)
        self._transport.free(parts.buffer)
        return merged

    def output(self, out: Tensor, lse: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the merged output alone, the same bits.

        Args:
            out: `(B, N, M, Hv)`.
            lse: `(B, N, M)`.
            dtype: in which both are merged.
        """
        if self._merge != "one_shot":
            return self(out.to(dtype), lse)[0]
        parts = self._own(out, dtype)
        # On any rank, whatever it has seen, so that none merges a row to NaN and another to 0.
        torch.maximum(lse, self._unseen, out=parts.own_lse)
        self._exchange(parts.receives, parts.sends)
        merged = merge_outputs(parts.outs, parts.lses)
        self._transport.free(parts.buffer)
        return merged

    @cached_property
    def _unseen(self) -> Tensor:
        """The least lse of a message, on the CPU, from where a GPU takes it, too."""
        return torch.tensor(UNSEEN, device="cpu")

    def _own(self, out: Tensor, dtype: torch.dtype) -> _Parts:
        """Return memory for what all ranks have, with the output of this rank."""
        parts = self._parts_like(out, dtype)
        # A copy rounds to another dtype by itself.
        parts.own_out.copy_(out)
        return parts

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows `(R, X)` of all ranks, equally many of each, as new `(W, R, X)`."""
        self._transport.prepare(rows.device)
        buffer, parts = self._buffer(len(rows), rows.shape[1] - 1, rows)
        parts[self._rank] = rows
        flat = parts.flatten(1).unbind()
        self._exchange(*self._messages(flat, [flat[self._rank]] * self._size))
        everyone = parts.clone()
        self._transport.free(buffer)
        return everyone

    def _in_two(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """Merge this rank's part of the rows, then gather the merged rows of all ranks."""
        num_rows, width = parts.shape[1:]
        lengths = [shard_length(rank, self._size, num_rows) for rank in range(self._size)]
        sent = parts[self._rank].split(lengths)
        flat = [x.view(-1) for x in sent]
        buffer, shares = self._buffer(lengths[self._rank], width - 1, parts)
        shares[self._rank] = sent[self._rank]
        self._exchange(*self._messages(shares.flatten(1).unbind(), flat))
        merged, lse = merge_stacked(shares[..., : width - 1], shares[..., width - 1])
        # This rank's partial has been sent, so the merged rows may overwrite a part of it.
        sent[self._rank][:, :-1], sent[self._rank][:, -1] = merged, lse
        self._exchange(*self._messages(flat, [flat[self._rank]] * self._size))
        self._transport.free(buffer)
        # Clones, as a single row is contiguous, and the buffer is that of the next call.
        rows, copied = parts[self._rank], torch.contiguous_format
        return rows[:, :-1].clone(memory_format=copied), rows[:, -1].clone(memory_format=copied)

    def _messages(
        self, received: Sequence[Tensor], sent: Sequence[Tensor]
    ) -> tuple[list[P2P], list[P2P]]:
        """Return one flat message from and to every other rank, without empty ones.

        A tensor that goes to all ranks is joined with the call record once.
        """
        receives: list[P2P] = []
        sends: list[P2P] = []
        for peer, sides in enumerate(zip(received, sent, strict=True)):
            for messages, x in zip((receives, sends), sides, strict=True):
                if peer != self._rank and x.numel():
                    messages.append(P2P(x, peer))
        return receives, sends

    def _exchange(self, receives: list[P2P], sends: list[P2P]) -> None:
        works = self._transport.start(receives, sends)
        self._transport.at(self._label)
        for work in works:
            work.wait()

    def _parts_like(self, out: Tensor, dtype: torch.dtype) -> _Parts:
        """Return memory for what all ranks have of outputs of this shape, in a dtype.

        On a CPU layers get the same buffer one after the other, so its views are made once.
        """
        last, like = self._last, (out.shape, dtype)
        if last is not None and last.like == like:
            num_bytes = last.num_bytes
        else:
            last = None
            num_bytes = self._size * (out.numel() + out.shape[:-1].numel()) * dtype.itemsize
        self._transport.prepare(out.device)
        buffer = self._transport.allocate(num_bytes, out.device)
        if last is None or last.buffer is not buffer:
            # The memory of earlier ones is free from here on: a model has many layers.
            last = self._last = self._views(buffer, num_bytes, like)
        return last

    def _views(
        self, buffer: Tensor, num_bytes: int, like: tuple[torch.Size, torch.dtype]
    ) -> _Parts:
        """Return views of a buffer for the outputs of all ranks, of such a shape and dtype."""
        (*lengths, head_dim), dtype = like
        rows = buffer[:num_bytes].view(dtype).view(self._size, *lengths, head_dim + 1)
        flat = rows.flatten(1).unbind()
        messages = self._messages(flat, [flat[self._rank]] * self._size)
        outs, lses = rows[..., :-1], rows[..., -1:]
        own = outs[self._rank], lses[self._rank].squeeze(-1)
        return _Parts(like, num_bytes, buffer, rows, outs, lses, *own, *messages)

    def _buffer(self, num_rows: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return memory for a message of each rank, and its view `(W, rows, H + 1)`."""
        shape = self._size, num_rows, head_dim + 1
        num_bytes = self._size * num_rows * (head_dim + 1) * like.dtype.itemsize
        buffer = self._transport.allocate(num_bytes, like.device)
        return buffer, buffer[:num_bytes].view(like.dtype).view(shape)


def first_round(
    query: Tensor, value: Tensor, merge: str | None, world_size: int
) -> tuple[str, int]:
    """Return the merge, by default the faster one, and the bytes of its first round's messages.

    A rank's partial travels as float32 (float64 for float64): each row is an output and its lse.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    num_rows, row_bytes = query.shape[:3].numel(), (value.shape[3] + 1) * wide.itemsize
    merge = merge or merge_by_size(num_rows * row_bytes, world_size)
    if merge == "two_shot":
        num_rows = shard_length(0, world_size, num_rows)
    return merge, num_rows * row_bytes
