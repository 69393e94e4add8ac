"""PyTorch's flash attention for CPUs."""

from __future__ import annotations

from functools import partial
from math import ceil, isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.emulated import (
    Bias,
    col_blocks,
    fold_heads,
    row_blocks,
    unfold_heads,
)
from dtensor_ring.compute.kernels.kernel import (
    Gradients,
    Kernel,
    Launch,
    Problem,
    Result,
    Saved,
    Scores,
)
from dtensor_ring.compute.kernels.padded import padded_attend, padded_backward
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.memory import TOKEN_MAJOR, WHOLE, empty, order_of
from dtensor_ring.compute.merge import merge_
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.tile import CAUSAL, FULL

# Overloads: PyTorch would look for the one that fits at each call of the op.
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class BlockSizes(NamedTuple):
    """Sizes for cutting bands and causal squares; smaller cuts score fewer hidden pairs.

    Attributes:
        rows: queries of a launch in forward.
        cols: keys of a launch in backward.
        whole: the largest square, in rows, that is one launch; up to these rows keys are not
            copied, either.
        large: the smallest causal square, in rows, that forward cuts into halves.
        huge: the smallest causal square, in rows, that is one launch in forward again, because few
            of its scored pairs are hidden.
        is_padded: whether aten gets padded tensors, see Note [Aligned products].
    """

    rows: int
    cols: int
    whole: int
    large: int
    huge: int
    is_padded: bool = False


COARSE, FINE = BlockSizes(192, 192, 256, 768, 768), BlockSizes(64, 128, 192, 2048, 16384)

# More rows than any causal square has.
NEVER = 1 << 60

# The smallest number of heads per thread for which small launches keep all threads busy.
FINE_FROM = 5

# The smallest causal square, in rows, that is one launch in backward.
LARGE_BACKWARD = 4096

# The largest number of rows for which the heads of a group are folded into rows of one head. Then
# keys are read once for the group: ten times as fast for one row of bfloat16 and 4 heads.
FEW_ROWS = 64

# Rows that the kernel processes at a time.
ALIGNED = 64

Tensors = tuple[Tensor, ...]


class CpuFlash(Kernel):
    """`aten._scaled_dot_product_flash_attention_for_cpu`, which needs equal head dims.

    The operator has no windows, and in a causal square it scores about 400 hidden keys for each
    query. So forward computes windows and small squares by blocks of rows, which need no merge.
    Backward computes windows by blocks of columns, so only gradients of queries are summed. Forward
    cuts larger squares into halves. Backward cuts all squares into halves, which needs no bias.
    """

    name = "cpu_flash"
    bitwise_by_block = True

    def missing(self) -> str | None:
        return None

    def supports(self, problem: Problem) -> str | None:
        if problem.device_type != "cpu":
            return f"it runs on a CPU, the tensors are on {problem.device_type}"
        if problem.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return f"it takes float64, float32, bfloat16 and float16, not {problem.dtype}"
        if problem.head_dim != problem.value_head_dim:
            return (
                "it needs one head dim for query, key and value, "
                f"got {problem.head_dim} and {problem.value_head_dim}"
            )
        if problem.scale <= 0:
            return f"it needs a positive scale, got {problem.scale}"
        if problem.differentiable_lse:
            return "it has no gradient of lse"
        return "it has no softcap" if problem.softcap else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        mask, scale = _constant(launch.mask), scores.scale
        _, num_heads, num_rows, _ = q.shape
        is_few = num_rows <= FEW_ROWS and num_heads > k.shape[1]
        if is_few and mask is FULL and not launch.by_block:
            return _attend_folded((q, k, v), scale)
        sizes = _sizes(q, launch.by_block)
        if num_rows > sizes.whole:
            k, v = _by_head(k), _by_head(v)
        # Cutting saves hidden pairs, but each launch has a fixed cost.
        if _in_one(mask, q, sizes.whole, sizes.huge):
            return _attend_whole((q, k, v), scale, mask is CAUSAL, sizes)
        out = empty(q, q.shape, order_of(q))
        wide = torch.promote_types(q.dtype, torch.float32)
        lse = empty(q, q.shape[:3], TOKEN_MAJOR[:-1], wide)  # as aten's are
        if mask is CAUSAL:
            _attend_square((q, k, v), scale, (out, lse), sizes)
        else:
            _attend_band((q, k, v), scale, (out, lse), sizes, mask)
        return out, lse

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        mask, scale, sizes = _constant(launch.mask), scores.scale, _sizes(q, launch.by_block)
        if q.shape[2] > sizes.whole:
            k, v = _by_head(k), _by_head(v)
        by_row, by_col = (saved.grad_out, q, saved.out, saved.lse), (k, v)
        if _in_one(mask, q, sizes.whole, LARGE_BACKWARD):
            return _backward(by_row, by_col, scale, sizes, is_causal=mask is CAUSAL)
        # Many blocks add to the query's gradient, so it is wide until all have been added.
        grad_query = empty(q, q.shape, TOKEN_MAJOR, saved.lse.dtype)
        grads = grad_query, *(empty(x, x.shape, TOKEN_MAJOR) for x in (k, v))
        if mask is CAUSAL:
            _backward_square(by_row, by_col, scale, grads, sizes)
        else:
            _backward_band(by_row, by_col, scale, grads, sizes, mask)
        return grad_query.to(q.dtype), grads[1], grads[2]


