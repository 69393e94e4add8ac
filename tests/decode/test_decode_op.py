"""The decode op over processes: shards and DTensors, eager and compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils.flop_counter import FlopCounterMode

from dtensor_ring import Mask, SequenceAxis, ShardedCache, ZigZag, decode_attention
from dtensor_ring.decode.call import DecodeBatch, DecodeCall, DecodePlace, flatten_decode
from dtensor_ring.decode.op import decode_op
from dtensor_ring.dtensor.placement import without
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.slices import Slices
from tests.decoding import Decode, Outputs, check
from tests.dense import dense_attention
from tests.layouts import LAYOUTS
from tests.meshes import BATCH, HEADS, REPLICATE, SEQUENCE, annotated_mesh, place
from tests.ops.test_fakes import description
from tests.pool import Pool, on_ranks
from tests.refusals import Refused, check_refused
from tests.rings import fake_group

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
BAD: Refused = {
    ValueError: {
        "query must have 1 to 64 tokens to decode, got 0": {"query": X[:, :, :0]},
        "query must have 1 to 64 tokens to decode, got 65; .* ring_attention": {
            "query": X.expand(2, 4, 65, 8)
        },
        "query has 2 tokens more than key has positions.*; pass query_starts": {
            "query": X.expand(2, 4, 8, 8)
        },
        "disagree in batch, heads or length": {"query": X[:1]},
        "key must hold the 5 tokens that key_runs gives rank 0 of 1, got 6": {
            "key_runs": torch.tensor([[[0, 5]]])
        },
        "key_runs must have a row for each of the 1 ranks, got 2": {
            "key_runs": torch.tensor([[[0, 6]], [[6, 2]]])
        },
        r"shape \(W, R, 2\), got \(2,\)": {"key_runs": torch.tensor([0, 6])},
        "key_runs must be int32 or int64": {"key_runs": torch.zeros(1, 1, 2)},
        r"query_starts must have shape \(1,\) or \(2,\), got \(3,\)": {
            "query_starts": torch.tensor([1, 2, 3])
        },
        "query_starts must be from 0": {"query_starts": torch.tensor([-1])},
        "unknown merge 'three_shot'; known merges: one_shot": {"merge": "three_shot"},
        "agree must be int32 or int64": {"agree": torch.zeros(3)},
        "unknown kernel 'quick'": {"kernel": "quick"},
        "slices say all that is seen": {
            "mask": Mask.causal(),
            "slices": torch.tensor([[0, 6, 0, 6, 0, 0]]),
        },
        "never decrease": {"cu_seqlens": torch.tensor([0, 5, 3])},
    },
    TypeError: {
        "key_runs must be a plain tensor": {"key_runs": [[[0, 6]]]},
        "merge must be a name, a str, got 2": {"merge": 2},
        "mesh must be a DeviceMesh": {"mesh": "cp"},
        "return_lse must be True or False": {"return_lse": X},
        "query must be a tensor": {"query": 3},
    },
}


def test_refused_with_reasons() -> None:
    inputs = {"query": X, "key": KEYS, "value": KEYS}
    check_refused(BAD, lambda odd: decode_attention(**inputs | odd))


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


# A query that every rank holds, against keys that are sharded: placements say it.

PLACED: dict[str, tuple[tuple[Placement, ...], str, int]] = {
    "dp, cp": ((BATCH, SEQUENCE), "zigzag", 1),
    "cp, tp": ((SEQUENCE, HEADS), "contiguous", 3),
    "replicate, cp": ((REPLICATE, SEQUENCE), "striped", 2),
}


@pytest.mark.parametrize("name", PLACED)
@on_ranks(4)
def test_by_placements(name: str) -> None:
    """Of scaled_dot_product_attention and of decode_attention, eager and compiled."""
    placements, layout, num_queries = PLACED[name]
    mesh = annotated_mesh((2, 2), placements, layout)
    inputs = whole_inputs(num_queries)
    tensors, seq_len = placed(inputs, mesh, placements), inputs[1].shape[2]
    seen = torch.ones(2, num_queries, seq_len, dtype=torch.bool)
    last = seen.tril(seq_len - num_queries)
    window = last & ~seen.tril(seq_len - num_queries - 5)
    sdpa, sliding = F.scaled_dot_product_attention, Mask.sliding(4)
    attentions: list[tuple[Callable[..., Any], Tensor]] = [
        (lambda *x: sdpa(*x, enable_gqa=True), seen),
        (lambda *x: sdpa(*x, enable_gqa=True, is_causal=True), seen.tril()),
        (decode_attention, last),
        (lambda *x: decode_attention(*x, mask=sliding, merge="two_shot"), window),
    ]

    def all_of_them(*inputs: Any) -> list[Any]:
        return [attend(*inputs) for attend, _ in attentions]

    compiled = torch.compile(all_of_them, fullgraph=True, backend="aot_eager")
    expected = [dense_attention(*inputs, Mask.full(), seen=sees).out for _, sees in attentions]
    for run, mode in (
        (all_of_them, torch.no_grad),
        (all_of_them, torch.inference_mode),
        (compiled, torch.no_grad),
    ):
        with mode():
            outs = run(*tensors)
        for out, wanted in zip(outs, expected, strict=True):
            assert tuple(out.placements) == without(placements)
            torch.testing.assert_close(out.full_tensor().double(), wanted, atol=1e-5, rtol=1e-5)


def whole_inputs(num_queries: int, seq_len: int = 14) -> list[Tensor]:
    shapes = (4, num_queries, 8), (2, seq_len, 8), (2, seq_len, 8)
    return [torch.randn(2, *shape) for shape in shapes]


def placed(
    inputs: list[Tensor], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> list[DTensor]:
    query, key, value = inputs
    return [
        place(query, mesh, without(placements)),
        *(place(x, mesh, placements) for x in (key, value)),
    ]


@on_ranks(4)
def test_options_by_batch_row() -> None:
    """Boundaries and starts of the whole batch, whose rows are sharded; sinks of sharded heads."""
    placements = (BATCH, SEQUENCE)
    mesh = annotated_mesh((2, 2), placements, "zigzag")
    inputs, sinks = whole_inputs(1), torch.randn(4)
    starts = torch.tensor([13, 6])
    bounds = torch.tensor([[0, 3, 14], [0, 5, 14]])
    seen = torch.zeros(2, 1, 14, dtype=torch.bool)
    seen[0, 0, 3:14] = seen[1, 0, 5:7] = True
    dense = dense_attention(*inputs, Mask.full(), seen=seen, sinks=sinks)
    replicated = DTensor.from_local(sinks, mesh, [REPLICATE] * 2)
    tensors = placed(inputs, mesh, placements)
    out, lse = decode_attention(
        *tensors, query_starts=starts, cu_seqlens=bounds, sinks=replicated, return_lse=True
    )
    torch.testing.assert_close(out.full_tensor().double(), dense.out, atol=1e-5, rtol=1e-5)  # type: ignore[attr-defined]
    torch.testing.assert_close(lse.full_tensor().double(), dense.lse, atol=1e-5, rtol=1e-5)  # type: ignore[attr-defined]


@on_ranks(2)
def test_refused() -> None:
    mesh = annotated_mesh((2,), (SEQUENCE,), "zigzag")
    tensors = placed(whole_inputs(1), mesh, (SEQUENCE,))
    for run in (F.scaled_dot_product_attention, decode_attention):
        options: dict[str, Any] = {} if run is decode_attention else {"enable_gqa": True}
        with pytest.raises(NotImplementedError, match=r"no gradient.* torch\.no_grad\(\)"):
            run(tensors[0].clone().requires_grad_(), *tensors[1:], **options)
    query, key, value = tensors
    cases: list[tuple[list[Any], type[Exception], str]] = [
        ([query, key.to_local(), value], TypeError, "must all be DTensors or none"),
        ([key, key, value], ValueError, "query as they are, but Replicate over the axis"),
        ([query, query, query], ValueError, "exactly one mesh axis, it is on no axis"),
    ]
    for given, kind, reported in cases:
        with pytest.raises(kind, match=reported):
            decode_attention(*given)
    with pytest.raises(ValueError, match="mesh is for plain tensors"):
        decode_attention(query, key, value, mesh=mesh)
    many = place(torch.randn(2, 4, 65, 8), mesh, (REPLICATE,))
    with torch.no_grad(), pytest.raises(ValueError, match="must be sharded alike"):
        F.scaled_dot_product_attention(many, key, value, enable_gqa=True)


# What torch.compile sees of a decode call, how often it compiles, and what is counted of it.

NUM_STEPS = 100


@on_ranks(2, timeout=300)
def test_a_hundred_steps_compile_twice_at_most() -> None:
    """With keys that grow; the runs of the cache have room for more."""
    graphs: list[Any] = []

    def capture(module: Any, inputs: Any) -> Any:
        graphs.append(module.graph)
        return module.forward

    mesh, error = init_device_mesh("cpu", (2,)), 0.0
    SequenceAxis(mesh, "zigzag")
    counter = CompileCounterWithBackend(capture)
    whole = torch.randn(2, 1, 2, NUM_STEPS + 8, 8)
    cache = ShardedCache(mesh, 1, "zigzag", block=16)
    with torch.no_grad():
        cache.begin(8, dealt=True)  # a compiler specialises on 0 and 1 columns
        cache[0].append(*whole[:, :, :, ZigZag().positions(mesh.get_local_rank(), 2, 8)])

        @torch.compile(backend=counter, fullgraph=True)
        def attend(query: Tensor, key: Tensor, value: Tensor, key_runs: Tensor) -> Tensor:
            return decode_attention(query, key, value, key_runs=key_runs, mesh=mesh)

        for end in range(9, NUM_STEPS + 9):
            cache.begin(1, dealt=False)
            keys, values = cache[0].append(*whole[:, :, :, end - 1 : end])
            query = torch.randn(1, 4, 1, 8, generator=torch.Generator().manual_seed(end))
            out = attend(query, keys, values, cache.key_runs)
            if end % 9 == 0:
                dense = dense_attention(query, *whole[:, :, :, :end], Mask.full())
                error = max(error, (out - dense.out).abs().max().item())
    ours = [x for x in graphs[-1].nodes if "decode_attention" in str(x.target)]
    assert counter.frame_count <= 2
    assert len(ours) == 1
    assert error < 1e-5


CHECKED = {
    "runs and rows": Decode((((0, 3), (5, 7)),), 12, (11, 4), dtype=torch.float32),
    "sinks and softcap": Decode(
        (((0, 12),),), 12, (8,), 1, 4, sinks=(0.5, 1.0, 2.0, 0.0), softcap=2.0, dtype=torch.float32
    ),
    "documents": Decode((((0, 12),),), 12, (8,), 1, 4, documents=((0, 5, 12),)),
    "bfloat16": Decode((((0, 12),),), 12, (8,), 1, 4, dtype=torch.bfloat16, head_dims=(8, 4)),
    "no keys": Decode(((),), 12, (8,)),
}


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name: str) -> None:
    case = CHECKED[name]
    query, key, value = case.inputs()
    here = case.positions(0)
    options = flatten_decode(_call(case))
    tensors = query, key[:, :, here], value[:, :, here]
    torch.library.opcheck(decode_op, (*tensors, *options))


def _call(case: Decode, **place: Any) -> DecodeCall:
    given = options_of(case)
    names = ("cu_seqlens", "key_runs", "query_starts")
    batch = DecodeBatch(**{name: given[name] for name in names})
    return DecodeCall(batch, case.scores(), DecodePlace(**place))


PROMISED = {
    **CHECKED,
    "two ranks": Decode((((0, 5),), ((5, 7),)), 12, (11,), 2, dtype=torch.bfloat16),
    "two shots": Decode(
        (((0, 5),), ((5, 7),)), 12, (8, 9), 2, 3, sinks=(0.0,) * 4, merge="two_shot"
    ),
}


@pytest.mark.parametrize("token_major", [False, True])
def test_fakes_promise_what_is_returned(pool: Pool, token_major: bool) -> None:
    for name, case in PROMISED.items():
        for promised, returned in pool.run(case.world_size, _described, case, token_major):
            assert promised == returned, name


def _described(case: Decode, token_major: bool) -> tuple[list[Any], list[Any]]:
    """Dtype, sizes and strides of the results, of fake tensors and of real ones."""
    query, key, value = case.inputs()
    if token_major:
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    here = case.positions(dist.get_rank())
    call = _call(case, group_name=dist.group.WORLD.group_name, merge=case.merge)
    described = []
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), nullcontext()):
        with mode:
            results = decode_op(query, key[:, :, here], value[:, :, here], *flatten_decode(call))
        described.append([description(x) for x in results])
    return described[0], described[1]


def test_flops_are_those_of_the_visible_pairs(pool: Pool) -> None:
    case = Decode((((0, 3), (9, 2)), ((3, 6), (11, 5))), 16, (13, 5), 2, 3, head_dims=(8, 4))
    for call in (
        case,
        replace(case, mask=Mask.full(), slices=Slices([(4, 9)], [(2, 12)], [(4, 0)])),
    ):
        flops = [pool.run(1, _flops, call, rank)[0] for rank in range(2)]
        assert sum(flops) == 4 * int(call.seen().sum()) * 2 * (8 + 4)


def _flops(case: Decode, rank: int) -> int:
    with fake_group(2, rank):
        query, key, value = case.inputs()
        here = case.positions(rank)
        call = _call(case, group_name=dist.group.WORLD.group_name)
        if case.slices is not None:
            table = torch.from_numpy(case.slices.numbers)
            call = call._replace(batch=call.batch._replace(slices=table))
        with FlopCounterMode(display=False) as counter:
            decode_op(query, key[:, :, here], value[:, :, here], *flatten_decode(call))
        return counter.get_total_flops()
