"""The public functions: what is right for each argument, and what a valid call returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import LlamaConfig, LlamaForCausalLM

import dtensor_ring as ring
from dtensor_ring import Mask
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.kernels.registry import unregister_kernel
from dtensor_ring.dtensor.annotation import annotation_of
from parallel_plans.huggingface import context_parallel_plan
from tests.bad_calls.values import Make, dtensor, ints, tensor
from tests.dense import dense_attention
from tests.families import SMALL

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}


def _nothing(arguments: dict[str, Any], result: Any) -> None:
    """That a valid call returns is all there is to check."""


@dataclass(frozen=True)
class Function:
    """One public function: `call(mesh, **arguments)`, and right values of each argument."""

    call: Callable[..., Any]
    right: dict[str, list[Make]]
    check: Callable[[dict[str, Any], Any], None] = _nothing


class Mine(Reference):
    name = "mine"


class Attention(nn.Module):
    def forward(self, query: Any, key: Any, value: Any) -> Any:
        return ring.ring_attention(query, key, value)


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


def _check_same(name: str) -> Callable[[dict[str, Any], Any], None]:
    """One rank holds all tokens in order, so what comes back is what was given."""

    def check(arguments: dict[str, Any], result: Any) -> None:
        given, found = _local(arguments[name]), _local(result)
        assert found.dtype == given.dtype or not given.is_floating_point()
        if given.device.type != "meta" and not given.is_quantized and given.dtype.itemsize > 1:
            assert torch.equal(found.to(given.dtype), given)

    return check


def _check_exchanged(arguments: dict[str, Any], result: Any) -> None:
    """One rank has all tokens and all heads."""
    for given, found in zip(arguments["tensors"], result, strict=True):
        _check_same("given")({"given": given}, found)


def _check_positions(arguments: dict[str, Any], result: Tensor) -> None:
    assert result.tolist() == list(range(arguments["seq_len"]))


def _check_labels(arguments: dict[str, Any], result: Tensor) -> None:
    assert (result.shape, result.dtype) == (arguments["tokens"].shape, arguments["tokens"].dtype)


def _just(*values: Any) -> list[Make]:
    return [lambda _, value=value: value for value in values]


def _made(*makes: Callable[[], Any]) -> list[Make]:
    return [lambda _, make=make: make() for make in makes]


def _on_axis(method: str) -> Callable[..., Any]:
    return lambda mesh, **given: getattr(ring.SequenceAxis(mesh), method)(**given)


def _on_pool(method: str) -> Callable[..., Any]:
    """Of a pool with a sequence, which the methods but `add` take first."""

    def call(_: DeviceMesh, **given: Any) -> Any:
        pool = ring.BlockPool(num_blocks=8, block=2, world_size=2)
        sequence = pool.add(range(5))
        first = () if method == "add" else (sequence,)
        return getattr(pool, method)(*first, **given)

    return call


def _on_cache(method: str, **turn: Any) -> Callable[..., Any]:
    """A method of a cache of two sequences of 8 tokens."""

    def call(mesh: DeviceMesh, **given: Any) -> Any:
        cache = ring.ShardedCache(mesh, 1)
        for begun in ({"num_tokens": 8, "dealt": True}, turn):
            if begun:
                cache.begin(**begun)
            if begun is not turn:
                cache[0].append(*(torch.zeros(2, 2, 8, 4) for _ in range(2)))
        return getattr(cache[0] if method == "append" else cache, method)(**given)

    return call


def _paged(method: str | None) -> Callable[..., Any]:
    """A batch of one sequence, or one of its methods."""

    def call(_: DeviceMesh, **given: Any) -> Any:
        cache = ring.PagedCache(ring.BlockPool(num_blocks=8, block=2), 2, 4, 1)
        sequence = cache.pool.add(range(5))
        if method is None:
            return ring.PagedBatch(cache, [sequence], **given)
        return getattr(ring.PagedBatch(cache, [sequence]), method)(**given)

    return call


def _registered(mesh: DeviceMesh, **given: Any) -> None:
    try:
        ring.register_kernel(**given)
    finally:
        if "mine" in ring.available_kernels():
            unregister_kernel("mine")


def _parallel(mesh: DeviceMesh, **given: Any) -> Any:
    style = ring.ContextParallel()
    return parallelize_module(Attention(), mesh, style)(*given.values())


def _model(mesh: DeviceMesh | None = None) -> nn.Module:
    model = LlamaForCausalLM(LlamaConfig(**SMALL | {"num_hidden_layers": 1}))
    return parallelize_module(model, mesh, context_parallel_plan(model)) if mesh else model


def reset(mesh: DeviceMesh) -> None:
    """Forget how the axis was configured: each call is the first."""
    annotation_of(mesh.get_group()).config = None


SLICES = ring.Slices.prefix([0, 8], 3)
Right = dict[str, list[Make]]
QKV: Right = {
    # As they are, and where not all strides are those of a contiguous tensor.
    name: _made(tensor, lambda: tensor(1, 8, 2, 4).transpose(1, 2))
    for name in ("query", "key", "value")
}
SHARDED: Right = {name: [dtensor] for name in QKV}
DIMS: Right = {"dim": _just(2, -2)}
OPTIONS: Right = {
    "mask": _just(Mask.full(), Mask.causal(), Mask.sliding(2), Mask.local(1, 3), Mask.chunked(3))
    + _just(Mask.prefix_causal(2), Mask.sliding(2**63 - 1)),
    "cu_seqlens": _made(lambda: ints(0, 3, 8), lambda: ints([0, 3, 3, 6]), lambda: None),
    "key_cu_seqlens": _just(None),
    "runs": _just(None),
    "key_runs": _just(None),
    "slices": _just(None),
    "sinks": _made(lambda: None, lambda: tensor(2), lambda: tensor(2, dtype=torch.bfloat16)),
    "scale": _just(None, 0.3, -1, 0),
    "softcap": _just(0.0, 0, 1.5, 30),
}
CALLED: Right = {
    **OPTIONS,
    "kernel": _just(None, "reference"),
    "return_lse": _just(False, True),
    "strategy": _just(None, "all_gather", "ulysses"),
    "validate": _just(False, True),
}
DECODED: Right = {
    **{name: x for name, x in OPTIONS.items() if name not in ("key_cu_seqlens", "runs")},
    "kernel": CALLED["kernel"],
    "return_lse": CALLED["return_lse"],
    "key_runs": _made(lambda: None, lambda: ints([[0, 8]]), lambda: ints([[0, 3], [3, 5], [0, 0]])),
    "query_starts": _made(lambda: None, lambda: ints(0)),
    "merge": _just(None, "one_shot", "two_shot"),
    "agree": _made(lambda: None, lambda: torch.arange(5)),
    "mesh": [lambda mesh: mesh, lambda _: None],
}
AXIS: Right = {
    "layout": _just("zigzag", "contiguous", "block_cyclic:2", ring.Striped()),
    "strategy": _just(None, "ring", "direct", "ulysses"),
    "kernel": _just(None, "reference"),
    "policy": _just(None, ring.TransferPolicy(torch.bfloat16)),
}
PLANNED: Right = {
    "mask": OPTIONS["mask"],
    "seq_len": _just(8, 12),
    "world_size": _just(1, 2, 4),
    "cu_seqlens": _just(None, (0, 3, 8), [[0, 8], [0, 5]]),
}
STRATEGY: Right = {"strategy": _just("ring", "all_gather", "ulysses")}
COMPARED: Right = {
    "heads": _just((4, 2), [6, 1]),
    "head_dim": _just(8),
    "layout": _just("zigzag", "contiguous"),
    "batch": _just(1, 2),
    "dtype": _just(torch.float16, torch.float64),
    "policy": AXIS["policy"][1:],
    "strategies": _just(None, ["ulysses", "ring"]),
    "max_held": _just(None, 0, 10**9),
}
TOKENS: Right = {
    "tokens": _made(lambda: torch.arange(8), lambda: torch.ones(1, 8, dtype=torch.int32)),
    "cu_seqlens": _made(lambda: None, lambda: ints(0, 3, 8)),
    "ignore_index": _just(-100, 0),
}
MASK: Right = {
    "left": _just(None, 0, 5),
    "right": _just(None, 0, 5),
    "chunk": _just(None),
    "prefix": _just(None, 3),
}
BOUNDS: Right = {
    "cu_seqlens": _made(lambda: ints(0, 3, 8), lambda: [0, 8], lambda: [[0, 8], [0, 5]])
}
BANDS_ONLY = _just(Mask.causal(), Mask.sliding(2))
LENGTHS: Right = {"lengths": _just([3, 2], [[3, 2], [5, 0]])}
BUILDERS: dict[str, Right] = {
    "documents": BOUNDS | {"mask": OPTIONS["mask"]},
    "prefix": BOUNDS | {"prefix_lengths": _just(0, 3)},
    "blocks": BOUNDS | {"begins": _just([3]), "ends": _just([5]), "mask": BANDS_ONLY},
    "global_tokens": BOUNDS | {"num_global": _just(0, 3), "window": _just(0, 3)},
    "bottom_right": {
        "cu_seqlens": _just([0, 4]),
        "key_cu_seqlens": _just([0, 8], [0, 3]),
        "mask": BANDS_ONLY,
    },
    "per_query": {"begins": _just([0, 2]), "ends": _just([2, 5])},
    "block_causal": LENGTHS | {"num_earlier": _just(None, 1)},
    "block_diffusion": LENGTHS,
    "tree": {"parents": _just([-1, 0]), **LENGTHS},
    "shared_prefix": {"prefix_lengths": _just(2, [2]), "answer_lengths": _just([2, 3])},
    "batched": {"parts": _just([SLICES, SLICES], [])},
}
PAGED: Right = {
    "num_kv_heads": _just(2),
    "head_dim": _just(4),
    "num_layers": _just(1, 2),
    "rank": _just(0),
    "value_head_dim": _just(None, 3),
}
QUERIES: Right = {
    "layer": _just(0),
    "query": _made(lambda: tensor(1, 2, 1, 4), lambda: tensor(1, 1, 2, 4).transpose(1, 2)),
    **{name: OPTIONS[name] for name in ("scale", "softcap")},
    "mask": OPTIONS["mask"],
    "kernel": _just(None, "in_place", "gathered"),
}
POOLED: Right = {"tokens": _made(lambda: [1, 2, 3], lambda: torch.arange(3), tuple)}
MESH: Right = {"mesh": [lambda mesh: mesh]}
INPUTS: Right = {"inputs": _just(("query", "key", "value"), ["q", "kv"])}
IDS: Right = {
    "input_ids": _made(lambda: torch.arange(8).unsqueeze(0), lambda: torch.ones(2, 8).long())
}


def _block_mask() -> BlockMask:
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device="cpu")


def _check_slices(arguments: dict[str, Any], result: ring.Slices) -> None:
    """They are disjoint, and are drawn."""
    result.check(2**40, 2**40)
    assert str(result)


def _without_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, **given: function(**given)


FUNCTIONS: dict[str, Function] = {
    "ring_attention": Function(
        lambda _, **given: ring.ring_attention(**given), QKV | CALLED | MESH, check_attention
    ),
    "ring_attention of a turn": Function(
        lambda _, **given: ring.ring_attention(**given),
        QKV
        | MESH
        | {name: _made(lambda: ints([[0, 8]])) for name in ("runs", "key_runs")}
        | {"mask": OPTIONS["mask"]},
        check_attention,
    ),
    "ring_attention on DTensors": Function(
        lambda _, **given: ring.ring_attention(**given), SHARDED | CALLED, check_attention
    ),
    "decode_attention": Function(
        lambda _, **given: ring.decode_attention(**given), QKV | DECODED, check_attention
    ),
    "SequenceAxis.attention": Function(
        _on_axis("attention"),
        QKV | OPTIONS | {"seq_len": _just(None, 8), "strategy": CALLED["strategy"]},
        check_attention,
    ),
    "SequenceAxis.shard": Function(
        _on_axis("shard"), {"tensor": QKV["query"], **DIMS}, _check_same("tensor")
    ),
    "SequenceAxis.unshard": Function(
        _on_axis("unshard"), {"dtensor": [dtensor], **DIMS}, _check_same("dtensor")
    ),
    "SequenceAxis.sum": Function(_on_axis("sum"), {"local": QKV["query"]}, _check_same("local")),
    "SequenceAxis.prepare": Function(
        _on_axis("prepare"),
        {name: OPTIONS[name] for name in ("mask", "cu_seqlens", "runs")} | {"seq_len": _just(8, 9)},
        _nothing,
    ),
    "SequenceAxis.positions": Function(
        _on_axis("positions"), {"seq_len": _just(8, 0, 9)}, _check_positions
    ),
}
FUNCTIONS |= {
    name: Function(_without_mesh(getattr(ring, name)), right, check)
    for name, right, check in (
        ("SequenceAxis", MESH | AXIS | {"transport": _just(None)}, _nothing),
        ("set_sequence_layout", MESH | AXIS, _nothing),
        ("sequence_layout", MESH, _nothing),
        (
            "ShardedCache",
            MESH
            | {"num_layers": _just(1, 3), "layout": _just(None, "zigzag"), "block": _just(1, 256)},
            _nothing,
        ),
        (
            "exchange",
            {
                "tensors": _made(lambda: [tensor(), tensor(1, 4, 8, 3)], lambda: (tensor(),)),
                **MESH,
                "to": _just("heads", "tokens"),
                "heads": _just(None, 1),
                "num_heads": _just(None),
                "num_key_heads": _just(None, 1, 2),
                "seq_len": _just(None, 8),
                "runs": _just(None),
            },
            _check_exchanged,
        ),
        (
            "relayout",
            {
                **{"tensor": [*QKV["query"], dtensor], **MESH, **DIMS, "seq_len": _just(None)},
                "to": _just("contiguous", "zigzag", ring.Balanced(Mask.causal(), 8, 1)),
                "layout": _just(None, "zigzag", ring.Striped()),
            },
            _check_same("tensor"),
        ),
        (
            "shard_sequence",
            {"tensor": QKV["query"], **MESH, **DIMS, "layout": _just(None, "zigzag")},
            _check_same("tensor"),
        ),
        (
            "unshard_sequence",
            {"dtensor": [dtensor], **DIMS, "layout": _just(None)},
            _check_same("dtensor"),
        ),
        ("sum_over_sequence", {"local": QKV["query"], **MESH}, _check_same("local")),
        ("sequence_runs", {"layout": _just(ring.Balanced(Mask.causal(), 8, 2))}, _nothing),
        ("slices_of_block_mask", {"block_mask": _made(_block_mask)}, _nothing),
        ("describe_schedule", PLANNED | {"layout": _just("zigzag"), **STRATEGY}, _nothing),
        ("compare_layouts", PLANNED, _nothing),
        ("compare_strategies", PLANNED | COMPARED, _nothing),
        ("Balanced", PLANNED | {"block": _just(None, 2)}, _nothing),
        ("BlockCyclic", {"block": _just(2)}, _nothing),
        (
            "BlockPool",
            {"num_blocks": _just(4), "block": _just(2, 64), "world_size": _just(1, 2)},
            _nothing,
        ),
        (
            "Mask",
            dict.fromkeys(("left", "right"), _just(None, 0, 5))
            | {"chunk": _just(None), "prefix": _just(None, 3)},
            _nothing,
        ),
        (
            "TransferPolicy",
            {
                "kv_dtype": _just(None, torch.bfloat16),
                "grad_dtype": _just(torch.float32, torch.float16),
                "num_parts": _just(None, 4),
            },
            _nothing,
        ),
        ("next_token_labels", TOKENS, _check_labels),
        ("merge_attention", {"parts": _made(lambda: [(tensor(), tensor(1, 2, 8))] * 2)}, _nothing),
        (
            "ContextParallel",
            AXIS | INPUTS,
            _nothing,
        ),
    )
}
FUNCTIONS |= {
    "PagedCache": Function(lambda _, **given: ring.PagedCache(ring.BlockPool(4), **given), PAGED),
    "PagedBatch": Function(_paged(None), {"num_tokens": _just(1, 2)}),
    "PagedBatch.attend": Function(_paged("attend"), QUERIES),
    "PagedBatch.decode": Function(
        _paged("decode"),
        QUERIES | {"sinks": OPTIONS["sinks"], "mesh": [lambda _: None, lambda mesh: mesh]},
    ),
    "PagedBatch.write": Function(
        _paged("write"), {"layer": _just(0)} | dict.fromkeys(("key", "value"), QUERIES["query"])
    ),
}
FUNCTIONS |= {
    f"BlockPool.{name}": Function(_on_pool(name), right)
    for name, right in (
        ("add", POOLED),
        ("append", POOLED),
        ("crop", {"length": _just(0, 5)}),
        ("commit", {"length": _just(None, 5)}),
        ("block_table", {"rank": _just(0, 1)}),
        ("runs", {"begin": _just(0, 3)}),
    )
}
FUNCTIONS |= {
    f"ShardedCache.{name}": Function(_on_cache(name, **turn), right)
    for name, turn, right in (
        ("begin", {}, {"num_tokens": _just(1, 8), "dealt": _just(False, True)}),
        (
            "append",
            {"num_tokens": 3, "dealt": False},
            {name: _made(lambda: tensor(2, 2, 3, 4)) for name in ("key", "value")},
        ),
        ("crop", {}, {"seq_len": _just(0, 5, 8)}),
        ("select", {}, {"rows": _made(lambda: ints(1), lambda: ints(0, 1, 0))}),
        ("reorder", {}, {"rows": _made(lambda: ints(1, 1))}),
        ("repeat", {}, {"times": _just(1, 2)}),
    )
}
FUNCTIONS |= {
    f"Slices.{name}": Function(_without_mesh(getattr(ring.Slices, name)), right, _check_slices)
    for name, right in BUILDERS.items()
}
FUNCTIONS |= {
    "Slices": Function(
        _without_mesh(ring.Slices),
        {
            "query_ranges": _just([(0, 3)], ints([0, 3])),
            "key_ranges": _just([(0, 5)], ints([2, 5])),
            "bands": _just([(None, 0)], [(3, -1)]),
        },
        _check_slices,
    ),
    "Slices.shifted": Function(
        _without_mesh(SLICES.shifted), {"by": _just(0, 3), "key_by": _just(None, 2)}, _check_slices
    ),
    "Slices.sees": Function(
        _without_mesh(SLICES.sees), {"query": _just(0), "key": _just(9), "row": _just(0, 1)}
    ),
    "sequence_slices": Function(
        _without_mesh(ring.sequence_slices), {"slices": _just(SLICES), "num_slices": _just(None, 5)}
    ),
    "merge_attention, one part": Function(
        lambda _, out, lse: ring.merge_attention([(out, lse)])[0],
        {"out": QKV["query"], "lse": _made(lambda: tensor(1, 2, 8))},
        _check_same("out"),
    ),
    "register_kernel": Function(
        _registered, {"kernel": _made(Mine), "before": _just(None, "cpu_flash")}, _nothing
    ),
    "ContextParallel, called": Function(_parallel, QKV),
    "context_parallel_plan": Function(
        _without_mesh(context_parallel_plan), {"model": _made(_model), **AXIS}
    ),
    "context_parallel_plan, called": Function(
        lambda mesh, **given: _model(mesh)(**given),
        {
            **IDS,
            "labels": _made(lambda: None),
            "attention_mask": _made(lambda: None),
            "position_ids": _made(lambda: None, lambda: torch.arange(8).unsqueeze(0)),
        },
    ),
}
