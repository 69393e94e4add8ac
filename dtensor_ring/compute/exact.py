"""Exponential, logarithm and sum whose bits depend on their arguments alone.

Functions such as `torch.sigmoid` round differently in the vectors of a loop and in its last few
numbers, nothing promises that `torch.exp` does not, and `torch.sum` adds in an order that fits the
shape. So their bits may depend on what else is in a tensor and on the number of threads. Single
sums, products and quotients of IEEE 754 do not: these functions consist
of them.
"""

from __future__ import annotations

from math import factorial

import torch
from torch import Tensor

# ln 2 in two parts: multiples of the first, up to 2**11, are exact.
_LN2 = float.fromhex("0x1.62e42fee00000p-1"), float.fromhex("0x1.a39ef35793c76p-33")

# Coefficients of exp(r), for |r| up to ln(2) / 2, and of 2 atanh(t) / t in t * t, for |t| up to
# 0.172: the next terms are below the last bit of a float64.
_EXP_TERMS = tuple(1.0 / factorial(n) for n in range(13, -1, -1))
_LOG_TERMS = tuple(2.0 / n for n in range(23, 0, -2))

# The smallest argument that is computed: smaller ones give 0.
_LEAST = -700.0

_BIAS, _SHIFT = 1023, 52  # of the exponent of a float64


def exact_exp(x: Tensor) -> Tensor:
    """Return `exp(x)` of numbers up to 0, in their dtype; 0 below -700, and NaN stays NaN.

    >>> exact_exp(torch.tensor([0.0, -1.0, -torch.inf]))
    tensor([1.0000, 0.3679, 0.0000])
    """
    # exp(x) = 2**power * exp(rest), where rest is at most ln(2) / 2 to either side. Two parts of
    # ln 2 keep the bits of rest that one product would cancel (Cody and Waite, 1980).
    wide = x.to(torch.float64)
    power = (wide.clamp(min=_LEAST) * (1 / (_LN2[0] + _LN2[1]))).round_()
    rest = wide.clamp(min=_LEAST).sub_(power * _LN2[0]).sub_(power * _LN2[1])
    # 2**power by its bits, as `pow` is no single operation of IEEE 754. `_LEAST` keeps it normal.
    scale = power.to(torch.int64).add_(_BIAS).bitwise_left_shift_(_SHIFT).view(torch.float64)
    return _polynomial(rest, _EXP_TERMS).mul_(scale).masked_fill_(wide < _LEAST, 0.0).to(x.dtype)


def exact_log(x: Tensor) -> Tensor:
    """Return `log(x)` of finite numbers from 1 on, in their dtype.

    >>> exact_log(torch.tensor([1.0, 2.0]))
    tensor([0.0000, 0.6931])
    """
    # x = 2**power * mantissa, and log(m) = 2 atanh((m - 1) / (m + 1)), a series of odd powers.
    bits = x.to(torch.float64).view(torch.int64)
    power = bits.bitwise_right_shift(_SHIFT).sub_(_BIAS)
    mantissa = (bits - power.bitwise_left_shift(_SHIFT)).view(torch.float64)  # from 1 to 2
    # Halve the larger ones: the series converges near 1.
    is_large = mantissa > 2**0.5
    mantissa = torch.where(is_large, mantissa * 0.5, mantissa)
    power = (power + is_large).to(torch.float64)
    ratio = (mantissa - 1.0).div_(mantissa + 1.0)
    series = _polynomial(ratio * ratio, _LOG_TERMS).mul_(ratio)
    # The smaller addends first: power times the first part is exact, and the largest.
    return (power * _LN2[0]).add_(series.add_(power * _LN2[1])).to(x.dtype)


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Return the sum over a dimension, whose bits depend on nothing but the numbers that it adds.

    >>> tree_sum(torch.tensor([[1.0, 2.0, 4.0]]), dim=1)
    tensor([7.])
    """
    if not x.shape[dim]:
        return x.sum(dim)
    while (num := x.shape[dim]) > 1:
        # Halves, not neighbours, are added: they are slices without a stride.
        half = num - num // 2
        first, second = x.narrow(dim, 0, num // 2), x.narrow(dim, half, num // 2)
        alone = [x.narrow(dim, num // 2, 1)] if num % 2 else []
        x = torch.cat([first + second, *alone], dim) if alone else first + second
    return x.squeeze(dim)


def _polynomial(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Return a polynomial, whose highest coefficient is the first: products and sums apart."""
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total.mul_(x).add_(coefficient)
    return total
