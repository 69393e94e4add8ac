"""Accumulates the partial outputs and gradients that launches return, and attention sinks.

Sinks are as in Xiao et al., 2023 (arXiv 2309.17453), in the form of gpt-oss. Let `Z = exp(lse)` be
the sum over the keys, and `s` the sink of the head. Then the softmax divides by `Z + exp(s)`. So a
sink is one more score, with a value of 0. Sinks enter once, after all keys are merged.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from dtensor_ring.compute.kernels.kernel import Saved
from dtensor_ring.compute.memory import (
    TOKEN_MAJOR,
    WHOLE,
    Accumulation,
    Order,
    Partial,
    Region,
    add,
    dense_strides,
    empty,
    in_order,
    new_empty,
    order_of,
    wide_of,
)
from dtensor_ring.compute.merge import MAX_PARTIALS, accumulate_sums, sink_weight
from dtensor_ring.compute.trace import Label, stands_for_gpu
from dtensor_ring.planning.demand import Cols

# Partials of 16 bits that are kept on a GPU. Next to two, a ring of 8 ranks is 5 % faster forward
# there, and needs the memory of two more queries; docs/speed.md has the figures.
ON_GPUS = 4


class Partials:
    """Partial results of a tensor `(B, N, L, H)`, one from each launch.

    Note [Partials at once]: a partial stays in the dtype of the kernel until there are `room` of
    them. Then one pass over memory merges them, in float32 or wider. More room saves passes over
    the float32 tensor, which is twice as large as a partial of 16 bits. The last partials are
    merged directly into memory of the result's dtype. So merging rounds every number once; kernels
    round, too.

    Args:
        like: a tensor of the device, and by default the shape and dtype, of the result.
        room: the largest number of partials to keep. `None` keeps `ON_GPUS` of 16 bits on a GPU,
            else one.
        order: memory order of the result, which is dense.
        shape: shape of the result.
        dtype: dtype of the result.
    """

    def __init__(
        self,
        like: Tensor,
        room: int | None = None,
        order: Order = TOKEN_MAJOR,
        shape: torch.Size | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._like, self._room, self._order = like, room, order
        self._shape = like.shape if shape is None else shape
        self._dtype = like.dtype if dtype is None else dtype
        self._wide = wide_of(self._dtype)
        self._partials: list[Partial] = []

    def __bool__(self) -> bool:
        return bool(self._partials)

    def add(self, region: Region, x: Tensor, lse: Tensor | None = None) -> None:
        """Keep a partial and its lse, if it has one; both may be overwritten.

        Call `make_room` before.
        """
        self._partials.append(Partial(region, x, lse))

    def make_room(self, label: Label | None = None) -> None:
        """Merge the partials if there is no room for another, before a kernel allocates it.

        Args:
            label: names the merge in a profile.
        """
        if len(self._partials) > 1 and self._is_full():
            with nullcontext() if label is None else label("merge"):
                self._partials = [self._merged(self._wide)]

    def merged(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the tensor in its dtype and order, and its lse `(B, N, L)` or `None`."""
        first = self._partials[0]
        # One launch over everything, as that of a single rank, is the result without another pass.
        is_final = first.denominator is None and sinks is None and first.x.shape == self._shape
        if len(self._partials) > 1 or not is_final:
            first = self._merged(self._dtype, sinks, divided=True)
        return in_order(first.x, self._order, self._dtype), first.lse

    def total(self, is_last: bool) -> Tensor:
        """Return the sum so far, to add to. It is wide unless only the last addend is missing."""
        first = self._partials[0]
        if (
            len(self._partials) > 1
            or first.x.shape != self._shape
            or not (is_last or first.x.dtype == self._wide)
        ):
            self._partials = [self._merged(self._wide)]
        return self._partials[0].x

    def into(self, total: Tensor, is_new: bool) -> Accumulation:
        """Return the `Accumulation` of the partials into `total`, overwritten if `is_new`."""
        before = [] if is_new else [Partial(WHOLE, total)]
        return Accumulation(total, before + self._partials)

    def _is_full(self) -> bool:
        # A merged float32 tensor at the front is the running total and does not count as a partial.
        kept = self._partials[self._is_total(self._partials[0]) :]
        is_many = _on_gpu(kept[0].x) and len(self._partials) >= MAX_PARTIALS
        return (
            is_many or sum(partial.x.numel() for partial in kept) >= self._num_kept() * self._size
        )

    def _num_kept(self) -> int:
        if self._room is not None:
            return self._room
        # CPUs gain nothing from more room: they merge in place, in one pass.
        is_narrow = self._dtype != self._wide
        return ON_GPUS if is_narrow and _on_gpu(self._partials[0].x) else 1

    @property
    def _size(self) -> int:
        return self._shape.numel()

    def _is_whole(self, partial: Partial) -> bool:
        return partial.x.shape == self._shape

    def _is_total(self, partial: Partial) -> bool:
        return self._is_whole(partial) and partial.x.dtype == self._wide

    def _merged(
        self, dtype: torch.dtype, sinks: Tensor | None = None, divided: bool = False
    ) -> Partial:
        """Merge all partials into one of this dtype. CPUs keep a denominator unless `divided`."""
        first = self._partials[0]
        target, lse, denominator = first.x, first.lse, first.denominator
        is_whole = self._is_whole(first)
        # If the first partial is the wide running total, merge the others into it in place; at last
        # only if its memory has the order of the result, which would be copied otherwise.
        is_kept = is_whole and first.x.dtype == dtype == self._wide
        if not is_kept or (divided and target.stride() != dense_strides(self._shape, self._order)):
            target = empty(first.x, self._shape, self._order, dtype)
        if lse is not None and not is_whole:
            lse, denominator = new_empty(lse, self._shape[:3]), None
        # On a GPU the one launch divides, too. A CPU divides in its last merge only, which saves
        # a pass over the sum in the others, see Note [Division at the end].
        if divided or lse is None or not lse.is_cpu:
            denominator = None
        elif denominator is None:
            denominator = torch.ones_like(lse)
        accumulate_sums(Accumulation(target, self._partials, lse, sinks, denominator))
        return Partial(WHOLE, target, lse, denominator)


