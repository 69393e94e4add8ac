"""The cross-entropy of a linear projection, in vocabulary tiles: never are all logits held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dtensor_ring.extension import IGNORE_INDEX, autocast_dtype, register_op

# Large problems have larger tiles instead of more: narrow matrix products are slow.
MAX_TILES = 64
_HEAD = "Tensor hidden, Tensor weight, Tensor? bias, Tensor labels"
_SCALING = "float scale, float softcap"


def projected_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scale: float = 1.0,
    softcap: float = 0.0,
) -> Tensor:
    """Return the cross-entropy of each token, without storing its logits.

    Args:
        hidden: `(N, H)`, of the dtype of the weight. Autocast casts hidden, weight and bias.
        weight: the weight of the projection, `(V, H)`.
        bias: its bias, `(V,)`.
        labels: `(N,)`, int64; a token with `IGNORE_INDEX` has no loss.
        scale: factor of the logits.
        softcap: if positive, logits are `softcap * tanh(scale * x / softcap)`.

    Returns:
        The loss of each token, `(N,)`, in float32, or in float64 if `hidden` is.

    Example:
        >>> labels = torch.tensor([1, -100])
        >>> projected_cross_entropy(torch.zeros(2, 3), torch.ones(4, 3), None, labels)
        tensor([1.3863, 0.0000])
    """
    dtype = autocast_dtype(hidden.device.type)
    if dtype is not None and hidden.dtype != torch.float64:
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = bias if bias is None else bias.to(dtype)
    return _forward_op(hidden, weight, bias, labels, scale, softcap)[0]


# Note [Vocabulary tiles]: forward keeps only the log-sum-exp of each token, and backward recomputes
# the logits: four matrix products in all, where stored logits take three. A tile holds all tokens,
# so the gradient of its rows of the weight is one product, rounded once, as in the plain
# projection. Tiles of tokens take three, but add up the gradient of the whole weight: in 16 bits,
# this needs a float32 copy.
def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    scale: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and its log-sum-exp, which backward needs."""
    is_ignored = labels == IGNORE_INDEX
    is_known = is_ignored | ((labels >= 0) & (labels < len(weight)))
    torch._assert_async(is_known.all(), f"labels are from 0 to {len(weight) - 1}, or -100")
    largest = hidden.new_full(labels.shape, -torch.inf, dtype=_wide(hidden))
    total, label_scores = torch.zeros_like(largest), torch.zeros_like(largest)
    # Online softmax over tiles of the vocabulary (Milakov and Gimelshein, 2018, arXiv 1805.02867):
    # `total` is the sum of exp(score - largest) over the entries so far.
    for start, _, scores in _tiles(hidden, weight, bias, scale, softcap):
        column, is_here = _columns(labels, start, scores)
        label_scores = torch.where(is_here, scores.gather(1, column).squeeze(1), label_scores)
        before, largest = largest, torch.maximum(largest, scores.amax(1))
        # A row of -inf so far stays a sum of zeros, not of NaN.
        shift = largest.masked_fill(largest == -torch.inf, 0)
        here = scores.sub_(shift.unsqueeze(1)).exp_().sum(1)
        total.mul_((before - shift).exp_()).add_(here)
    lse = largest + total.log_()
    return (lse - label_scores).masked_fill_(is_ignored, 0), lse


