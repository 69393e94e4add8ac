"""The arguments of an attention as users give them: refused in words, before the op sees them."""

from __future__ import annotations

import reprlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_ring.compute.kernels import Scores, check_kernel
from dtensor_ring.ops.check import check_strided
from dtensor_ring.ops.decode_options import DecodeCall
from dtensor_ring.ops.options import Batch, Call, default_scale
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.tile import CAUSAL, FULL

SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
"""Of the numbers that scores are computed with, unless tensors are float64."""


def mask_of(mask: Mask | None, slices: Slices | Tensor | None) -> Mask:
    """The mask that was given, or the default: causal, unless slices say what is seen."""
    if mask is not None:
        return mask
    return CAUSAL if slices is None else FULL


def batch_of(
    cu_seqlens: Tensor | None,
    key_cu_seqlens: Tensor | None,
    runs: Tensor | None,
    slices: Slices | Tensor | None,
    key_runs: Tensor | None = None,
) -> Batch:
    """The options that differ from batch to batch.

    Raises:
        TypeError: if slices are an object where a compiler has to follow.
    """
    if isinstance(slices, Slices):
        if torch.compiler.is_compiling():
            raise TypeError(
                "slices must be a tensor in a compiled function, whose argument it is: make it "
                "outside, by sequence_slices(slices, num_slices)"
            )
        slices = torch.from_numpy(slices.numbers)  # its memory: what was made of it is found by it
    return Batch(cu_seqlens, key_cu_seqlens, runs, slices, key_runs)


def as_flag(name: str, given: Any) -> bool:
    """Whether an argument is true, of any type that can say so.

    Raises:
        TypeError: if it cannot, as a tensor of several elements; names the argument.
    """
    try:
        return bool(given)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be True or False, got {given!r}") from None


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse what is not a tensor of four dims.

    Raises:
        TypeError: if one is not a tensor.
        ValueError: if one does not have four dims, or is nested.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor or a DTensor, got {type(x).__name__}")
        if x.is_nested:  # it has no shape to read
            check_strided(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name} must be (B, N, L, H), got shape {tuple(x.shape)}")


def scores_of(
    query: Tensor,
    mask: Mask,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    kernel: str | None,
) -> Scores:
    """How queries are scored against keys, once the values are seen to be possible.

    Raises:
        TypeError: if one is of another type.
        ValueError: if scores cannot be computed with one of the numbers.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a dtensor_ring.Mask, such as Mask.causal(), got {mask!r}")
    # One comparison for what is usual; everything else is looked at below.
    if type(softcap) is not float or (softcap and not SMALLEST <= softcap <= LARGEST):
        softcap = _softcap(softcap, query.dtype)
    if scale is None:
        scale = default_scale(query.shape[-1])
    elif type(scale) is not float or not SMALLEST <= abs(scale) <= LARGEST:
        scale = _number("scale", scale, query.dtype)
        # Kernels round it to 0 in the end, and multiply -inf by it unless they know.
        scale = scale if abs(scale) >= _limits(query.dtype)[0] else 0.0
    if sinks is not None and not isinstance(sinks, Tensor):
        raise TypeError(
            f"sinks must be a tensor of one logit per query head, got {type(sinks).__name__}; "
            "use torch.tensor(sinks)"
        )
    if kernel is not None and type(kernel) is not str:
        check_kernel(kernel)  # the op would take bytes for a name
    return Scores(mask, scale, softcap, sinks, kernel)


def check_options(query: Tensor, call: Call | DecodeCall) -> None:
    """Refuse tensors of another kind than the op takes beside query, key and value.

    Raises:
        TypeError: if boundaries or runs are no plain tensors, or sinks are a DTensor alone.
        ValueError: if one is not strided.
    """
    batch, sinks = call.batch, call.scores.sinks
    for name, x in zip(batch._fields, batch, strict=True):
        if x is None:
            continue
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            makers = {"runs": "sequence_runs(layout)", "slices": "sequence_slices(slices)"}
            makers |= {"key_runs": "ShardedCache.key_runs"}
            make = makers.get(name, "torch.tensor(x, dtype=torch.int32)")
            raise TypeError(f"{name} must be a plain tensor, as {make}, got {type(x).__name__}")
        check_strided(name, x)
    if sinks is None:
        return
    check_strided("sinks", sinks)
    if isinstance(sinks, DTensor) and not isinstance(query, DTensor):
        raise TypeError(
            "sinks beside plain query, key and value must be plain, too, got a DTensor; pass "
            "sinks.to_local()"
        )


def _softcap(given: Any, dtype: torch.dtype) -> float:
    softcap = None if given is None else _number("softcap", given, dtype)
    if softcap is None or softcap < 0 or 0 < softcap < _limits(dtype)[0]:
        raise ValueError(
            f"softcap must be 0 (none) or positive and finite, got {given}; scores are computed "
            f"in {_wide(dtype)}"
        )
    return softcap


def _number(name: str, given: Any, dtype: torch.dtype) -> float:
    """A float that scores can be computed with."""
    try:
        # A string would be parsed, and the one element of a vector taken for a number.
        if isinstance(given, (str, bytes, bytearray)) or getattr(given, "ndim", 0):
            raise TypeError
        number = float(given)
    except OverflowError:  # an integer beyond float64
        number = torch.inf
    except (TypeError, ValueError, RuntimeError):  # the latter of a tensor without content
        raise TypeError(f"{name} must be a number, got {given!r}") from None
    if not abs(number) <= _limits(dtype)[1]:
        raise ValueError(
            f"{name} must be finite in {_wide(dtype)}, in which scores are computed, got "
            f"{reprlib.repr(given)}"
        )
    return number


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores of that dtype are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    found = torch.finfo(_wide(dtype))
    return found.tiny, found.max
