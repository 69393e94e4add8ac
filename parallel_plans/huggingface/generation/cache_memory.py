"""Holds a rank's cached keys and values, and describes a forward with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtensor_ring import SequenceAxis, ShardedCache
from dtensor_ring.extension import (
    CacheUsage,
    KeptTokens,
    Layout,
    append_runs,
    as_layout,
    check_same_state,
    format_named,
    no_tokens,
)
from parallel_plans.huggingface.core.documents import DocumentBounds, cached_documents
from parallel_plans.huggingface.core.layer_inputs import (
    DecodeInputs,
    InputsWithPools,
    LayerInputs,
    ShardedInputs,
    compared,
)
from parallel_plans.huggingface.core.positions import LastTokens
from parallel_plans.huggingface.generation.saved_parts import PADDING, Pair, of_part, windows_of
from parallel_plans.huggingface.states import state_steps


@dataclass(frozen=True)
class NewTokens:
    """New tokens after those of a cache, either sharded over the ranks or replicated.

    Attributes:
        axis: the axis of the cache.
        layout: the layout in which new tokens are sharded.
        past: number of cached tokens.
        num_tokens: number of new tokens, on all ranks together.
        sharded_length: number of new tokens with the padding of the layout; 0 if replicated.
        left_padding: number of padding tokens at the start of each row, `(B,)`.
        num_kept: number of last tokens whose logits are requested; no others can be cropped later.
        chunks: sizes of the chunks that layers see.
    """

    axis: SequenceAxis
    layout: Layout
    past: int
    num_tokens: int
    sharded_length: int
    left_padding: Tensor | None
    num_kept: int
    chunks: frozenset[int]

    @property
    def end(self) -> int:
        """The number of cached tokens after this forward."""
        return self.past + self.num_tokens

    def documents(self, begin: int) -> DocumentBounds:
        """Return the documents of the positions from `begin` on, counted from there."""
        if self.left_padding is None and not begin and self.sharded_length <= self.num_tokens:
            return DocumentBounds()
        return cached_documents(self.left_padding, begin, self.end, self.chunks)

    def full(self, cache: ShardedCache, tokens: Tensor, rank: int) -> InputsWithPools:
        """Return how layers attend that see everything, which `cache` has.

        Ranks compare the new tokens if they are ids.
        """
        documents, axis = self.documents(0), self.axis
        if self.sharded_length:
            return ShardedInputs(axis, None, documents, cache.query_runs, cache.key_runs)
        # The plan of another model may have annotated the mesh with another kernel since.
        kernel, runs, cols = axis.kernel, cache.key_runs, cache.table.num_local[rank]
        return DecodeInputs(documents, runs, cols, axis.mesh, compared(tokens), kernel=kernel)

    def window(self, num_held: int) -> LayerInputs:
        """Return how layers attend that hold the last tokens of the cache on each rank.

        Args:
            num_held: number of tokens that they hold.
        """
        begin = self.past - num_held
        if not self.sharded_length:
            columns, kernel = num_held + self.num_tokens, self.axis.kernel
            # Positions count from the first held token: tokens of a full window make equal calls.
            key_runs = torch.tensor([[[0, columns]]], device="cpu")
            counts_rows = self.left_padding is not None or bool(self.chunks)
            documents = self.documents(begin) if counts_rows else DocumentBounds()
            return DecodeInputs(documents, key_runs, columns, None, begin=begin, kernel=kernel)
        # Each rank contributes a slice of the held tokens. Positions count from the first of these.
        size = self.axis.mesh.size()
        runs = torch.tensor(append_runs(self.layout, self.sharded_length, size))
        runs[..., 0] += num_held * (runs[..., 1] > 0)  # empty runs stay at 0
        held = [window_slice(rank, size, num_held) for rank in range(size)]
        slices = torch.tensor([[[first, last - first]] for first, last in held], dtype=runs.dtype)
        key_runs = torch.cat([slices, runs], 1)
        return ShardedInputs(self.axis, None, self.documents(begin), runs, key_runs, begin)


def window_slice(rank: int, world_size: int, num_held: int) -> tuple[int, int]:
    """Return begin and end of a rank's slice of tokens that all ranks hold."""
    return rank * num_held // world_size, (rank + 1) * num_held // world_size