def _attend(
    inputs: Tensors,
    scale: float,
    sizes: BlockSizes,
    is_causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of query, key and value."""
    if sizes.is_padded:
        return padded_attend(partial(FORWARD, scale=scale), inputs, is_causal, bias)
    query, key, value = inputs
    return FORWARD(query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale)


def _attend_whole(
    inputs: Tensors, scale: float, is_causal: bool, sizes: BlockSizes
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of a full tile or a causal square, from one call."""
    results = _attend(inputs, scale, sizes, is_causal)
    _correct(inputs, scale, results, CAUSAL if is_causal else FULL, sizes.is_padded)
    return results


def _attend_folded(inputs: Tensors, scale: float) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` of a full tile, with the heads of a group folded into rows."""
    query, key, value = inputs
    folded = fold_heads(query, key.shape[1])
    out, lse = _attend_whole((folded, key, value), scale, False, _sizes(query))
    return unfold_heads(out, query.shape[1]), unfold_heads(lse, query.shape[1])


def _attend_square(inputs: Tensors, scale: float, results: Tensors, sizes: BlockSizes) -> None:
    """Write the results of a causal square: those of its halves, then merge the full tile."""
    num_rows = inputs[0].shape[2]
    if num_rows < sizes.large:
        _attend_band(inputs, scale, results, sizes, CAUSAL)
        return
    # Two squares on the diagonal; the tile above them is hidden and never scored.
    first, second = _halves(num_rows)
    for half in (first, second):
        _attend_square(_tokens(inputs, half), scale, _tokens(results, half), sizes)
    # The second half also sees all of the first: merge this full tile with its own square.
    seen = *_tokens(inputs[:1], second), *_tokens(inputs[1:], first)
    block_out, block_lse = _attend_whole(seen, scale, False, sizes)
    out, lse = _tokens(results, second)
    merge_(out, lse, block_out, block_lse)


def _attend_band(
    inputs: Tensors, scale: float, results: Tensors, sizes: BlockSizes, mask: Mask
) -> None:
    """Write the results of a window, or of a small causal square, by blocks of rows."""
    query, key, value = inputs
    blocks = row_blocks(query.shape[2], key.shape[2], mask, sizes.rows)
    bias = Bias(blocks, mask, query)
    # A block computes only the columns that some of its rows see.
    for rows, cols in blocks:
        tensors = query[:, :, rows], key[:, :, cols], value[:, :, cols]
        found = _attend(tensors, scale, sizes, bias=bias.of((rows, cols)))
        for result, x in zip(results, found, strict=True):
            result[:, :, rows] = x
    _correct(inputs, scale, results, mask, sizes.is_padded)


def _correct(
    inputs: Tensors, scale: float, results: Tensors, mask: Mask, by_block: bool = False
) -> None:
    """Recompute the rows that aten's kernel loses: their out is 0, and their lse 0 or inf."""
    # The kernel treats rows whose scores are -inf, or NaN with fewer than 16 keys, as rows that see
    # nothing. In 16 bits it gives no weight to scores of inf, where inf - inf is NaN.
    out, lse = results
    # Lost rows are rare, so rule them out with one cheap pass over lse.
    has_zeros = lse.count_nonzero().item() != lse.numel()
    # Of wider dtypes, scores of inf are computed correctly.
    if not has_zeros and (out.itemsize > 2 or isfinite(lse.sum().item())):
        return
    # A correct lse may be 0, but then the output seldom is 0, too.
    lost = ((lse == 0) | lse.isinf()) & (out == 0).all(-1)
    if not lost.any():
        return
    last = out.shape[2] if by_block else int(lost.flatten(0, 1).any(0).nonzero().max()) + 1
    rows, (query, key, value) = slice(last), inputs
    launch, scores = Launch(WHOLE, WHOLE, mask, by_block=by_block), Scores(mask, scale)
    exact = Reference().forward(query[:, :, rows], key, value, launch, scores)
    for result, x in zip(results, exact, strict=True):
        result[:, :, rows][lost[:, :, rows]] = x[lost[:, :, rows]]


def _backward(
    by_row: Tensors,
    by_col: Tensors,
    scale: float,
    sizes: BlockSizes,
    is_causal: bool = False,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key, value from (grad_out, query, out, lse) and (key, value)."""
    grad_out, query, out, lse = by_row
    # Padded sizes give the same bits wherever a block lies, see Note [Aligned products].
    if sizes.is_padded:
        return padded_backward(partial(BACKWARD, scale=scale), by_row, by_col, is_causal, bias)
    key, value = by_col
    return BACKWARD(
        grad_out, query, key, value, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
    )


def _backward_square(
    by_row: Tensors, by_col: Tensors, scale: float, grads: Tensors, sizes: BlockSizes
) -> None:
    """Write the gradients of a causal square: those of its halves, then add the full tile."""
    num_rows = by_row[0].shape[2]
    if num_rows <= sizes.cols:
        found = _backward(by_row, by_col, scale, sizes, is_causal=True)
        for grad, x in zip(grads, found, strict=True):
            grad.copy_(x)
        return
    # The squares of both halves, and all that the second half sees of the first:
    #     s .
    #     b s
    first, second = _halves(num_rows)
    for half in (first, second):
        of_rows, of_cols = _tokens(by_row, half), _tokens(by_col, half)
        _backward_square(of_rows, of_cols, scale, _tokens(grads, half), sizes)
    # Add this after the squares, because they overwrite all three gradients of their halves.
    between = _backward(_tokens(by_row, second), _tokens(by_col, first), scale, sizes)
    for grad, tokens, x in zip(grads, (second, first, first), between, strict=True):
        grad[:, :, tokens] += x


def _backward_band(
    by_row: Tensors, by_col: Tensors, scale: float, grads: Tensors, sizes: BlockSizes, mask: Mask
) -> None:
    """Write the gradients of a window, by blocks of columns."""
    (_, query, *_), (key, _) = by_row, by_col
    grads[0].zero_()  # summed over the blocks; each column's gradients are written once
    blocks = col_blocks(query.shape[2], key.shape[2], mask, sizes.cols)
    bias = Bias(blocks, mask, query)
    for rows, cols in blocks:
        part = bias.of((rows, cols))
        found = _backward(_tokens(by_row, rows), _tokens(by_col, cols), scale, sizes, bias=part)
        grads[0][:, :, rows] += found[0]
        for grad, x in zip(grads[1:], found[1:], strict=True):
            grad[:, :, cols] = x


def _sizes(query: Tensor, by_block: bool = False) -> BlockSizes:
    """Return the sizes that are fastest for these queries, or those that all queries get."""
    if by_block:
        # These do not depend on heads or threads, and merges of halves depend on what is beside.
        sizes = COARSE if query.dtype.itemsize == 2 else FINE
        return sizes._replace(large=NEVER, huge=NEVER, is_padded=True)
    # Matrix products of 16 bits need large blocks, and so do few heads on many threads.
    batch, num_heads, *_ = query.shape
    is_fine = query.itemsize > 2 and batch * num_heads >= FINE_FROM * torch.get_num_threads()
    return FINE if is_fine else COARSE


def _constant(mask: Mask) -> Mask:
    """Return `FULL` or `CAUSAL` if a mask equals it: to compare fields takes longer than `is`."""
    if mask is FULL or mask is CAUSAL:
        return mask
    return FULL if mask == FULL else CAUSAL if mask == CAUSAL else mask


def _in_one(mask: Mask, query: Tensor, whole: int, large: int) -> bool:
    """Return whether one launch is fastest for the tile, of a mask of `_constant`."""
    if mask is not CAUSAL:
        return mask is FULL  # a window would need its bias for all pairs
    # Only for squares between the two sizes do skipped pairs save more than launches cost.
    return query.itemsize == 2 or not whole < query.shape[2] < large


def _halves(num_rows: int) -> tuple[slice, slice]:
    # The first half ends where a block of the kernel does.
    middle = ceil(num_rows / 2 / ALIGNED) * ALIGNED
    return slice(middle), slice(middle, None)


def _tokens(tensors: Tensors, tokens: slice) -> Tensors:
    return tuple(x[:, :, tokens] for x in tensors)


def _by_head(x: Tensor) -> Tensor:
    """Return keys or values in head-major memory, for queries of more rows than a whole square."""
    # Each block of rows reads them again: beyond a few blocks a copy costs less than strides do.
    return x if x.stride(2) == x.shape[3] else x.contiguous()
