"""The decode op over processes, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import Mask, SequenceAxis, decode_attention
from dtensor_ring.planning.layout import Layout
from tests.decoding import Decode, Outputs, check
from tests.layouts import LAYOUTS
from tests.pool import Pool

RUNS = (((0, 3), (9, 2)), ((3, 6), (11, 5)), ())
"""Of three ranks, the last of which holds nothing."""
SINKS = (0.5, -1.0, 2.0, 0.0)
CASES = {
    "runs": Decode(RUNS, 16, (15,), 3),
    "rows of unequal lengths": Decode(RUNS, 16, (12, 4), 3, 3),
    "two shots": Decode(RUNS, 16, (15,), 3, merge="two_shot"),
    "window and sinks": Decode(RUNS, 16, (14,), 3, 2, Mask.sliding(5), sinks=SINKS),
    **{
        f"one launch and sinks of {layer}": Decode(RUNS, 16, (15,), 3, sinks=sinks)
        for layer, sinks in (("a layer", SINKS), ("the next one", SINKS[::-1]))
    },
    "documents": Decode(RUNS, 16, (14,), 3, 2, documents=((0, 4, 16), (0, 12, 15))),
    "softcap, bfloat16": Decode(RUNS, 16, (15,), 3, softcap=1.5, dtype=torch.bfloat16),
    "head dims": Decode(RUNS, 16, (15,), 3, head_dims=(8, 4), dtype=torch.float32),
    "empty batch": Decode(RUNS, 16, (15,), 3, batch=0),
    "nobody": Decode(((), (), ()), 16, (15,), 3),
}


def options_of(case: Decode) -> dict[str, Any]:
    """As a user passes them."""
    options: dict[str, Any] = {"mask": case.mask, "cu_seqlens": case.cu_seqlens()}
    if not isinstance(case.runs, Layout):
        options["key_runs"] = torch.tensor(case.layout.numbers)  # type: ignore[attr-defined]
    names = ("scale", "softcap", "kernel", "merge")
    options |= {name: getattr(case, name) for name in names}
    return options | {"sinks": case.sink_tensor(), "query_starts": torch.tensor(case.starts)}


@pytest.mark.parametrize("world_size", [1, 3])
def test_over_processes(pool: Pool, world_size: int) -> None:
    cases = list(CASES.values())
    if world_size == 1:
        alone = (((0, 3), (5, 11)),), 16, (15,)
        some = {"sinks": SINKS}, {"sinks": SINKS[::-1]}, {"sinks": SINKS, "dtype": torch.bfloat16}
        cases = [Decode(*alone, **how) for how in ({}, *some)]
    answers = pool.run(world_size, _attend, cases)
    for case, by_rank in zip(cases, zip(*answers, strict=True), strict=True):
        check(case, list(by_rank))


def _attend(cases: list[Decode]) -> list[Outputs]:
    mesh, results = init_device_mesh("cpu", (dist.get_world_size(),)), []
    for case in cases:
        query, key, value = case.inputs()
        here = case.positions(dist.get_rank())
        kv = key[:, :, here], value[:, :, here]
        results.append(decode_attention(query, *kv, mesh=mesh, return_lse=True, **options_of(case)))
    return results


def test_layouts_shard_by_default(pool: Pool) -> None:
    """Queries are then the last positions, and see causally."""
    for layout in LAYOUTS:
        case = Decode(layout, 16, (14,), 2, 2)
        check(case, pool.run(2, _attend_by_layout, case))


def _attend_by_layout(case: Decode) -> Outputs:
    mesh = init_device_mesh("cpu", (2,))
    SequenceAxis(mesh, case.layout)
    query, key, value = case.inputs()
    here = case.positions(dist.get_rank())
    kv = key[:, :, here], value[:, :, here]
    return decode_attention(query, *kv, mesh=mesh, scale=case.scale, return_lse=True)


def test_alone() -> None:
    """Without a mesh, of a window that a cache has kept."""
    case = Decode((((7, 9),),), 16, (14, 9), 1, 2, Mask.sliding(4), sinks=SINKS)
    query, key, value = case.inputs()
    here = case.positions(0)
    kv = key[:, :, here], value[:, :, here]
    check(case, [decode_attention(query, *kv, return_lse=True, **options_of(case))])


X = torch.zeros(2, 4, 1, 8)
KEYS = torch.zeros(2, 2, 6, 8)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no queries": ({"query": X[:, :, :0]}, "query must have 1 to 64 tokens to decode, got 0"),
    "many queries": (
        {"query": X.expand(2, 4, 65, 8)},
        "query must have 1 to 64 tokens to decode, got 65; .* ring_attention",
    ),
    "more queries than keys": (
        {"query": X.expand(2, 4, 8, 8)},
        "query has 2 tokens more than key has positions.*; pass query_starts",
    ),
    "batch": ({"query": X[:1]}, "disagree in batch, heads or length"),
    "key_runs of other lengths": (
        {"key_runs": torch.tensor([[[0, 5]]])},
        "key must hold the 5 tokens that key_runs gives rank 0 of 1, got 6",
    ),
    "key_runs of two ranks": (
        {"key_runs": torch.tensor([[[0, 6]], [[6, 2]]])},
        "key_runs must have a row for each of the 1 ranks, got 2",
    ),
    "key_runs of one dim": ({"key_runs": torch.tensor([0, 6])}, r"shape \(W, R, 2\), got \(2,\)"),
    "key_runs of floats": ({"key_runs": torch.zeros(1, 1, 2)}, "key_runs must be int32 or int64"),
    "query_starts of three": (
        {"query_starts": torch.tensor([1, 2, 3])},
        r"query_starts must have shape \(1,\) or \(2,\), got \(3,\)",
    ),
    "negative query_starts": ({"query_starts": torch.tensor([-1])}, "query_starts must be from 0"),
    "merge": ({"merge": "three_shot"}, "unknown merge 'three_shot'; known merges: one_shot"),
    "agree": ({"agree": torch.zeros(3)}, "agree must be int32 or int64"),
    "kernel": ({"kernel": "quick"}, "unknown kernel 'quick'"),
    "slices and a mask": (
        {"mask": Mask.causal(), "slices": torch.tensor([[0, 6, 0, 6, 0, 0]])},
        "slices say all that is seen",
    ),
    "documents that fall": ({"cu_seqlens": torch.tensor([0, 5, 3])}, "never decrease"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_with_reasons(name: str) -> None:
    odd, reported = BAD[name]
    with pytest.raises(ValueError, match=reported):
        decode_attention(**{"query": X, "key": KEYS, "value": KEYS} | odd)


@pytest.mark.parametrize(
    ("odd", "reported"),
    [
        ({"key_runs": [[[0, 6]]]}, "key_runs must be a plain tensor"),
        ({"merge": 2}, "merge must be a name, a str, got 2"),
        ({"mesh": "cp"}, "mesh must be a DeviceMesh"),
        ({"return_lse": X}, "return_lse must be True or False"),
        ({"query": 3}, "query must be a tensor"),
    ],
)
def test_other_types(odd: dict[str, Any], reported: str) -> None:
    with pytest.raises(TypeError, match=reported):
        decode_attention(**{"query": X, "key": KEYS, "value": KEYS} | odd)


@pytest.mark.parametrize("name", ["query", "key", "value", "sinks"])
def test_no_gradient(name: str) -> None:
    inputs = {"query": X, "key": KEYS, "value": KEYS, "sinks": torch.zeros(4)}
    inputs[name] = inputs[name].clone().requires_grad_()
    with pytest.raises(NotImplementedError, match=re.escape("within torch.no_grad()")):
        decode_attention(**inputs)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not decode_attention(**inputs).requires_grad


def test_autocast_casts_as_sdpa() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert decode_attention(X, KEYS, KEYS).dtype == torch.bfloat16


VIEWS = {
    "token-major": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a larger cache": lambda x: torch.cat([x, x], 2)[:, :, : x.shape[2]],
    "head dim first": lambda x: x.mT.contiguous().mT,
    "every second number": lambda x: torch.cat([x, x], 3)[..., ::2],
}


@pytest.mark.parametrize("kernel", [None, "reference"])
@pytest.mark.parametrize("name", VIEWS)
def test_strides_do_not_matter(name: str, kernel: str | None) -> None:
    case = Decode((((0, 16),),), 16, (13,), 1, 3, kernel=kernel)

    def attend(*inputs: Tensor) -> Outputs:
        return decode_attention(*inputs, return_lse=True, **options_of(case))

    views = [VIEWS[name](x) for x in case.inputs()]
    for seen, plain in zip(attend(*views), attend(*map(Tensor.contiguous, views)), strict=True):
        torch.testing.assert_close(seen, plain, atol=1e-12, rtol=0.0)
