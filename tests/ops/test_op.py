"""The op against dense attention in float64, over every layout, mask, dtype and world size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtensor_ring import Balanced, BlockCyclic, Contiguous, Mask, Slices, Striped, ZigZag
from dtensor_ring.planning.layout import Layout
from tests.dense import largest
from tests.pool import Pool, on_ranks
from tests.rings import Case, Ring, local

CAUSAL, FULL = Mask.causal(), Mask.full()
LAYOUTS = Contiguous(), Striped(), ZigZag()
HEADS = {"multi-head": (2, 2), "grouped": (4, 2), "multi-query": (3, 1)}
SINKS = (0.5, -1.0, 2.0, 0.0)
Errors = dict[str, float]


def errors_of(cases: list[Case]) -> list[Errors]:
    """By case, the largest error of each result of this rank."""
    return [_errors(case) for case in cases]


def _errors(case: Case) -> Errors:
    expected, positions = [*case.expected()], case.ring.positions(dist.get_rank())
    key_positions = case.ring.positions(dist.get_rank(), of_keys=True)
    shards = case.shards(dist.get_rank())
    outputs = case.attend(*shards)
    used = outputs if case.grad_lse else outputs[:1]
    shard_grads = [x[:, :, positions] for x in case.grads()]
    actual = [*outputs, *torch.autograd.grad(used, shards, shard_grads)]
    if case.sinks:
        dist.all_reduce(actual[-1])
        expected[-1] = expected[-1].nan_to_num(0.0)  # dense has none for a sink of -inf
    expected = [
        local(x, positions if index < 3 else key_positions) for index, x in enumerate(expected)
    ]
    assert [x.dtype for x in actual] == [x.dtype for x in (shards[0], *outputs[1:], *shards)]
    return errors(actual, expected)


def errors(actual: list[Tensor], expected: list[Tensor]) -> Errors:
    """By result, the largest difference; NaN, or infinite on one side only, is infinite."""
    found = {}
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv", "dsinks"), actual, expected):  # noqa: B905
        assert x.shape == y.shape, f"{name} has shape {tuple(x.shape)}, expected {tuple(y.shape)}"
        difference = (x.double() - y).abs().masked_fill(x == y, 0.0).nan_to_num(torch.inf)
        found[name] = difference.max().item() if x.numel() else 0.0
    return found


@cache
def single_process_errors(mask: Mask, dtype: torch.dtype, heads: tuple[int, int]) -> Errors:
    """Errors of scaled_dot_product_attention on the whole problem, in the same dtype."""
    case = Case(Ring(Contiguous(), 1, 48, mask), dtype, heads)
    inputs = [x.requires_grad_() for x in case.inputs()]
    options = {"is_causal": mask == CAUSAL, "scale": case.scale}
    out = F.scaled_dot_product_attention(*inputs, **options, enable_gqa=True)
    _, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*inputs, **options)
    actual = [out, lse, *torch.autograd.grad(out, inputs, case.grads())]
    return errors(actual, [*case.expected()])


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_as_exact_as_one_process(pool: Pool, world_size: int) -> None:
    options = product(LAYOUTS, (CAUSAL, FULL), (torch.float32, torch.bfloat16), HEADS.values())
    cases = [
        Case(Ring(layout, world_size, 48, mask), dtype, heads, kernel=(None, "reference")[i % 2])
        for i, (layout, mask, dtype, heads) in enumerate(options)
    ]
    too_large = []
    for rank, by_case in enumerate(pool.run(world_size, errors_of, cases)):
        for case, found in zip(cases, by_case, strict=True):
            bounds = single_process_errors(case.ring.mask, case.dtype, case.heads)
            for name, value in found.items():
                eps = torch.finfo(case.wide if name == "lse" else case.dtype).eps
                if not value <= 4 * bounds[name] + eps:
                    too_large.append((case, f"rank {rank}", name, value, bounds[name]))
    assert not too_large


@dataclass(frozen=True)
class Edge:
    """A case but for layout and world size."""

    seq_len: int = 16
    mask: Mask = CAUSAL
    documents: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    key_seq_len: int | None = None
    key_documents: Any = None

    def case(self, layout: Layout | None, world_size: int, kernel: str | None) -> Case:
        """At the next lengths that the layout can shard; `None` is balanced for this very case."""
        layout = layout or Balanced(self.mask, self.seq_len, world_size, self.documents, block=2)
        seq_lens = [self.seq_len, self.key_seq_len]
        if layout == Striped():
            seq_lens = [n and layout.padded_length(n, world_size) for n in seq_lens]
        ring = Ring(
            *(layout, world_size, seq_lens[0], self.mask, self.documents),
            *(seq_lens[1], self.key_documents),
        )
        return Case(ring, kernel=kernel, **self.options)

    def can_be_balanced(self) -> bool:
        """One layout shards queries and keys, so it is for one length."""
        return self.key_seq_len in (None, self.seq_len)


EDGES = {
    "uneven": Edge(13),
    "uneven, full": Edge(13, FULL),
    "shorter than the ring": Edge(2),
    "empty shard": Edge(5, FULL),
    "no token": Edge(0),
    "window": Edge(19, Mask.sliding(3)),
    "own token only": Edge(9, Mask.sliding(0)),
    "band": Edge(19, Mask(5, 2)),
    "looks ahead": Edge(19, Mask(None, 3)),
    "looks back": Edge(19, Mask(2, None)),
    "documents": Edge(20, CAUSAL, ((0, 3, 4, 4, 11, 20),)),
    "documents and a tail": Edge(20, FULL, ((0, 3, 13),), {"grad_lse": True}),
    "documents by row": Edge(20, Mask(6, 1), ((0, 3, 20, 20), (0, 9, 11, 14))),
    "no documents": Edge(8, CAUSAL, ((0,),)),
    "a row of padding": Edge(20, CAUSAL, ((0, 7, 20), (0, 0, 0)), {"grad_lse": True}),
    "chunks": Edge(19, Mask.chunked(5)),
    "chunks, a band and documents": Edge(20, Mask(3, 1, chunk=6), ((0, 4, 13),)),
    "prefix": Edge(19, Mask.prefix_causal(7), options={"grad_lse": True}),
    "prefix of documents": Edge(20, Mask.prefix_causal(2), ((0, 3, 4, 4, 11, 19),)),
    "prefix, a band and documents": Edge(20, Mask(6, 1, prefix=9), ((0, 3, 20), (0, 11, 14))),
    "cross, more keys": Edge(9, FULL, key_seq_len=21),
    "cross, fewer keys": Edge(21, FULL, options={"sinks": SINKS, "grad_lse": True}, key_seq_len=3),
    "cross, no key": Edge(6, FULL, key_seq_len=0),
    "cross, documents, one without keys": Edge(
        12, FULL, ((0, 4, 9, 12),), key_seq_len=20, key_documents=((0, 7, 7, 15),)
    ),
    "cross, documents by row": Edge(
        16, FULL, ((0, 5, 16), (0, 9, 12)), key_seq_len=16, key_documents=((0, 16, 16), (0, 2, 13))
    ),
    "sinks": Edge(options={"sinks": SINKS}),
    "sinks and all": Edge(20, Mask(4, 1), ((0, 3, 13),), {"sinks": SINKS, "grad_lse": True}),
    "a sink of no weight": Edge(9, CAUSAL, ((0, 3),), {"sinks": (0.5, -torch.inf, 2.0, 0.0)}),
    "softcap": Edge(options={"softcap": 1.5}),
    "gradient of lse": Edge(options={"grad_lse": True}),
    "head dim of value": Edge(options={"head_dims": (8, 4)}),
    "head dim of 256": Edge(options={"head_dims": (256, 256)}),
    "head dims of latent attention": Edge(options={"head_dims": (576, 512), "heads": (2, 1)}),
    "batch of one": Edge(11, CAUSAL, ((0, 3, 9),), {"batch": 1}),
    "empty batch": Edge(options={"batch": 0}),
}


@pytest.mark.parametrize("world_size", [1, 2])
def test_edges(pool: Pool, world_size: int) -> None:
    """Each in all layouts, of which the two kernels take turns."""
    cases = {
        f"{name}, {layout or 'balanced'}": edge.case(
            layout, world_size, (None, "reference")[(i + j) % 2]
        )
        for i, (name, edge) in enumerate(EDGES.items())
        for j, layout in enumerate((*LAYOUTS, None))
        if layout or edge.can_be_balanced()
    }
    answers = pool.run(world_size, errors_of, list(cases.values()))
    too_large = {
        f"{name}, rank {rank}": found
        for rank, by_case in enumerate(answers)
        for name, found in zip(cases, by_case, strict=True)
        if not largest(found.values()) < 1e-12
    }
    assert not too_large


BY_ROW = ((0, 3, 4, 4, 11, 24), (0, 9, 11, 24, 24, 24))
EVERYWHERE: dict[str, list[dict[str, Any]]] = {
    "dropout": [
        {"dropout_p": 0.3},
        {"dropout_p": 0.3, "sinks": SINKS, "grad_lse": True},
        {"dropout_p": 0.3, "softcap": 2.0, "heads": (2, 2), "batch": 3},
        {"dropout_p": 0.3, "seed": 2**61 + 5, "heads": (3, 1)},
    ],
    "a bias by distance": [
        {"extent": 5},
        {"extent": 1, "sinks": SINKS, "grad_lse": True},
        {"extent": 40, "heads": (2, 2), "batch": 3, "head_dims": (8, 6)},
        {"extent": 5, "dropout_p": 0.3, "softcap": 1.5},
    ],
}
"""Options that rings of every kind have, and then more of a zigzag ring."""


@pytest.mark.parametrize("name", EVERYWHERE)
@pytest.mark.parametrize("world_size", [1, 4])
def test_options_of_rings_of_every_kind(pool: Pool, world_size: int, name: str) -> None:
    layouts = *LAYOUTS, BlockCyclic(2)
    balanced = Balanced(CAUSAL, 24, world_size, BY_ROW, block=2)
    slices = Slices.documents(torch.tensor(BY_ROW[0]), Mask.sliding(4))
    rings = [Ring(x, world_size, 24, CAUSAL, rows) for x in layouts for rows in (None, BY_ROW)]
    rings += [Ring(ZigZag(), world_size, 21, Mask.sliding(5), strategy="all_gather")]
    rings += [Ring(balanced, world_size, 24, CAUSAL)]
    rings += [Ring(Contiguous(), world_size, 12, FULL, key_seq_len=20)]
    rings += [Ring(Striped(), world_size, 24, FULL, slices=slices)]
    first, *others = EVERYWHERE[name]
    cases = [Case(ring, **first) for ring in rings]
    cases += [Case(Ring(ZigZag(), world_size, 24, CAUSAL), **options) for options in others]
    for rank, by_case in enumerate(pool.run(world_size, errors_of, cases)):
        for case, found in zip(cases, by_case, strict=True):
            assert max(found.values()) < 1e-12, f"rank {rank}: {case} {found}"


@pytest.mark.parametrize("kernel", [None, "reference"])
@pytest.mark.parametrize("documents", [((0, 3, 13),), ((0, 2, 3, 5, 9, 13), (0, 4, 6, 9, 9, 9))])
def test_an_lse_of_a_row_that_sees_nothing_leads_nowhere(
    pool: Pool, kernel: str | None, documents: Any
) -> None:
    """Its gradient may be anything: that of exp(lse) / exp(lse) is NaN there."""
    edge = Edge(20, CAUSAL, documents, {"grad_lse": True})
    for layout in LAYOUTS:
        assert all(pool.run(2, _leads_nowhere, edge.case(layout, 2, kernel)))


def _leads_nowhere(case: Case) -> bool:
    """Whether gradients are, in every bit, as if that of lse were 0 in such rows."""
    positions, shards = case.ring.positions(dist.get_rank()), case.shards(dist.get_rank())
    outputs = case.attend(*shards)
    grad_out, grad_lse = (x[:, :, positions] for x in case.grads())
    unseen = outputs[1] == -torch.inf
    assert case.ring.layout != ZigZag() or unseen.any()
    grads = []
    for number in (0.0, torch.nan):
        slopes = grad_out, grad_lse.masked_fill(unseen, number)
        grads.append(torch.autograd.grad(outputs, shards, slopes, retain_graph=True))
    return all(map(torch.equal, *grads))


@pytest.mark.parametrize("scale", [-0.5, 0.0])
def test_scales_that_are_not_positive(pool: Pool, scale: float) -> None:
    """They are served by the reference kernel."""
    case = Case(Ring(ZigZag(), 2, 9, CAUSAL), scale=scale)
    for found in pool.run(2, _errors, case):
        assert largest(found.values()) < 1e-12


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "token-major": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "head dim first": lambda x: x.mT.contiguous().mT,
    "every second token": lambda x: torch.cat([x, x], 2)[:, :, ::2],
    "every second number": lambda x: torch.cat([x, x], 3)[..., ::2],
    "one head for all": lambda x: x[:, :1].expand_as(x),
    "one number for all": lambda x: x[:1, :1, :1, :1].expand_as(x),
    "odd address": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x),
}


@pytest.mark.parametrize("kernel", [None, "reference"])
def test_strides_do_not_matter(pool: Pool, kernel: str | None) -> None:
    for mask in (CAUSAL, FULL, Mask(3, 1)):
        case = Case(Ring(ZigZag(), 1, 8, mask), torch.float32, kernel=kernel)
        differences = pool.run(1, _differences, case)[0]
        assert largest(differences.values()) < 1e-5, (mask, differences)


def _differences(case: Case) -> Errors:
    """By view, the largest difference to what contiguous copies of the same numbers yield."""
    found = {}
    for name, view in VIEWS.items():
        results = []
        for to in (view, lambda x, view=view: view(x).contiguous()):
            inputs = [to(x).detach().requires_grad_() for x in case.inputs()]
            out, lse = case.attend(*inputs)
            results.append([out, lse, *torch.autograd.grad(out, inputs, to(case.grads()[0]))])
        found[name] = largest(errors(results[0], [x.double() for x in results[1]]).values())
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@on_ranks(1)
def test_autocast_does_what_it_does_to_sdpa(dtype: torch.dtype) -> None:
    case = Case(Ring(ZigZag(), 1, 8, CAUSAL), dtype)
    inputs, dense = case.shards(0), case.dense()
    with torch.autocast("cpu", torch.bfloat16):
        outputs = case.attend(*inputs)
        expected = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
    grad = case.grads()[0]
    slope = grad.to(outputs[0].dtype)
    grads = torch.autograd.grad(outputs[0], inputs, slope, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        within = torch.autograd.grad(outputs[0], inputs, slope)
    assert all(torch.equal(x, y) for x, y in zip(grads, within, strict=True))
    expected_grads = torch.autograd.grad(expected, inputs, grad.to(expected.dtype))
    found = errors([*outputs, *grads], [dense.out, dense.lse, *dense.backward(grad)])
    dtypes = [
        [x.dtype for x in (out, *g)] for out, g in ((outputs[0], grads), (expected, expected_grads))
    ]
    assert dtypes[0] == dtypes[1]
    assert largest(found.values()) < 0.05 + 10 * torch.finfo(dtype).eps, found