def backward(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    lse: Tensor,
    scale: float,
    softcap: float,
    needs: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of hidden states, weight and bias; those not needed are empty."""
    grads = _empty_grads(hidden, weight, needs)
    total = torch.zeros_like(grads[0], dtype=_wide(hidden))
    # exp(score - inf) is zero, and so is the gradient of tokens without a label.
    is_ignored = labels == IGNORE_INDEX
    lse = lse.masked_fill(is_ignored, torch.inf).unsqueeze(1)
    # Zero, as the incoming gradient may be infinite: the mean over no labels at all is 0 / 0.
    grad = grad.masked_fill(is_ignored, 0)
    for start, narrow, scores in _tiles(hidden, weight, bias, scale, softcap):
        entries = slice(start, start + scores.shape[1])
        # The derivative of the softcap; the scores it needs are overwritten next.
        slope = (scores / softcap).square_().neg_().add_(1) if softcap else None
        column, is_here = _columns(labels, start, scores)
        # d loss / d score = exp(score - lse) - 1 at the label, and without the 1 elsewhere.
        scores.sub_(lse).exp_()
        scores.scatter_add_(1, column, is_here.to(scores.dtype).neg_().unsqueeze(1))
        scores.mul_((grad * scale).unsqueeze(1))
        if slope is not None:
            scores.mul_(slope)
        if needs[2]:
            grads[2][entries] = scores.sum(0)
        # Products run in the dtype of the weight; the logits in `narrow` are not needed any more.
        products = scores if scores.dtype == hidden.dtype else narrow.copy_(scores)
        if needs[0] and scores is products:
            total.addmm_(products, weight[entries])
        elif needs[0]:
            total.add_(products @ weight[entries])
        if needs[1]:
            torch.mm(products.T, hidden, out=grads[1][entries])
    return total.to(hidden.dtype), grads[1], grads[2]


def _tiles(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, softcap: float
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each tile: its first vocabulary entry, logits in their dtype, wide scores, `(N, V)`."""
    # Tiles reuse one buffer. Logits in float32 or float64 share it with the scores.
    num_entries = _entries_per_tile(len(hidden), len(weight))
    narrow = hidden.new_empty(len(hidden) * num_entries)
    wide = narrow if narrow.dtype == _wide(hidden) else narrow.to(_wide(hidden))
    for start in range(0, len(weight), num_entries):
        part = weight[start : start + num_entries]
        shape, length = (len(hidden), len(part)), len(hidden) * len(part)
        logits, scores = narrow[:length].view(shape), wide[:length].view(shape)
        if bias is None:
            torch.mm(hidden, part.T, out=logits)
        else:
            torch.addmm(bias[start : start + num_entries], hidden, part.T, out=logits)
        if wide is not narrow:
            scores.copy_(logits)
        if scale != 1:
            scores.mul_(scale)
        if softcap:
            scores.div_(softcap).tanh_().mul_(softcap)
        yield start, logits, scores


# Size of the scores of a tile, which should fit into a cache.
TILE_BYTES = 16 * 2**20


def _entries_per_tile(num_tokens: int, num_entries: int) -> int:
    fitting = TILE_BYTES // (torch.float32.itemsize * max(num_tokens, 1))
    return min(num_entries, max(fitting, -(-num_entries // MAX_TILES)))


def _wide(hidden: Tensor) -> torch.dtype:
    """Return the dtype of sums and exponentials."""
    return torch.promote_types(hidden.dtype, torch.float32)


def _columns(labels: Tensor, start: int, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return a column of the tile for each token, and whether its label is in the tile."""
    column, last = labels - start, scores.shape[1] - 1
    return column.clamp(0, last).unsqueeze(1), (column >= 0) & (column <= last)


def _empty_grads(hidden: Tensor, weight: Tensor, needs: list[bool]) -> tuple[Tensor, ...]:
    """Allocate the gradients of hidden states, weight and bias; those not needed are empty."""
    shapes = hidden.shape, weight.shape, weight.shape[:1]
    return tuple(
        weight.new_empty(shape if is_needed else [0] * len(shape))
        for shape, is_needed in zip(shapes, needs, strict=True)
    )


def _fake_forward(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *scaling: float
) -> tuple[Tensor, Tensor]:
    losses = hidden.new_empty(hidden.shape[:1], dtype=_wide(hidden))
    return losses, torch.empty_like(losses)


def _fake_backward(grad: Tensor, hidden: Tensor, weight: Tensor, *more: Any) -> tuple[Tensor, ...]:
    return _empty_grads(hidden, weight, more[-1])


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    hidden, weight, bias, labels, ctx.scale, ctx.softcap = inputs
    ctx.save_for_backward(hidden, weight, bias, labels, output[1])


def _gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
    needs = list(ctx.needs_input_grad[:3])
    hidden, weight, bias, labels, lse = ctx.saved_tensors
    grads = _backward_op(grad, hidden, weight, bias, labels, lse, ctx.scale, ctx.softcap, needs)
    found = [x if is_needed else None for x, is_needed in zip(grads, needs, strict=True)]
    return *found, None, None, None


def _refuse_twice(ctx: Any, *grads: Any) -> None:
    raise NotImplementedError(
        "a loss that is made without logits is differentiable once, not twice: leave create_graph "
        "out, or call the model without labels and make the loss of its logits"
    )


_forward_op = register_op(
    "projected_cross_entropy",
    f"({_HEAD}, {_SCALING}) -> (Tensor losses, Tensor lse)",
    forward,
    _fake_forward,
    gradient=(_gradients, _keep),
)
_backward_op = register_op(
    "projected_cross_entropy_backward",
    f"(Tensor grad, {_HEAD}, Tensor lse, {_SCALING}, bool[] needs) "
    "-> (Tensor grad_hidden, Tensor grad_weight, Tensor grad_bias)",
    backward,
    _fake_backward,
    gradient=(_refuse_twice, lambda ctx, inputs, output: None),
)
