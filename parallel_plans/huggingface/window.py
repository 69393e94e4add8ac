"""Holds the last keys and values of a layer with a window, replicated on every rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parallel_plans.huggingface.last_tokens import LastTokens
from parallel_plans.huggingface.turn import Turn, window_slice

Pair = tuple[Tensor, Tensor]


class Window:
    """Holds the tokens in a layer's window of `size` tokens that the next token still sees.

    Every rank holds them, so a decode step needs no message. After a sharded turn, each rank
    receives the last tokens from their owners once.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._held: Pair | None = None
        self._next: Callable[[], Pair] | None = None

    @property
    def num_held(self) -> int:
        """The number of tokens held for each row."""
        return 0 if self._held is None else self._held[0].shape[2]

    @property
    def num_bytes(self) -> int:
        """The bytes that the held tokens take on each rank."""
        return sum(x.numel() * x.itemsize for x in self._held or ())

    def append(self, key: Tensor, value: Tensor, turn: Turn) -> Pair:
        """Append new tokens, and return this rank's columns of held and new tokens."""
        # Keep one more token for each that may be cropped: earlier windows still need it.
        num_kept = self.size - 1 + max(0, turn.num_kept - 1)
        held = self._held or (key[:, :, :0], value[:, :, :0])
        if not turn.dealt_length:
            whole = _cat(held, (key, value))
            # A view: it keeps the few tokens before it until the next turn, and copies nothing.
            self._next = lambda: _last(whole, num_kept)
            return whole
        axis = turn.axis
        count = min(num_kept, turn.num_tokens)
        last = LastTokens.of(axis, turn.layout, turn.num_tokens, turn.dealt_length, count)
        own = last.local_indices(key.device)
        tail = torch.cat([key.index_select(2, own), value.index_select(2, own)], -1)
        dims = key.shape[3], value.shape[3]

        def joined() -> Pair:
            new_key, new_value = last.join(tail, 2).split(dims, -1)
            return _cat(_last(held, num_kept - count), (new_key, new_value))

        self._next = joined
        begin, end = window_slice(axis.mesh.get_local_rank(), axis.mesh.size(), self.num_held)
        own_slice = held[0][:, :, begin:end], held[1][:, :, begin:end]
        return _cat(own_slice, (key, value))

    def appended(self) -> Pair | None:
        """Return what is held after the turn. All ranks must call layers in the same order."""
        return self._held if self._next is None else self._next()

    def selected(self, rows: Tensor) -> Pair | None:
        """Return what is held of these rows of the batch."""
        if self._held is None:
            return None
        rows = rows.to(self._held[0].device)
        return self._held[0].index_select(0, rows), self._held[1].index_select(0, rows)

    def hold(self, pair: Pair | None) -> None:
        """Hold this pair from now on, and drop what was appended."""
        self._held, self._next = pair, None

    def take_back(self) -> None:
        """Drop what was appended."""
        self._next = None

    def check_crop(self, num_tokens: int, seq_len: int) -> None:
        """Refuse to crop `num_tokens` of `seq_len` tokens if the window is no longer held then.

        Raises:
            ValueError: if tokens of the window are gone.
        """
        if self.num_held - num_tokens < min(self.size - 1, seq_len - num_tokens):
            raise ValueError(
                f"cannot take {num_tokens} tokens away: layers with a window of {self.size} have "
                f"the last {self.num_held} tokens only; as many can be taken away as the last call "
                "returned logits of, less one"
            )

    def crop(self, num_tokens: int) -> None:
        """Remove the last tokens."""
        if self._held is not None:
            left = max(0, self.num_held - num_tokens)
            self._held = self._held[0][:, :, :left], self._held[1][:, :, :left]


def _cat(before: Pair, after: Pair) -> Pair:
    return torch.cat((before[0], after[0]), 2), torch.cat((before[1], after[1]), 2)


def _last(pair: Pair, count: int) -> Pair:
    """Return the last `count` columns as views, or all if there are fewer."""
    key, value = pair
    return key[:, :, max(0, key.shape[2] - count) :], value[:, :, max(0, value.shape[2] - count) :]
