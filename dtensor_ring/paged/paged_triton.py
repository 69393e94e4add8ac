"""Attention of a few queries to keys in blocks on GPUs: flash-decoding that reads block tables.

A program attends to a range of an entry's keys with all queries that share a key head, so a key is
read once from memory, where it lies (Dao et al., 2023, "Flash-Decoding for long-context
inference"). If the keys of an entry are split, a second launch merges the partial results by lse.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from dtensor_ring.compute.kernels.kernel import Pages, Result, Scores

# The fewest keys of a split. Fewer do not pay for a program and for merging its result.
LEAST_KEYS = 256

# Programs that a multiprocessor holds at once: one computes while the other waits for memory.
PROGRAMS_AT_ONCE = 2

# Splits may take so much longer than the best number of them, if they are fewer.
NEARLY_BEST = 1.1


@lru_cache(maxsize=256)
def num_splits(num_keys: int, longest: int, heads: int, multiprocessors: int) -> int:
    """Return into how many ranges the keys of the longest entry are split.

    A GPU runs programs in waves, and the time of a program grows with its keys. More splits fill
    the last wave better, but merging them takes time. So this returns the fewest splits whose time
    is nearly the best.

    >>> num_splits(16 * 8192, 8192, 8, 132), num_splits(8192, 8192, 8, 132)
    (2, 30)

    Args:
        num_keys: keys of all entries.
        longest: keys of the longest entry.
        heads: programs that read the same keys: key heads, times tiles of queries.
        multiprocessors: of the GPU.
    """
    at_once = PROGRAMS_AT_ONCE * multiprocessors
    splits = np.arange(1, max(1, min(longest // LEAST_KEYS, at_once)) + 1)
    keys = -(-longest // splits)
    waves = -(-heads * -(-num_keys // keys) // at_once)
    times = waves * keys
    return int(splits[np.argmax(times <= NEARLY_BEST * times.min())])


# Numbers of the keys of one step of a program, and of its values. Two steps are in shared memory,
# 64 KiB: an A100 has room for two programs, an MI300 for one. Products of float32 are not those of
# tensor cores, and need registers.
STEP_NUMBERS, STEP_NUMBERS_OF_FLOAT32 = 8192, 2048
MOST_KEYS = 128

# The most rows of a program. With more rows, or results of more than half the numbers of a step,
# registers are spilled.
MOST_ROWS = 32

# The fewest rows or keys that `tl.dot` takes.
FEWEST = 16


@lru_cache(maxsize=256)
def constants_of(
    num_queries: int,
    group: int,
    head_dim: int,
    value_dim: int,
    block: int,
    itemsize: int,
    unit: int,
    softcap: float,
) -> dict[str, Any]:
    """Return the constants of the first launch: sizes, and the tile of a program.

    Args:
        num_queries: queries of an entry.
        group: query heads that share a key head.
        head_dim: head dim of query and key.
        value_dim: head dim of value and output.
        block: keys of a block.
        itemsize: bytes of a number.
        unit: numbers that all strides of the query are multiples of.
        softcap: bound of the scores.
    """
    dims, value_dims = (max(FEWEST, triton.next_power_of_2(x)) for x in (head_dim, value_dim))
    numbers = STEP_NUMBERS if itemsize == 2 else STEP_NUMBERS_OF_FLOAT32
    widest = max(dims, value_dims)
    rows = min(triton.next_power_of_2(num_queries * group), MOST_ROWS, numbers // 2 // widest)
    keys = min(MOST_KEYS, numbers // widest)
    return {
        **{"HEAD_DIM": head_dim, "VALUE_DIM": value_dim, "BLOCK": block, "GROUP": group},
        **{"ROWS": max(FEWEST, rows), "KEYS": max(FEWEST, keys)},
        **{"DIMS": dims, "VALUE_DIMS": value_dims, "UNIT": unit, "SOFTCAP": float(softcap)},
        "num_stages": 3,  # while two steps are loaded, one is computed
    }


# Splits that are merged at once.
MERGED_AT_ONCE = 16

# The most numbers of a query that a thread loads at once: 16 bytes of 16-bit dtypes.
MAX_UNIT = 8

# Numbers of a partial result beside its values: the lse, padded to 16 bytes, so rows are aligned.
LSE_NUMBERS = 4


def attend(
    query: Tensor,
    key_blocks: Tensor,
    value_blocks: Tensor,
    pages: Pages,
    scores: Scores,
    splits: int | None = None,
) -> Result:
    """Implement `PagedKernel.forward`; `splits` are chosen unless they are given, as for tests."""
    num_entries, num_queries, num_heads, head_dim = query.shape
    kv_heads, value_dim = value_blocks.shape[2:]
    group, (query_stride, row_stride, head_stride, _) = num_heads // kv_heads, query.stride()
    unit = gcd(MAX_UNIT, head_dim, query_stride, row_stride, head_stride)
    constants = constants_of(
        num_queries, group, head_dim, value_dim, pages.block, query.itemsize, unit, scores.softcap
    )
    programs = kv_heads * -(-num_queries * group // constants["ROWS"])
    if splits is None:
        gpu = torch.cuda.get_device_properties(query.device)
        num_units = gpu.multi_processor_count
        splits = num_splits(pages.num_keys, pages.longest, programs, num_units)
    split_keys, splits = _whole_steps(pages.longest, splits, constants["KEYS"])
    out = query.new_empty(num_entries, num_queries, num_heads, value_dim)
    lse = query.new_empty(num_entries, num_heads, num_queries, dtype=torch.float32)
    num_results = num_entries * num_queries * num_heads
    partial_dim = 0 if splits == 1 else value_dim + LSE_NUMBERS
    into = out, lse
    if partial_dim:
        partial = query.new_empty(num_results, splits, partial_dim, dtype=torch.float32)
        into = partial, partial
    tables, lengths = pages.on(query.device)
    given: tuple[Any, ...] = (
        *(query, key_blocks, value_blocks, tables, lengths, *into, float(scores.scale)),
        *(query_stride // unit, row_stride // unit, head_stride // unit),
        *(tables.shape[1], num_queries, kv_heads),
        *(splits, split_keys),
    )
    # Triton's own default, which it warns about where it is not given.
    how: dict[str, Any] = {"PARTIAL_DIM": partial_dim, "enable_fp_fusion": True}
    with torch.cuda.device_of(query):
        _attend[(programs * splits * num_entries,)](*given, **constants, **how)
        if partial_dim:
            how |= {x: constants[x] for x in ("VALUE_DIM", "VALUE_DIMS")}
            how["SPLITS"] = MERGED_AT_ONCE
            _merge[(num_results,)](
                into[0], lengths, out, lse, num_queries, num_heads, splits, split_keys, **how
            )
    return out, lse


def _whole_steps(longest: int, splits: int, keys: int) -> tuple[int, int]:
    """Return the keys of a split, whole steps, and how many splits that makes."""
    # Rounded up to whole steps, which may leave fewer splits than were asked for.
    split_keys = -(-longest // (splits * keys)) * keys
    return split_keys, -(-longest // split_keys)


@triton.jit(
    do_not_specialize=[
        *("query_stride", "row_stride", "head_stride", "num_pages"),
        *("num_queries", "kv_heads", "num_splits", "split_keys"),
    ]
)
def _attend(
    query,
    key_blocks,
    value_blocks,
    tables,
    lengths,
    out,
    lse,
    scale,
    query_stride,
    row_stride,
    head_stride,
    num_pages,
    num_queries,
    kv_heads,
    num_splits,
    split_keys,
    SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    UNIT: tl.constexpr,
    PARTIAL_DIM: tl.constexpr,
):
    """Attend to a range of the keys of one entry and key head with a tile of its queries.

    Rows are queries and the heads that share a key head. If the keys are split, `out` and `lse` are
    the same memory, which has the partial results of all splits.
    """
    head, tile, split, entry = _place(kv_heads, tl.cdiv(num_queries * GROUP, ROWS), num_splits)
    first, length = split * split_keys, tl.load(lengths + entry)
    if first >= length:
        return
    row, dims = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, DIMS)[None, :]
    number, heads, is_row = row // GROUP, head * GROUP + row % GROUP, row < num_queries * GROUP
    at = entry * query_stride + number.to(tl.int64) * row_stride + heads.to(tl.int64) * head_stride
    is_there = is_row[:, None] & (dims < HEAD_DIM)
    # Strides are in units, so the compiler knows how rows are aligned.
    queries = tl.load(query + at[:, None] * UNIT + dims, mask=is_there, other=0.0)
    sums, row_lse = _attended(
        *(queries, key_blocks, value_blocks, tables + entry * num_pages, kv_heads, head),
        *(first, tl.minimum(first + split_keys, length), scale, SOFTCAP),
        *(BLOCK, HEAD_DIM, VALUE_DIM, ROWS, KEYS, DIMS, VALUE_DIMS),
    )
    num_heads = kv_heads * GROUP
    at = (entry * num_queries + number) * num_heads + heads
    if PARTIAL_DIM == 0:
        at *= VALUE_DIM
        at_lse = (entry * num_heads + heads) * num_queries + number
    else:
        at = (at * num_splits + split) * PARTIAL_DIM
        at_lse = at + VALUE_DIM
    dims = tl.arange(0, VALUE_DIMS)[None, :]
    is_there = is_row[:, None] & (dims < VALUE_DIM)
    tl.store(out + at[:, None] + dims, sums.to(out.dtype.element_ty), mask=is_there)
    tl.store(lse + at_lse, row_lse, mask=is_row)


@triton.jit
def _place(kv_heads, num_tiles, num_splits):
    """Return key head, tile of rows, split and entry of a program."""
    # Neighbours are heads of the same keys, whose memory is next to each other.
    program = tl.program_id(0)
    rest = program // kv_heads
    tile, split, entry = rest % num_tiles, rest // num_tiles % num_splits, rest // num_tiles
    # 64 bits: offsets exceed 2**31.
    return program % kv_heads, tile, split, (entry // num_splits).to(tl.int64)


@triton.jit
def _attended(
    queries,
    key_blocks,
    value_blocks,
    table,
    kv_heads,
    head,
    first,
    end,
    scale,
    SOFTCAP: tl.constexpr,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
):
    """Return output and lse of queries over the keys from `first` to `end`."""
    dims, value_dims = tl.arange(0, DIMS)[None, :], tl.arange(0, VALUE_DIMS)[None, :]
    # Online softmax: what was summed so far is rescaled when a larger score comes
    # (Milakov and Gimelshein, 2018, arXiv 1805.02867).
    largest = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, VALUE_DIMS), tl.float32)
    blocks = _blocks(table, first, end, BLOCK, KEYS)
    for start in range(first, end, KEYS):
        positions = start + tl.arange(0, KEYS)
        slots = blocks.to(tl.int64) * BLOCK + positions % BLOCK
        at, is_key = (slots * kv_heads + head)[:, None], positions < end
        # One step ahead, so that no load waits for another.
        blocks = _blocks(table, start + KEYS, end, BLOCK, KEYS)
        is_there = is_key[:, None] & (dims < HEAD_DIM)
        keys = tl.load(key_blocks + at * HEAD_DIM + dims, mask=is_there, other=0.0)
        scored = _scored(tl.dot(queries, keys.T, input_precision="ieee"), scale, SOFTCAP)
        # The end of a block may hold anything.
        scored = tl.where(is_key[None, :], scored, -float("inf"))
        new, base = _base(largest, tl.max(scored, 1))
        weights, kept = tl.exp2(scored - base[:, None]), tl.exp2(largest - base)
        is_there = is_key[:, None] & (value_dims < VALUE_DIM)
        values = tl.load(value_blocks + at * VALUE_DIM + value_dims, mask=is_there, other=0.0)
        sums *= kept[:, None]
        sums = tl.dot(weights.to(values.dtype), values, sums, input_precision="ieee")
        total, largest = total * kept + tl.sum(weights, 1), new
    return _divided(sums, total[:, None]), (largest + tl.log2(total)) * 0.6931471805599453


@triton.jit
def _base(largest, other):
    """Return the larger of two scores, and what to subtract: -inf - -inf would be NaN."""
    new = tl.maximum(largest, other)
    return new, tl.where(new == -float("inf"), 0.0, new)


@triton.jit
def _divided(sums, total):
    """Return means, which are 0 where all weights are."""
    return sums / tl.where(total == 0, 1.0, total)


@triton.jit
def _blocks(table, start, end, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """Return the block of each key of a step, or the one that has them all."""
    if BLOCK % KEYS == 0:
        blocks = tl.load(table + start // BLOCK, mask=start < end, other=0)
    else:
        positions = start + tl.arange(0, KEYS)
        blocks = tl.load(table + positions // BLOCK, mask=positions < end, other=0)
    return blocks


@triton.jit
def _scored(products, scale, SOFTCAP: tl.constexpr):
    """Return scores times log2(e), so that powers of 2 are those of e."""
    # pyrefly: ignore[bad-assignment]
    log2_e: tl.constexpr = 1.4426950408889634
    if SOFTCAP == 0.0:
        scored = products * (scale * log2_e)
    else:
        # tanh(x) = 1 - 2 / (exp(2 * x) + 1), where an infinite power is right, too.
        doubled = tl.exp2(products * (scale * (2.0 * log2_e / SOFTCAP)))
        scored = (1.0 - 2.0 / (doubled + 1.0)) * (SOFTCAP * log2_e)
    return scored


@triton.jit(do_not_specialize=["num_queries", "num_heads", "num_splits", "split_keys"])
def _merge(
    partial,
    lengths,
    out,
    lse,
    num_queries,
    num_heads,
    num_splits,
    split_keys,
    VALUE_DIM: tl.constexpr,
    PARTIAL_DIM: tl.constexpr,
    VALUE_DIMS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Merge the splits of one query and head."""
    row = tl.program_id(0).to(tl.int64)
    head, rest = row % num_heads, row // num_heads
    number, entry = rest % num_queries, rest // num_queries
    # A short entry has fewer splits than the longest; programs of the others wrote nothing.
    num_mine = tl.cdiv(tl.load(lengths + entry), split_keys)
    dims = tl.arange(0, VALUE_DIMS)
    largest = tl.full((1,), -float("inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    sums = tl.zeros((VALUE_DIMS,), tl.float32)
    for start in range(0, num_mine, SPLITS):
        splits = start + tl.arange(0, SPLITS)
        at, is_split = (row * num_splits + splits) * PARTIAL_DIM, splits < num_mine
        found = tl.load(partial + at + VALUE_DIM, mask=is_split, other=-float("inf"))
        is_there = is_split[:, None] & (dims < VALUE_DIM)[None, :]
        values = tl.load(partial + at[:, None] + dims[None, :], mask=is_there, other=0.0)
        # Sums so far were scaled by the largest lse until now; a larger one rescales them.
        new, base = _base(largest, tl.max(found, 0))
        weights, kept = tl.exp(found - base), tl.exp(largest - base)
        sums = sums * kept + tl.sum(values * weights[:, None], 0)
        total, largest = total * kept + tl.sum(weights, 0), new
    sums = _divided(sums, total).to(out.dtype.element_ty)
    tl.store(out + row * VALUE_DIM + dims, sums, mask=dims < VALUE_DIM)
    at = (entry * num_heads + head) * num_queries + number
    tl.store(lse + at + tl.arange(0, 1), largest + tl.log(total))
