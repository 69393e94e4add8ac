"""Holds a rank's cached keys and values: its own columns, and every window in full."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from dtensor_ring import SequenceAxis, ShardedCache
from dtensor_ring.extension import CacheUsage, Layout, as_layout
from parallel_plans.huggingface.core.layer_inputs import DecodeInputs, LayerInputs
from parallel_plans.huggingface.generation.new_tokens import KeptPair, NewTokens, Pair, WindowCache


class CacheMemory:
    """The keys and values of all layers, for a fixed number of rows.

    Args:
        axis: the axis that shards the tokens.
        sizes: the window of each layer in tokens; 0 if it sees everything.
        kept: the layers that keep keys and values.
        chunks: sizes of the chunks that layers see.
        decode_tokens: the largest number of later tokens that are replicated, not sharded.
        block: number of tokens by which memory grows.
        kv_dtype: the format in which full blocks are kept; `None` to round nothing.
        indexed: the layers that keep keys of an index, too; these are not rounded.
    """

    def __init__(
        self,
        axis: SequenceAxis,
        sizes: Sequence[int],
        kept: Sequence[int],
        chunks: frozenset[int],
        decode_tokens: int,
        block: int,
        kv_dtype: str | None = None,
        indexed: Sequence[int] = (),
    ) -> None:
        self.axis, self.seq_len, self.batch = axis, 0, -1
        self._sizes, self._chunks, self._decode_tokens = sizes, chunks, decode_tokens
        self._layout = _layout_of_runs(axis)
        self._new: NewTokens | None = None
        full = [i for i in kept if not sizes[i]]
        how = len(full), self._layout, block, kv_dtype
        self._shards = ShardedCache(axis.mesh, *how) if full else None
        self._layers = dict(zip(full, self._shards or (), strict=True))
        how = len(indexed), self._layout, block
        self._index = ShardedCache(axis.mesh, *how) if indexed else None
        self._indexes = dict(zip(indexed, self._index or (), strict=True))
        self._sharded = tuple(x for x in (self._shards, self._index) if x is not None)
        self._windows = {i: WindowCache(size, kv_dtype) for i in kept if (size := sizes[i])}

    def usage(self) -> CacheUsage:
        """Return the bytes on each rank. They are computed locally, without a message."""
        window = sum(x.num_bytes for x in self._windows.values())
        usages = [x.usage() for x in self._sharded]
        ranks = range(self.axis.mesh.size())
        held = tuple(window + sum(x.held[rank] for x in usages) for rank in ranks)
        return CacheUsage(held, tuple(window + sum(x.used[rank] for x in usages) for rank in ranks))

    @contextmanager
    def appending(
        self, tokens: Tensor, left_padding: Tensor | None, num_kept: int
    ) -> Iterator[tuple[NewTokens, tuple[LayerInputs, ...]]]:
        """Open a context in which each layer appends new tokens once; an error removes them again.

        Args:
            tokens: token ids or embeddings, `(B, T, ...)`, whole on each rank.
            left_padding: number of padding tokens of each row.
            num_kept: number of last tokens whose logits are requested. All of them but one can be
                cropped later. 0 stands for the tokens of a decode step.

        Raises:
            ValueError: if the number of rows differs from that of the cache.
        """
        rows, num_tokens = tokens.shape[:2]
        if self.batch not in (-1, rows):
            raise ValueError(
                f"a cache of {self.batch} rows got {rows}; cache.reset() forgets what is cached, "
                "or make another ContextParallelCache"
            )
        is_sharded = not self.seq_len or num_tokens > self._decode_tokens
        sharded = self._layout.dealt_length(num_tokens, self.axis.mesh.size()) if is_sharded else 0
        num_kept = num_kept or min(num_tokens, self._decode_tokens)
        length = self.seq_len, num_tokens, sharded
        new = NewTokens(self.axis, self._layout, *length, left_padding, num_kept, self._chunks)
        for cache in self._sharded:
            cache.begin(sharded or num_tokens, dealt=is_sharded)
        self._new = new
        try:
            yield new, self._inputs(new, tokens)
            self._commit(new, rows)
        except BaseException:
            self._take_back(new)
            raise
        finally:
            self._new = None

    def _inputs(self, new: NewTokens, tokens: Tensor) -> tuple[LayerInputs, ...]:
        """Return the inputs of each layer's attention; layers with the same window share them."""
        of_size: dict[int, LayerInputs] = {}
        for window in self._windows.values():
            if window.size not in of_size:
                of_size[window.size] = new.window(window.num_held)
        if self._shards is not None:
            of_size[0] = new.full(self._shards)
        inputs = [of_size[size] for size in self._sizes]
        first = of_size.get(0)
        if isinstance(first, DecodeInputs) and not tokens.is_floating_point():
            # The first layer that sends a message compares the tokens.
            inputs[min(self._layers)] = replace(first, agree=tokens.long())
        return tuple(inputs)

    def _commit(self, new: NewTokens, rows: int) -> None:
        # Compute all windows before any is updated, so that an error leaves all unchanged.
        appended = [window.appended() for window in self._windows.values()]
        # The padding that the layout needs has the last positions.
        if new.sharded_length > new.num_tokens:
            for cache in self._sharded:
                cache.crop(new.end)
        self._hold(appended)
        self.seq_len, self.batch = new.end, rows

    def _take_back(self, new: NewTokens) -> None:
        for cache in self._sharded:
            cache.crop(new.past)
        for window in self._windows.values():
            window.take_back()

    @property
    def is_running(self) -> bool:
        """Whether the model is running on new tokens."""
        return self._new is not None

    def append(self, layer: int, key: Tensor, value: Tensor) -> Pair:
        """Append new tokens of a layer, and return this rank's past and new columns."""
        assert self._new is not None, "outside of a forward"
        if layer in self._windows:
            return self._windows[layer].append(key, value, self._new)
        keys, values = self._layers[layer].append(key, value)
        if keys.shape[2]:
            return keys, values
        # Models that expand latents cannot view an empty tensor; attention ignores this column.
        return torch.zeros_like(key[:, :, :1]), torch.zeros_like(value[:, :, :1])

    def append_index(self, layer: int, keys: Tensor) -> Tensor:
        """Append keys of a layer's index, `(B, L, D)`, and return this rank's past and new ones."""
        heads = keys.unsqueeze(1)
        return self._indexes[layer].append(heads, heads[..., :0])[0].squeeze(1)

    def crop(self, num_tokens: int) -> None:
        """Remove the last tokens.

        Raises:
            ValueError: if a window no longer holds tokens that it would see; nothing changes then.
        """
        for window in self._windows.values():
            window.check_crop(num_tokens, self.seq_len)
        for window in self._windows.values():
            window.crop(num_tokens)
        self.seq_len -= num_tokens
        for cache in self._sharded:
            cache.crop(self.seq_len)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch."""
        selected = [window.selected(rows) for window in self._windows.values()]
        for cache in self._sharded:
            cache.select(rows)
        self._hold(selected)
        self.batch = len(rows)

    def _hold(self, pairs: list[KeptPair | None]) -> None:
        for window, pair in zip(self._windows.values(), pairs, strict=True):
            window.hold(pair)

    def reset(self) -> None:
        """Forget all tokens."""
        for cache in self._sharded:
            cache.reset()
        for window in self._windows.values():
            window.hold(None)
        self.seq_len, self.batch = 0, -1


def _layout_of_runs(axis: SequenceAxis, other: str = "zigzag") -> Layout:
    """Return the axis's layout if it gives ranks runs of tokens for any batch, else `other`."""
    layout, size = axis.layout, axis.mesh.size()
    if layout.per_batch or any(run.stride > 1 for run in layout.runs(0, size, 2 * size)):
        return as_layout(other)
    return layout