class RunningOutput(Partials):
    """The running (out, lse) of the local queries. Sinks enter in the last merge.

    Args:
        query: the local queries `(B, N, L, H)`.
        value_head_dim: head dim of the outputs.
        sinks: one logit for each head `(N,)`; see `dtensor_ring.compute.accumulate`.
        dtype: dtype of the result; by default the query's.
        room: the largest number of partials to keep, see `Partials`.
    """

    def __init__(
        self,
        query: Tensor,
        value_head_dim: int,
        sinks: Tensor | None = None,
        dtype: torch.dtype | None = None,
        room: int | None = None,
    ) -> None:
        shape = torch.Size((*query.shape[:3], value_head_dim))
        super().__init__(query, room, order_of(query), shape, dtype)
        self._sinks = sinks

    def result(self) -> tuple[Tensor, Tensor]:
        """Return `out` `(B, N, L, Hv)`, in the query's memory order, and `lse` `(B, N, L)`."""
        if not self._partials:
            self._add_nothing()
        out, lse = self.merged(self._sinks)
        assert lse is not None, "all parts of a partial result have one"
        return out, lse.contiguous()

    def _add_nothing(self) -> None:
        """Add the result over no keys: outputs of 0 and an lse of -inf."""
        out = empty(self._like, self._shape, self._order, self._dtype).zero_()
        lse = self._like.new_full(self._shape[:3], -torch.inf, dtype=self._wide)
        self.add(WHOLE, out, lse)


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda or (x.is_meta and stands_for_gpu())


class GradientSum(Partials):
    """The sum of the launches' gradients of one tensor `(B, N, L, H)`, see `Partials`."""

    def add_arrived(self, arrived: Tensor, cols: Cols, is_last: bool) -> None:
        """Add the sum that arrived from other ranks for these columns.

        Args:
            arrived: the columns, packed side by side.
            cols: places of the columns in the tensor.
            is_last: whether this is the last addend; then the sum is rounded to its dtype.
        """
        # Adding to narrow memory rounds, so only the last addend may do it.
        total = self.total(is_last) if self._partials else self._zeros()
        add(total, arrived, cols)

    def result(self) -> Tensor:
        """Return the sum in the tensor's dtype, token-major."""
        if not self._partials:
            self._zeros()
        return self.merged()[0]

    def _zeros(self) -> Tensor:
        self.add(WHOLE, empty(self._like, self._shape, TOKEN_MAJOR).zero_())
        return self.total(is_last=False)


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scale `out` in place for a softmax with sinks, and return the new lse.

    `out' = out * Z / (Z + exp(s)) = out * sigmoid(lse - s)` and `lse' = log(Z + exp(s))`. A row
    that sees no key keeps `out` 0 and gets the lse of its sink.

    >>> out, lse = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1)
    >>> add_sinks(out, lse, torch.zeros(1)).exp(), out
    (tensor([[[2.]]]), tensor([[[[0.5000, 0.5000]]]]))

    Args:
        out: attention without sinks `(B, N, L, Hv)`, float32 or wider.
        lse: log-sum-exp of the scores `(B, N, L)`.
        sinks: one logit for each head `(N,)`.
    """
    out.mul_(sink_weight(lse, sinks).unsqueeze(-1))
    return torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))


def sinks_gradient(saved: Saved, sinks: Tensor | None) -> Tensor:
    """Return the gradient of the sinks `(N,)` from the local rows; empty without sinks.

    A sink is a score whose value is 0, so its gradient is that of any score in flash attention
    (Dao et al., 2022, arXiv 2205.14135, appendix B.4). With `p = exp(s - lse')`, it is the sum over
    the rows of `p * (grad_lse - sum(grad_out * out'))`.

    Args:
        saved: outputs of the local rows; `out` and `lse` include the sinks.
        sinks: the logits `(N,)` that `add_sinks` was given.
    """
    if sinks is None:
        return saved.out.new_empty(0)
    # `D = sum(grad_out * out)` of flash attention, with the other sign: the sink's value is 0.
    slope = -(saved.grad_out.to(saved.lse.dtype) * saved.out).sum(-1)
    if saved.grad_lse is not None:
        slope += saved.grad_lse
    weight = (sinks.to(slope.dtype).view(1, -1, 1) - saved.lse).exp()
    # lse is -inf only where the sink is -inf, too; the sink has no weight there.
    weight = weight.masked_fill_(saved.lse == -torch.inf, 0.0)
    return (weight * slope).sum((0, 2)).to(sinks.dtype)
