"""Several calls that merge are one attention: outputs, lse and all gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard

from dtensor_ring import Mask, merge_attention, ring_attention, unshard_sequence
from tests.dense import dense_attention
from tests.meshes import BATCH, HEADS, REPLICATE, SEQUENCE, annotated_mesh, place, random_inputs
from tests.pool import Pool, on_ranks
from tests.refusals import Refused, check_refused

CAUSAL, FULL = Mask.causal(), Mask.full()
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


def rectangle(rows: tuple[int, int], cols: tuple[int, int]) -> dict[str, Any]:
    """The call in which those queries see those keys, and nothing else is seen."""
    # Documents match by number: the keys before have no queries, the queries before no keys.
    return {
        "mask": FULL,
        "cu_seqlens": torch.tensor([0, 0, rows[0], rows[1]]).int(),
        "key_cu_seqlens": torch.tensor([0, cols[0], cols[0], cols[1]]).int(),
    }


@dataclass(frozen=True)
class Scene:
    """Calls, and in which of `(B, S, S)` pairs a query sees a key in one of them."""

    calls: list[dict[str, Any]]
    seen: Callable[[Tensor, Tensor], Tensor]
    seq_len: int = 32
    layout: str = "zigzag"


def shared_question(query: Tensor, key: Tensor) -> Tensor:
    answer = (query - 8) // 12 == (key - 8) // 12
    return (key <= query) & (answer | (key < 8))


QUESTION = [
    {"mask": CAUSAL, "cu_seqlens": torch.tensor([0, 8, 20, 32]).int()},
    rectangle((8, 32), (0, 8)),
]
SCENES = {
    "block causal": Scene(
        [rectangle((8 * frame, 32), (8 * frame, 8 * frame + 8)) for frame in range(4)],
        lambda query, key: query // 8 >= key // 8,
    ),
    "a shared question": Scene(QUESTION, shared_question),
    "striped": Scene(QUESTION, shared_question, layout="striped"),
    "a tail that nobody sees, uneven": Scene(
        [
            {"mask": CAUSAL, "cu_seqlens": torch.tensor([0, 6, 15]).int()},
            rectangle((6, 15), (0, 6)),
        ],
        lambda query, key: (key <= query) & (query < 15),
        seq_len=21,
        layout="contiguous",
    ),
    "one part": Scene([{"mask": Mask.sliding(4)}], lambda q, k: (k <= q) & (q - k <= 4)),
}


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", SCENES)
def test_calls_merge_to_one_attention(pool: Pool, name: str, dtype: torch.dtype) -> None:
    pool.run(2, _check_scene, name, dtype, (2,), (SEQUENCE,))


def test_on_a_mesh_of_several_axes(pool: Pool) -> None:
    pool.run(4, _check_scene, "a shared question", torch.float64, (2, 2), (SEQUENCE, HEADS))
    pool.run(4, _check_scene, "block causal", torch.float64, (2, 2), (BATCH, SEQUENCE))


def test_compiled(pool: Pool) -> None:
    """In one graph, whose backward has a gradient of each lse."""
    pool.run(2, _check_scene, "a shared question", torch.float32, (2,), (SEQUENCE,), True)


def _check_scene(
    name: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    placements: tuple[Any, ...],
    compiled: bool = False,
) -> None:
    scene = SCENES[name]
    mesh = annotated_mesh(sizes, placements, scene.layout)
    torch.manual_seed(0)
    query, key, value, grad_out = (x.to(dtype) for x in random_inputs(2, scene.seq_len))
    grad_lse = torch.randn(grad_out.shape[:3], dtype=torch.promote_types(dtype, torch.float32))
    at = torch.arange(scene.seq_len)
    seen = scene.seen(at.unsqueeze(1), at).expand(2, -1, -1)
    dense = dense_attention(query, key, value, FULL, seen=seen)
    expected = [dense.out, dense.lse, *dense.backward(grad_out, grad_lse)]

    def run(*inputs: Any) -> tuple[Tensor, Tensor]:
        parts = [ring_attention(*inputs, **call, return_lse=True) for call in scene.calls]
        return merge_attention(parts)

    attention = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    inputs = [place(x, mesh, placements).requires_grad_() for x in (query, key, value)]
    outputs = attention(*inputs)
    assert [x.dtype for x in outputs] == [dtype, grad_lse.dtype]
    slopes = [place(x, mesh, placements) for x in (grad_out, grad_lse)]
    results = [*outputs, *torch.autograd.grad(outputs, inputs, slopes)]
    for found, wanted in zip(results, expected, strict=True):
        assert found.placements == tuple(placements)
        whole = unshard_sequence(found, 2).detach().double()
        tolerance = TOLERANCES[dtype] * (1 + wanted[wanted.isfinite()].abs().max().item())
        torch.testing.assert_close(whole, wanted.detach(), rtol=0, atol=tolerance)


def parts_of(
    dtype: torch.dtype, hidden: float, cuts: tuple[int, ...] = (0, 3, 3, 9)
) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs and lse of parts of 9 keys; one part has none, one row sees nothing at all."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 2, 5, 9, generator=generator, dtype=torch.float64)
    scores[torch.rand(scores.shape, generator=generator) < hidden] = -torch.inf
    scores[:, :, 2] = -torch.inf
    values = torch.randn(2, 2, 9, 3, generator=generator, dtype=torch.float64)
    outs, lses = [], []
    for start, end in pairwise(cuts):
        lse = scores[..., start:end].logsumexp(-1)
        base = lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)
        weights = (scores[..., start:end] - base).exp()
        outs.append((weights @ values[:, :, start:end]).to(dtype).requires_grad_())
        lses.append(lse.to(torch.promote_types(dtype, torch.float32)).requires_grad_())
    return outs, lses


def by_formula(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Written down for all parts at once, in float64."""
    lse = torch.stack([x.double() for x in lses]).logsumexp(0)
    base = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = [(x.double() - base).exp().unsqueeze(-1) for x in lses]
    return sum(w * out.double() for w, out in zip(weights, outs, strict=True)), lse


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("hidden", [0.0, 0.5])
def test_the_formula(dtype: torch.dtype, hidden: float) -> None:
    outs, lses = parts_of(dtype, hidden)
    before = [x.detach().clone() for x in (*outs, *lses)]
    found, expected = merge_attention(list(zip(outs, lses, strict=True))), by_formula(outs, lses)
    assert all(map(torch.equal, before, (*outs, *lses))), "parts are not written to"
    slopes = [torch.randn_like(x) for x in found]
    seen = (expected[1] > -torch.inf).detach()
    grads = torch.autograd.grad(found, [*outs, *lses], slopes)
    of_seen = [expected[0][seen], expected[1][seen]]
    wanted = torch.autograd.grad(
        of_seen, [*outs, *lses], [slope[seen].double() for slope in slopes]
    )
    close = {"rtol": 0, "atol": TOLERANCES[dtype], "check_dtype": False}
    for x, y in zip((*found, *grads), (*expected, *wanted), strict=True):
        torch.testing.assert_close(x, y.nan_to_num(0.0, neginf=-torch.inf), **close)
    assert not found[0][~seen].any()
    assert not any(grad[~seen].any() for grad in grads), "gradients of rows that nobody sees"


