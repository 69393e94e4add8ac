"""The next tokens of one pooled sequence, sharded over the ranks that keep their keys."""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.compute.memory import Numbers
from dtensor_ring.paged.api import PagedCache, check_new_tokens
from dtensor_ring.paged.blocks import PooledSequence
from dtensor_ring.paged.plan import slots_of
from dtensor_ring.planning.ranges import as_count


class PagedPrefill:
    """A step of a model: the next tokens of a sequence, each computed by the rank that keeps it.

    Each layer writes this rank's keys and values, gathers what this rank has of the sequence, and
    attends by the ring. Then `BlockPool.commit` takes `end`. A prompt may come in several steps.

    Args:
        cache: the cache of this rank.
        sequence: the sequence, whose first `num_written` tokens were committed.
        num_tokens: the number of tokens after those.

    Attributes:
        end: the number of tokens of the sequence after this step.
        positions: the positions of this rank's new tokens, `(L,)`, int64.
        runs: the runs of all new tokens by rank, for `ring_attention`.
        key_runs: the runs of the keys by rank, of all tokens before `end`.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if the sequence is not in the pool, or has fewer tokens.

    >>> pool = BlockPool(num_blocks=4, block=4)
    >>> cache = PagedCache(pool, num_kv_heads=2, head_dim=8, num_layers=1)
    >>> prompt = pool.add([5, 6, 7])
    >>> step = PagedPrefill(cache, prompt, num_tokens=2)
    >>> step.write(0, torch.randn(1, 2, 2, 8), torch.randn(1, 2, 2, 8))
    >>> keys, values = step.gather(0)
    >>> pool.commit(prompt, step.end)
    >>> step.positions, keys.shape
    (tensor([0, 1]), torch.Size([1, 2, 2, 8]))
    """

    def __init__(self, cache: PagedCache, sequence: PooledSequence, num_tokens: int) -> None:
        if not isinstance(cache, PagedCache):
            raise TypeError(f"cache must be a PagedCache, got {cache!r}")
        cache.pool.check(sequence)
        begin, dealing = sequence.num_written, cache.pool.dealing
        self.end = begin + as_count("num_tokens", num_tokens, 1, len(sequence) - begin)
        self.sequence, self._cache, self._version = sequence, cache, sequence.version
        mine, columns = dealing.columns(begin, self.end, cache.rank)
        table = cache.pool.block_table(sequence, cache.rank)
        slots = torch.from_numpy(slots_of(table, columns, dealing.block))
        self._slots = Numbers(torch.int64, slots)
        self.positions = torch.from_numpy(mine + begin)
        self.runs = torch.from_numpy(dealing.runs(begin, self.end))
        self.key_runs = torch.from_numpy(dealing.runs(0, self.end))

    @property
    def num_columns(self) -> int:
        """Return the number of keys that this rank has of the tokens before `end`."""
        return self._cache.pool.dealing.num_before(self.end, self._cache.rank)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Write the keys and values of this rank's new tokens in a layer.

        Args:
            layer: the index of the layer.
            key: `(1, Nkv, L, H)`, in the order of `positions`.
            value: `(1, Nkv, L, Hv)`.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if shapes, dtypes or devices do not fit, there is no such layer, or the
                sequence has changed since the step was made.
        """
        self._check_current()
        number = self._cache._number(layer)
        check_new_tokens(self._cache, key, value, 1, len(self.positions))
        keys, values = (x[0].transpose(0, 1) for x in (key, value))
        with torch.inference_mode(False), torch.no_grad():
            self._cache._memory.write(number, self._slots, (keys, values))

    def gather(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return copies of this rank's keys `(1, Nkv, C, H)` and values of the tokens before `end`.

        Raises:
            TypeError: if `layer` is not an int.
            ValueError: if there is no such layer, or the sequence has changed since the step was
                made.
        """
        self._check_current()
        return self._cache.gather(layer, self.sequence, self.end)

    def _check_current(self) -> None:
        if self.sequence.version != self._version:
            raise ValueError(
                f"sequence {self.sequence.number} has changed since this step was made; make a new "
                "one for each step"
            )