KeptPair = tuple[KeptTokens, KeptTokens]


class WindowCache:
    """Holds the tokens in a layer's window of `size` tokens that the next token still sees.

    Every rank holds them, so a decode step needs no message. After a sharded forward, each rank
    receives the last tokens from their owners once.

    With a format, full blocks of positions are held in eight bits, so a rank holds up to a block
    more. New tokens of a sharded forward see each other as they are, and what is held rounded.

    Args:
        size: number of tokens that a token sees, itself included.
        kv_dtype: the format of full blocks; `None` to round nothing.
    """

    def __init__(self, size: int, kv_dtype: str | None = None) -> None:
        self.size, self._format = size, format_named(kv_dtype)
        self._held: KeptPair | None = None
        self._next: Callable[[], KeptPair] | None = None

    @property
    def num_held(self) -> int:
        """The number of tokens held for each row."""
        return 0 if self._held is None else self._held[0].num_tokens

    @property
    def num_bytes(self) -> int:
        """The bytes that the held tokens take on each rank."""
        return sum(x.num_bytes for x in self._held or ())

    def append(self, key: Tensor, value: Tensor, new: NewTokens) -> Pair:
        """Append new tokens, and return this rank's columns of held and new tokens."""
        # Keep one more token for each that may be cropped: earlier windows still need it.
        first = max(0, new.end - (self.size - 1 + max(0, new.num_kept - 1)))
        held = self._held or self._nothing((key, value))
        first -= first % held[0].block_size
        if not new.sharded_length:
            whole = _append(held, (key, value))
            self._next = lambda: _from(whole, first, new.end)
            return _read(whole)
        axis = new.axis
        count = min(new.end - first, new.num_tokens)
        last = LastTokens.of(axis, new.layout, new.num_tokens, new.sharded_length, count)
        own = last.local_indices(key.device)
        columns = torch.cat([key.index_select(2, own), value.index_select(2, own)], -1)
        dims = key.shape[3], value.shape[3]

        def joined() -> KeptPair:
            new_key, new_value = last.join(columns, 2).split(dims, -1)
            before = held if first < new.past else self._nothing((key, value))
            return _from(_append(before, (new_key, new_value)), first, new.end)

        self._next = joined
        begin, end = window_slice(axis.mesh.get_local_rank(), axis.mesh.size(), self.num_held)
        pairs = zip(_read(held), (key, value), strict=True)
        keys, values = (torch.cat([x[:, :, begin:end], y], 2) for x, y in pairs)
        return keys, values

    def _nothing(self, like: Pair) -> KeptPair:
        return (
            no_tokens(like[0], self._format, "keys"),
            no_tokens(like[1], self._format, "values"),
        )

    def appended(self) -> KeptPair | None:
        """Return what is held after the forward. All ranks must call layers in the same order."""
        return self._held if self._next is None else self._next()

    def read(self) -> Pair | None:
        """Return the keys and values that are held, if any."""
        return None if self._held is None else _read(self._held)

    def load(self, pair: Pair) -> None:
        """Hold these keys and values, which `read` returned of a cache with the same format."""
        self.hold(_append(self._nothing(pair), pair))

    def selected(self, rows: Tensor) -> KeptPair | None:
        """Return what is held of these rows of the batch."""
        if self._held is None:
            return None
        return self._held[0].select(rows), self._held[1].select(rows)

    def hold(self, pair: KeptPair | None) -> None:
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
                f"the last {self.num_held} tokens only; at most one fewer can be taken away than "
                "the last call returned logits of"
            )

    def crop(self, num_tokens: int) -> None:
        """Remove the last tokens."""
        if self._held is not None:
            left = max(0, self.num_held - num_tokens)
            self._held = self._held[0].crop(left), self._held[1].crop(left)