def test_gradcheck() -> None:
    """Of second order, too: of rows that are seen."""
    outs, lses = parts_of(torch.float64, 0.0, (0, 3, 9))
    seen = [x.detach()[:, :, :2].clone().requires_grad_() for x in (*outs, *lses)]

    def merge(*x: Tensor) -> tuple[Tensor, Tensor]:
        return merge_attention(list(zip(x[:2], x[2:], strict=True)))

    assert torch.autograd.gradcheck(merge, seen)
    assert torch.autograd.gradgradcheck(merge, seen)


@pytest.mark.parametrize("shape", [(0, 2, 5, 3), (2, 2, 0, 3), (2, 2, 5, 0)])
def test_nothing_to_merge(shape: tuple[int, ...]) -> None:
    part = torch.randn(shape), torch.zeros(shape[:3])
    out, lse = merge_attention([part, part])
    assert out.shape == shape
    torch.testing.assert_close(lse, part[1] + torch.tensor(2.0).log())


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (3, 0, 1, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(order: tuple[int, ...], dtype: torch.dtype) -> None:
    """What compilers rely on, in any order of memory."""
    outs = [torch.randn(2, 3, 4, 5, dtype=dtype).permute(order) for _ in range(2)]
    lses = [torch.randn(out.shape[:3]) for out in outs]
    torch.library.opcheck(torch.ops.dtensor_ring.merge_attention.default, (outs, lses))
    out, _ = merge_attention(list(zip(outs, lses, strict=True)))
    torch.testing.assert_close(out.double(), by_formula(outs, lses)[0], rtol=0, atol=2e-2)


OUT, LSE = torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8)
REFUSALS: Refused = {
    TypeError: {
        r"pairs, got Tensor in parts\[0\]; call ring_attention\(": (OUT, LSE),
        r"parts must be a list of \(out, lse\) pairs, got dict": {},
        r"parts must be \(out, lse\) pairs, got tuple in": [(OUT,)],
        r"lse of parts\[0\] must be a tensor, got NoneType": [(OUT, None)],
    },
    ValueError: {
        r"parts must hold at least one \(out, lse\) pair, got none": [],
        r"out of parts\[0\] must be a dense": [(OUT.to_sparse(), LSE)],
        r"out \(B, N, S, Hv\) and lse .*, got out \(1, 8, 2, 4\) .*\(1, 2, 8\) .*; transpose": [
            (OUT.transpose(1, 2), LSE)
        ],
        "floating dtype of 16 bits or more, got out": [(OUT.int(), LSE)],
        "lse of torch.float32 or wider, got out": [(OUT, LSE.bfloat16())],
        "lse of torch.float64 or wider, got": [(OUT.double(), LSE)],
        "lse of torch.float32 or wider, got": [(OUT, LSE.cfloat())],
        "out and lse placed alike": [(OUT, LSE.to("meta"))],
        r"same queries, .* out of parts\[0\] \(1, 2, 8, 4\) .*, of parts\[1\] \(1, 2, 7, 4\)": [
            (OUT, LSE),
            (OUT[:, :, 1:], LSE[:, :, 1:]),
        ],
        r"same queries, placed alike, .* torch.float32, cpu, of parts\[1\] .* torch.float16, cpu": [
            (OUT, LSE),
            (OUT.half(), LSE),
        ],
    },
}


def test_refusals() -> None:
    check_refused(REFUSALS, merge_attention)


@on_ranks(1)
def test_refusals_of_dtensors() -> None:
    mesh = init_device_mesh("cpu", (1,))

    def placed(where: Any) -> Any:
        return [DTensor.from_local(x, mesh, [where], run_check=False) for x in (OUT, LSE)]

    sharded, whole = placed(Shard(2)), placed(REPLICATE)
    out, lse = merge_attention([sharded, sharded])
    assert out.placements == lse.placements == (Shard(2),)
    alike = "out and lse placed alike, and not Partial"
    for parts, message in (
        ([(sharded[0], LSE)], alike),
        ([(sharded[0], whole[1])], alike),
        ([placed(Partial())], alike),
        ([sharded, whole], r"placed alike, .*Shard\(dim=2\).*, of parts\[1\] .*Replicate"),
        ([sharded, (OUT, LSE)], r"of parts\[1\] \(1, 2, 8, 4\) torch.float32, cpu"),
    ):
        with pytest.raises(ValueError, match=message):
            merge_attention(parts)
