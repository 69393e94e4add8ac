"""What torch.compile sees of a decode call, how often it compiles, and what is counted of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from dtensor_ring import Mask, SequenceAxis, ShardedCache, ZigZag, decode_attention
from dtensor_ring.decode.call import DecodeBatch, DecodeCall, DecodePlace, flatten_decode
from dtensor_ring.decode.op import decode_op
from dtensor_ring.planning.slices import Slices
from tests.decode.test_decode_op import options_of
from tests.decoding import Decode
from tests.dense import dense_attention
from tests.ops.test_fakes import description
from tests.pool import Pool, on_ranks
from tests.rings import fake_group

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
        cache.begin(8, dealt=True)  # compilers take no and one column for lengths of their own
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