def _append(before: KeptPair, after: Pair) -> KeptPair:
    return before[0].append(after[0]), before[1].append(after[1])


def _read(pair: KeptPair) -> Pair:
    return pair[0].read(), pair[1].read()


def _from(pair: KeptPair, first: int, end: int) -> KeptPair:
    """Return the tokens from position `first` on, or all; the last one is at `end - 1`."""
    num_dropped = max(0, first - (end - pair[0].num_tokens))
    return pair[0].drop(num_dropped), pair[1].drop(num_dropped)


NO_FORWARD = (
    "a ContextParallelCache got keys and values from a model that is not under its plan: the model "
    "is under no plan any more (restore_model, stock_model), or it is another one. cache.whole() "
    "returns a DynamicCache for the stock model"
)


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
        self.left_padding: Tensor | None = None  # of each row
        self._kv_dtype = kv_dtype
        self._sizes, self._chunks, self._decode_tokens = sizes, chunks, decode_tokens
        self._layout = _layout_of_runs(axis)
        self._new: NewTokens | None = None
        full = [i for i in kept if not sizes[i]]
        mesh, layout = axis.mesh, self._layout
        self._rank = mesh.get_local_rank()
        self._shards = ShardedCache(mesh, len(full), layout, block, kv_dtype) if full else None
        self._layers = dict(zip(full, self._shards or (), strict=True))
        self._index = ShardedCache(mesh, len(indexed), layout, block) if indexed else None
        self._indexes = dict(zip(indexed, self._index or (), strict=True))
        self._sharded = tuple(x for x in (self._shards, self._index) if x is not None)
        self._windows = {i: WindowCache(size, kv_dtype) for i in kept if (size := sizes[i])}
        self.states: state_steps.LayerStates = {}

    def usage(self) -> CacheUsage:
        """Return the bytes on each rank. They are computed locally, without a message."""
        window = sum(x.num_bytes for x in self._windows.values())
        window += sum(x.nbytes for layer in self.states.values() for x in layer.values())
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
            of_size[0] = new.full(self._shards, tokens, self._rank)
        # Layers with a state alone have no attention, and need no inputs.
        inputs: Iterator[Any] = map(of_size.get, self._sizes)
        return tuple(inputs)

    def inputs_of_pools(self, new: NewTokens, tokens: Tensor) -> InputsWithPools | None:
        """Return which tokens ranks keep of layers with a window, that these see as pools."""
        if self._index is None or not self._windows.keys() & self._indexes.keys():
            return None
        return new.full(self._index, tokens, self._rank)

    def _commit(self, new: NewTokens, rows: int) -> None:
        # Compute all windows before any is updated, so that an error leaves all unchanged.
        appended = [window.appended() for window in self._windows.values()]
        # The padding that the layout needs has the last positions.
        if new.sharded_length > new.num_tokens:
            for cache in self._sharded:
                cache.crop(new.end)
        self._hold(appended)
        self.seq_len, self.batch, self.left_padding = new.end, rows, new.left_padding

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
        if self._new is None:
            raise ValueError(NO_FORWARD)
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

    def whole(self, layer: int) -> tuple[Pair | None, Tensor | None]:
        """Return keys and values of a layer on all ranks, and keys of its index `(B, S, D)`.

        A layer with a window has the tokens that it holds. `None` stands for nothing.
        """
        if not self.seq_len:
            return None, None
        if layer in self._windows and layer in self._indexes:
            raise ValueError(
                "a cache of layers that see pools of tokens keeps what these are made of, and the "
                "stock cache what was made; go on with cache.state_dict()"
            )
        if layer in self._windows:
            return self._windows[layer].read(), None
        assert self._shards is not None
        pair = self._shards.whole(self._layers[layer].number)
        if self._index is None or layer not in self._indexes:
            return pair, None
        return pair, self._index.whole(self._indexes[layer].number)[0].squeeze(1)

    def state_dict(self) -> dict[str, Any]:
        """Return the content of all layers, whole on every rank, on the CPU."""
        state: dict[str, Any] = {"seq_len": self.seq_len, "batch": self.batch}
        state["kv_dtype"] = str(self._kv_dtype)
        for name, cache in self._parts().items():
            state |= {f"{name}.{key}": x for key, x in cache.state_dict().items()}
        for number, window in self._windows.items():
            names = f"window.{number}.keys", f"window.{number}.values"
            state |= {x: y.cpu() for x, y in zip(names, window.read() or (), strict=False)}
        state |= {} if self.left_padding is None else {PADDING: self.left_padding.cpu()}
        return state | {f"state.{x}": y for x, y in state_steps.named(self.states).items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace everything by the state of a cache of the same model.

        Raises:
            ValueError: on every rank, if their states differ, or it is of another model or format.
        """
        mesh = self.axis.mesh
        check_same_state(state, mesh)
        if state.get("kv_dtype") != str(self._kv_dtype):
            raise ValueError(
                f"the state has cache_dtype {state.get('kv_dtype')}, and the plan of this model "
                f"has {self._kv_dtype}; apply the plan with the cache_dtype of the state"
            )
        # Read, and so checked, before the first change: a wrong state leaves the cache as it was.
        pairs = windows_of(state, self._windows)
        for name, cache in self._parts().items():
            cache.load_state_dict(of_part(state, name))
        for window, pair in zip(self._windows.values(), pairs, strict=True):
            window.hold(None)
            if pair is not None:
                window.load((pair[0].to(mesh.device_type), pair[1].to(mesh.device_type)))
        self.states = state_steps.unnamed(of_part(state, "state"), mesh.device_type)
        self.seq_len, self.batch = state["seq_len"], state["batch"]
        self.left_padding = state.get(PADDING)

    def _parts(self) -> dict[str, ShardedCache]:
        """Return the sharded caches by name."""
        parts = {"full": self._shards, "index": self._index}
        return {name: x for name, x in parts.items() if x is not None}

    def crop(self, num_tokens: int) -> None:
        """Remove the last tokens.

        Raises:
            ValueError: if a window no longer holds tokens that it would see; nothing changes then.
        """
        if self.states and 0 < num_tokens < self.seq_len:
            raise ValueError(f"cannot take {num_tokens} tokens away from the states of layers")
        # All windows are asked before one is cropped, so that an error leaves the cache as it was.
        for window in self._windows.values():
            window.check_crop(num_tokens, self.seq_len)
        for window in self._windows.values():
            window.crop(num_tokens)
        self.seq_len -= num_tokens
        self.states = self.states if self.seq_len else {}
        for cache in self._sharded:
            cache.crop(self.seq_len)

    def select(self, rows: Tensor) -> None:
        """Keep only these rows of the batch."""
        selected = [window.selected(rows) for window in self._windows.values()]
        for cache in self._sharded:
            cache.select(rows)
        self._hold(selected)
        self.states = state_steps.rows_of(self.states, rows)
        if self.left_padding is not None:
            self.left_padding = self.left_padding[rows.cpu()]
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
        self.seq_len, self.batch, self.states, self.left_padding = 0, -1, {}, None


def _layout_of_runs(axis: SequenceAxis, other: str = "zigzag") -> Layout:
    """Return the axis's layout if it gives ranks runs of tokens for any batch, else `other`."""
    layout, size = axis.layout, axis.mesh.size()
    if layout.per_batch or any(run.stride > 1 for run in layout.runs(0, size, 2 * size)):
        return as_layout(other)
    return layout
