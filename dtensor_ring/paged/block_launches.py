"""Many entries that read blocks, computed by a block kernel in one launch or a few.

The blocks are the rows of a batch, and the partial results of an entry's blocks are merged by lse:
the splits of keys in flash-decoding (Dao et al., 2023). So no key is copied, lengths may differ,
and one long sequence keeps a whole GPU busy.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from dtensor_ring.compute.kernels.kernel import Kernel, Launch, Result, Scores
from dtensor_ring.compute.kernels.paged_kernel import Pages
from dtensor_ring.compute.kernels.registry import kernel_for
from dtensor_ring.compute.memory import WHOLE, Numbers, fold_heads, unfold_heads
from dtensor_ring.compute.merge import merge_ragged
from dtensor_ring.planning.ranges import Span
from dtensor_ring.planning.tile import FULL

# Blocks between those that are read are computed, too, unless most of a range is not read: that
# costs less than a copy of the others.
MOST_COMPUTED = 2


@dataclass(frozen=True)
class BlockLaunch:
    """Blocks that equally many entries read, in one launch of a block kernel.

    Attributes:
        blocks: the blocks, as a range of neighbours or by their indices `(P,)`.
        readers: the entries that read each block, `(P, r)`.
    """

    blocks: Span | Numbers
    readers: Numbers

    def attend(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, scores: Scores
    ) -> Result:
        """Return `out` `(P * r, R, N, Hv)` and `lse` `(P * r, R, N)` of each block and reader."""
        keys, values = (self._read(x).transpose(1, 2) for x in (key_blocks, value_blocks))
        (readers,) = self.readers.on(query.device)
        # The rows of a tile are the queries of all readers of a block, and of all heads that share
        # a key head: so a key is read once.
        queries = fold_heads(query[readers].flatten(1, 2).transpose(1, 2), keys.shape[1])
        kernel = block_kernel(queries, values.shape[3], scores)
        found = kernel.forward(queries, keys, values, Launch(WHOLE, WHOLE, FULL), scores)
        out, lse = (unfold_heads(x, query.shape[2]) for x in found)
        rows = readers.numel(), query.shape[1]
        return out.transpose(1, 2).reshape(*rows, *out.shape[1::2]), lse.mT.reshape(*rows, -1)

    def _read(self, x: Tensor) -> Tensor:
        """Return the blocks: without a copy if they are neighbours."""
        if isinstance(self.blocks, Numbers):
            return x[self.blocks.on(x.device)[0]]
        return x[slice(*self.blocks)]


@dataclass(frozen=True)
class BlockLaunches:
    """All blocks that some entries read, each once.

    Attributes:
        parts: the launches.
        numbers: where the results of each entry are among those of all launches, entry by entry;
            the entry of each of these; and the number of blocks of each entry, at least 1.
    """

    parts: tuple[BlockLaunch, ...]
    numbers: Numbers

    def attend(
        self, query: Tensor, key_blocks: Tensor, value_blocks: Tensor, scores: Scores
    ) -> Result:
        """Return `out` `(E, R, N, Hv)` and `lse` `(E, R, N)` of queries `(E, R, N, H)`."""
        found = [x.attend(query, key_blocks, value_blocks, scores) for x in self.parts]
        outs, lses = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*found, strict=True))
        places, entries, counts = self.numbers.on(query.device)
        return merge_ragged(outs[places], lses[places], entries, counts)


def launches_of(pages: Pages) -> BlockLaunches:
    """Return the launches for the blocks that some entries read in full, made once for all layers.

    The time is that of a sort of all pairs of an entry and a block.
    """
    found = _MADE.get(pages)
    if found is None:
        found = _MADE[pages] = _launches(pages.tables, pages.lengths // pages.block)
    return found


# The launches of each table of blocks. The keys are weak, so launches live as long as their plan.
_MADE: WeakKeyDictionary[Pages, BlockLaunches] = WeakKeyDictionary()


def _launches(tables: np.ndarray, counts: np.ndarray) -> BlockLaunches:
    entries = np.repeat(np.arange(len(counts)), counts)
    read = tables[np.arange(tables.shape[1]) < counts[:, None]]
    order = np.argsort(read, kind="stable")
    blocks, firsts, num_readers = np.unique(read[order], return_index=True, return_counts=True)
    # Powers of two, so that few launches serve all: some queries are computed twice.
    widths = 1 << np.ceil(np.log2(num_readers)).astype(int)
    parts, places, num_rows = [], np.empty(len(read), dtype=np.int64), 0
    for width in np.unique(widths):
        some = widths == width
        begin, end = blocks[some].min(), blocks[some].max() + 1
        is_range = end - begin <= MOST_COMPUTED * some.sum()
        at = blocks[some] - begin if is_range else np.arange(some.sum())
        readers = np.zeros((end - begin if is_range else len(at), width), dtype=np.int64)
        numbers = np.minimum(np.arange(width), num_readers[some, None] - 1)
        pairs = order[firsts[some, None] + numbers]
        readers[at] = entries[pairs]
        places[pairs] = num_rows + at[:, None] * width + numbers
        num_rows += readers.size
        where = (int(begin), int(end)) if is_range else _numbers(blocks[some])
        parts.append(BlockLaunch(where, _numbers(readers)))
    return BlockLaunches(tuple(parts), _numbers(places, entries, counts))


def _numbers(*arrays: np.ndarray) -> Numbers:
    return Numbers(torch.int64, *map(torch.from_numpy, arrays))


def block_kernel(query: Tensor, value_head_dim: int, scores: Scores) -> Kernel:
    """Return the best block kernel for tiles of a query `(B, Nkv, R, H)`, one head a key head."""
    facts = query.dtype, query.shape[3], value_head_dim, scores.scale, scores.softcap
    return kernel_for(None, query.device.type, *facts, False, True, False)
