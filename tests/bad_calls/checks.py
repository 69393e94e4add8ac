"""What a valid call returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import dtensor_ring as ring
from tests.dense import dense_attention

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}


def nothing(arguments: dict[str, Any], result: Any) -> None:
    """That a valid call returns is all there is to check."""


def _local(x: Any) -> Any:
    return x.to_local() if isinstance(x, DTensor) else x


def check_attention(arguments: dict[str, Any], result: Any) -> None:
    """Compare with dense attention in float64; meta tensors have shapes only."""
    given = {name: _local(x) for name, x in arguments.items()}
    query, key, value, mask = (given.pop(x) for x in ("query", "key", "value", "mask"))
    out = _local(result[0] if given.get("return_lse") else result)
    assert out.shape == (*query.shape[:3], value.shape[3])
    names = ("cu_seqlens", "key_cu_seqlens", "sinks", "scale", "softcap")
    if out.device.type == "meta" or not query.numel():
        return
    options = {name: given[name] for name in names if name in given}
    options |= {name: float(options[name]) for name in names[3:] if options.get(name) is not None}
    expected = dense_attention(query, key, value, mask, **options).out
    largest = TOLERANCES.get(out.dtype, 5e-2) * (1 + expected.abs().max().item())
    torch.testing.assert_close(out.double(), expected, atol=largest, rtol=0.0)


def check_same(name: str) -> Callable[[dict[str, Any], Any], None]:
    """One rank holds all tokens in order, so what comes back is what was given."""

    def check(arguments: dict[str, Any], result: Any) -> None:
        given, found = _local(arguments[name]), _local(result)
        assert found.dtype == given.dtype or not given.is_floating_point()
        if given.device.type != "meta" and not given.is_quantized and given.dtype.itemsize > 1:
            assert torch.equal(found.to(given.dtype), given)

    return check


def check_all_to_all(arguments: dict[str, Any], result: Any) -> None:
    """One rank has all tokens and all heads."""
    for given, found in zip(arguments["tensors"], result, strict=True):
        check_same("given")({"given": given}, found)


def check_positions(arguments: dict[str, Any], result: Tensor) -> None:
    assert result.tolist() == list(range(arguments["seq_len"]))


def check_labels(arguments: dict[str, Any], result: Tensor) -> None:
    assert (result.shape, result.dtype) == (arguments["tokens"].shape, arguments["tokens"].dtype)


def check_slices(arguments: dict[str, Any], result: ring.Slices) -> None:
    """They are disjoint, and are drawn."""
    result.check(2**40, 2**40)
    assert str(result)
