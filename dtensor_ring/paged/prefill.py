"""The next tokens of pooled prompts, sharded over the ranks that keep their keys."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.memory import Numbers
from dtensor_ring.paged.api import PagedCache, check_new_tokens
from dtensor_ring.paged.blocks import PooledSequence
from dtensor_ring.paged.packed_prompts import PackedPrompts
from dtensor_ring.paged.plan import slots_of
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import Span, as_count


class PagedPrefill:
    """A step of a model: the next tokens of prompts, each computed by the rank that keeps it.

    Each layer writes this rank's keys and values, gathers what this rank has of the prompts, and
    attends by one ring for all of them. What several prompts share travels once. Then
    `BlockPool.commit` takes the length of each. A prompt may come in several steps.

    Args:
        cache: the cache of this rank.
        chunks: sequences, whose first `num_written` tokens were committed, and the number of
            tokens after those, of each.

    Attributes:
        positions: the positions of this rank's new tokens in their sequences, `(L,)`, int64,
            sequence by sequence.
        runs: the runs of all new tokens by rank, for `ring_attention`.
        key_runs: the runs of the keys by rank.
        num_columns: the number of keys that `gather` returns.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a sequence is not in the pool, or has fewer tokens.

    >>> pool = BlockPool(num_blocks=4, block=4)
    >>> cache = PagedCache(pool, num_kv_heads=2, head_dim=8, num_layers=1)
    >>> prompt, other = pool.add([5, 6, 7]), pool.add([8, 9])
    >>> step = PagedPrefill(cache, [(prompt, 2), (other, 2)])
    >>> new = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    >>> step.write(0, *new)
    >>> keys, values = step.gather(0, *new)
    >>> pool.commit(prompt, 2)
    >>> step.positions, keys.shape
    (tensor([0, 1, 0, 1]), torch.Size([1, 2, 4, 8]))
    """

    def __init__(self, cache: PagedCache, chunks: Sequence[tuple[PooledSequence, int]]) -> None:
        if not isinstance(cache, PagedCache):
            raise TypeError(f"cache must be a PagedCache, got {cache!r}")
        for sequence, num_tokens in chunks:
            cache.pool.check(sequence)
            as_count("num_tokens", num_tokens, 1, len(sequence) - sequence.num_written)
        self._cache, self._sequences = cache, [sequence for sequence, _ in chunks]
        if not len({x.number for x in self._sequences}) == len(chunks) > 0:
            raise ValueError(
                f"a step has tokens of one sequence or several, each once, got {chunks}"
            )
        self._versions = [sequence.version for sequence in self._sequences]
        dealing, rank = cache.pool.dealing, cache.rank
        positions, slots = [], []
        for sequence, num_tokens in chunks:
            begin = sequence.num_written
            mine, columns = dealing.columns(begin, begin + num_tokens, rank)
            positions.append(mine + begin)
            slots.append(slots_of(cache.pool.block_table(sequence, rank), columns, dealing.block))
        self._slots = Numbers(torch.int64, torch.from_numpy(np.concatenate(slots)))
        self.positions = torch.from_numpy(np.concatenate(positions))
        self._packed = PackedPrompts(chunks, dealing)
        self.runs = torch.from_numpy(self._packed.query_runs)
        self.key_runs = torch.from_numpy(self._packed.key_runs)
        self._mine = [x for x in self._packed.cached if x.rank == rank]
        self.num_columns = sum(x.num_tokens for x in self._mine) + len(self.positions)
        self._slices: dict[Mask, Tensor] = {}

    def slices(self, mask: Mask) -> Tensor:
        """Return what the new tokens see, for `ring_attention`, if each prompt has this mask."""
        if mask not in self._slices:
            self._slices[mask] = torch.from_numpy(self._packed.slices(mask).numbers)
        return self._slices[mask]

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the keys and values of this rank's new tokens in a layer.

        Args:
            layer: the index of the layer.
            key: `(1, Nkv, L, H)`, in the order of `positions`.
            value: `(1, Nkv, L, Hv)`.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if shapes, dtypes or devices do not fit, there is no such layer, or a
                sequence has changed since the step was made.
        """
        self._check_current()
        number = self._cache._number(layer)
        check_new_tokens(self._cache, key, value, 1, len(self.positions))
        keys, values = (x[0].transpose(0, 1) for x in (key, value))
        with torch.inference_mode(False), torch.no_grad():
            self._cache._memory.write(number, self._slots, (keys, values))

    def gather(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's keys `(1, Nkv, C, H)` and values: those of earlier steps, then these.

        Args:
            layer: the index of the layer.
            key: `(1, Nkv, L, H)`, as for `write`.
            value: `(1, Nkv, L, Hv)`.

        Raises:
            TypeError: if `layer` is not an int.
            ValueError: if there is no such layer, or a sequence has changed since the step was
                made.
        """
        self._check_current()
        number = self._cache._number(layer)
        if not self._mine:
            return key, value
        pages = self._cache._memory.read(number, np.array([x.index for x in self._mine]))
        cached = ([x.flatten(0, 1)[slice(*y)] for y in self._spans] for x in pages)
        keys, values = (
            torch.cat([*(x.transpose(0, 1).unsqueeze(0) for x in parts), new], 2)
            for parts, new in zip(cached, (key, value), strict=True)
        )
        return keys, values

    @property
    def _spans(self) -> list[Span]:
        """Return the ranges of tokens that are cached, in pages side by side."""
        block = self._cache.pool.dealing.block
        # A page that is not full ends a range.
        ends = [i + 1 for i, x in enumerate(self._mine) if x.num_tokens < block]
        firsts = [0, *ends, *([len(self._mine)] if ends[-1:] != [len(self._mine)] else [])]
        return [
            (first * block, (end - 1) * block + self._mine[end - 1].num_tokens)
            for first, end in pairwise(firsts)
        ]

    def _check_current(self) -> None:
        for sequence, version in zip(self._sequences, self._versions, strict=True):
            if sequence.version != version:
                raise ValueError(
                    f"sequence {sequence.number} has changed since this step was made; make a new "
                    "one for each step"
                )
