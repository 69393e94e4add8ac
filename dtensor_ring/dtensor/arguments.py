"""Checks the arguments of an attention as users give them, before they reach the op."""

from __future__ import annotations

import reprlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_ring.compute.kernels import Scores, check_kernel
from dtensor_ring.decode.op import DecodeCall
from dtensor_ring.ops.checks import check_strided
from dtensor_ring.ops.options import Batch, Call, default_scale
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.tile import CAUSAL, FULL

# Bounds of `scale` and `softcap`, unless tensors are float64.
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def mask_of(mask: Mask | None, slices: Slices | Tensor | None) -> Mask:
    """Return the given mask, or the default: causal without slices, full with them."""
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
    """Collect the options that differ from batch to batch.

    Raises:
        TypeError: if slices are not a tensor while a compiler traces.
    """
    if isinstance(slices, Slices):
        if torch.compiler.is_compiling():
            raise TypeError(
                "slices must be a tensor in a compiled function, whose argument it is: make it "
                "outside, by sequence_slices(slices, num_slices)"
            )
        slices = torch.from_numpy(slices.numbers)  # shares memory: the cache looks it up by address
    return Batch(cu_seqlens, key_cu_seqlens, runs, slices, key_runs)


def as_flag(name: str, given: Any) -> bool:
    """Convert an argument of any type with a truth value to a bool.

    Raises:
        TypeError: if it has none, like a tensor of several elements; names the argument.
    """
    try:
        return bool(given)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be True or False, got {given!r}") from None


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse arguments that are not tensors of four dims.

    Raises:
        TypeError: if one is not a tensor.
        ValueError: if one does not have four dims, or is nested.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor or a DTensor, got {type(x).__name__}")
        if x.is_nested:  # a nested tensor has no shape to read
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
    """Check the options of the scores and collect them.

    Raises:
        TypeError: if one has a wrong type.
        ValueError: if scores cannot be computed with one of the numbers.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a dtensor_ring.Mask, such as Mask.causal(), got {mask!r}")
    # Fast path: usual values take one comparison, all others are checked below.
    if type(softcap) is not float or (softcap and not SMALLEST <= softcap <= LARGEST):
        softcap = _softcap(softcap, query.dtype)
    if scale is None:
        scale = default_scale(query.shape[-1])
    elif type(scale) is not float or not SMALLEST <= abs(scale) <= LARGEST:
        scale = _number("scale", scale, query.dtype)
        # Kernels would round it to 0 anyway; as a known 0, they do not multiply -inf by it.
        scale = scale if abs(scale) >= _limits(query.dtype)[0] else 0.0
    if sinks is not None and not isinstance(sinks, Tensor):
        raise TypeError(
            f"sinks must be a tensor of one logit per query head, got {type(sinks).__name__}; "
            "use torch.tensor(sinks)"
        )
    if kernel is not None and type(kernel) is not str:
        check_kernel(kernel)  # the op would accept bytes as a name
    return Scores(mask, scale, softcap, sinks, kernel)


def check_options(query: Tensor, call: Call | DecodeCall) -> None:
    """Refuse tensors, besides query, key and value, of a kind that the op does not take.

    Raises:
        TypeError: if boundaries or runs are not plain tensors, or only sinks are a DTensor.
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
    """Convert a number to a float that scores can be computed with."""
    try:
        # `float()` would parse a string, and accept a vector of one element.
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
    """Return the dtype in which scores of tensors of a dtype are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    found = torch.finfo(_wide(dtype))
    return found.tiny, found.max
