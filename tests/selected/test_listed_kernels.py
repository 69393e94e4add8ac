"""Lists of latents by flash-attn-4, over a stand-in, against dense attention in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import SequenceAxis, selected_attention
from dtensor_ring.compute.kernels import Problem, Saved, flash_attn4
from dtensor_ring.selected import listed_attention
from dtensor_ring.selected.listed_attention import (
    LISTED,
    Lists,
    Residents,
    gathered_backward,
    gathered_forward,
    listed_forward,
    lists_of,
)
from tests.pool import on_ranks
from tests.selected.indexers import dense
from tests.selected.latent_package import FORWARD, install, package

__all__ = ["package"]  # fixtures


@dataclass(frozen=True)
class Case:
    """Queries, rows that are at hand, and lists of positions among twice as many."""

    batch: int = 1
    num_heads: int = 3
    num_queries: int = 5
    num_rows: int = 24
    width: int = 7
    scale: float = 0.05
    with_sinks: bool = False
    with_places: bool = True
    is_head_major: bool = False

    def tensors(self) -> tuple[Tensor, Residents, Tensor, Tensor | None]:
        generator = torch.Generator().manual_seed(self.width)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).bfloat16()

        shape = self.batch, self.num_queries, self.num_heads, 576
        query = draw(*shape).transpose(1, 2)
        query = query.contiguous() if self.is_head_major else query
        sinks = torch.randn(self.num_heads, generator=generator) if self.with_sinks else None
        rows = draw(self.num_rows, self.batch, 1, 576)
        numbers, places = self.numbers(), None
        if self.with_places:
            places = torch.full((2 * self.num_rows + 1,), -1, dtype=torch.int32)
            places[numbers] = torch.arange(self.num_rows, dtype=torch.int32)
        return query, Residents(rows, places, 576, (0, 512)), self.lists(generator), sinks

    def numbers(self) -> Tensor:
        """The position of each row: in no order, and not all positions."""
        every = torch.randperm(2 * self.num_rows, generator=torch.Generator().manual_seed(1))
        return every[: self.num_rows] if self.with_places else torch.arange(self.num_rows)

    def lists(self, generator: torch.Generator) -> Tensor:
        """`(B, 1, L, K)`: the first query has no key, and others fewer than K."""
        shape = self.batch, 1, self.num_queries
        drawn = torch.rand(*shape, self.num_rows, generator=generator).argsort(-1)
        lists = self.numbers()[drawn[..., : self.width]].int()
        lengths = torch.arange(self.num_queries) * 3
        return lists.masked_fill(torch.arange(lists.shape[-1]) >= lengths.unsqueeze(1), -1)

    def dense(self) -> list[Tensor]:
        """Out, lse, and the gradients of query and rows, the latter `(T, B, 1, D)`."""
        query, residents, selected, sinks = self.tensors()
        query, rows = (x.double().requires_grad_() for x in (query, residents.rows))
        key = rows.permute(1, 2, 0, 3)
        where = selected
        if residents.places is not None:
            where = residents.places[selected.long()]
        out, lse = dense(query, key, key[..., :512], where, self.scale, sinks)
        return [out, lse, *torch.autograd.grad(out, (query, rows), self.grad_out().double())]

    def grad_out(self) -> Tensor:
        shape = self.batch, self.num_heads, self.num_queries, 512
        return torch.randn(*shape, generator=torch.Generator().manual_seed(2)).bfloat16()


CASES = {
    "plain": Case(),
    "batch": Case(batch=2, num_queries=6),
    "no whole number of lists": Case(num_rows=300, width=130, num_queries=60),
    "exactly one list": Case(num_rows=140, width=128, num_queries=50),
    "sinks": Case(batch=2, with_sinks=True),
    "rows in place of positions": Case(with_places=False),
    "heads first": Case(batch=2, is_head_major=True),
    "one query": Case(num_queries=1),
    "all heads": Case(num_heads=128, num_queries=3),
}


@pytest.mark.parametrize("name", CASES)
def test_as_dense(name: str, package: None) -> None:
    case = CASES[name]
    query, residents, selected, sinks = case.tensors()
    out, lse = LISTED.forward(query, residents, selected, case.scale, sinks)
    expected = case.dense()
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out.double(), expected[0], rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-6, atol=1e-6)
    saved = Saved(case.grad_out(), out, lse)
    grads = LISTED.backward(saved, query, residents, selected, case.scale)
    assert [x.dtype for x in grads] == [torch.bfloat16, torch.float32]
    for found, of_dense in zip(grads, expected[2:], strict=True):
        assert found.shape == of_dense.shape
        # Gradients come from an out that was rounded to bfloat16.
        atol = 2**-8 * of_dense.abs().max().item()
        torch.testing.assert_close(found.double(), of_dense, rtol=2**-8, atol=atol)


@pytest.mark.parametrize("name", ["batch", "heads first"])
def test_results_are_laid_out_and_summed_as_the_gathered(name: str, package: None) -> None:
    case = CASES[name]
    query, residents, selected, _ = case.tensors()
    how = query, residents, selected, case.scale
    saved = Saved(case.grad_out(), *LISTED.forward(*how))
    by_package = *LISTED.forward(*how), *LISTED.backward(saved, *how)
    gathered = *gathered_forward(*how), *gathered_backward(saved, *how)
    for found, expected in zip(by_package, gathered, strict=True):
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        assert found.stride() == expected.stride()
    # Of the same rounded out, so nothing else may have been rounded to 16 bits.
    torch.testing.assert_close(by_package[-1], gathered[-1], rtol=1e-4, atol=1e-4)


def test_a_row_of_the_batch_at_a_time_in_chunks(
    package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    interface = flash_attn4.load("flash_attn.cute.interface")
    chunks, run = [], interface._flash_attn_bwd_sparse_mla
    monkeypatch.setattr(
        interface,
        "_flash_attn_bwd_sparse_mla",
        lambda *args, **more: (chunks.append(more["token_chunk"]), run(*args, **more))[1],
    )
    monkeypatch.setattr(flash_attn4, "LIST_SCORES", 3 * 128 * 2)
    case = CASES["batch"]
    query, residents, selected, _ = case.tensors()
    how = query, residents, selected, case.scale
    LISTED.backward(Saved(case.grad_out(), *LISTED.forward(*how)), *how)
    assert chunks == [2, 2]


SERVED = Lists(
    Problem("cuda", torch.bfloat16, 576, 512, 0.05, determinism="off"), 128, 1, is_latent=True
)
TRAINED = SERVED._replace(is_backward=True)


def with_problem(lists: Lists, **facts: object) -> Lists:
    return lists._replace(problem=replace(lists.problem, **facts))


def test_what_is_served() -> None:
    assert LISTED.supports(SERVED) is None
    assert LISTED.supports(TRAINED) is None
    assert LISTED.supports(SERVED._replace(num_heads=1)) is None
    assert LISTED.supports(with_problem(SERVED, determinism="strict")) is None


@pytest.mark.parametrize(
    ("lists", "reason"),
    [
        (with_problem(SERVED, device_type="cpu"), "it runs on CUDA, the tensors are on cpu"),
        (with_problem(SERVED, dtype=torch.float32), "not torch.float32"),
        (with_problem(SERVED, dtype=torch.float16), "it takes bfloat16, not torch.float16"),
        (with_problem(SERVED, scale=-1.0), "it needs a positive scale, got -1.0"),
        (with_problem(TRAINED, differentiable_lse=True), "it has no gradient of lse"),
        (with_problem(TRAINED, determinism="strict"), "its gradients are summed in any order"),
        (with_problem(TRAINED, determinism="warn"), "its gradients are summed in any order"),
        (with_problem(SERVED, head_dim=128), "whose first 512 are the value, got 128 and 512"),
        (with_problem(SERVED, value_head_dim=64), "got 576 and 64"),
        (SERVED._replace(is_latent=False), "whose first 512 are the value"),
        (SERVED._replace(num_heads=129), "up to 128 query heads and one key head, got 129 and 1"),
        (SERVED._replace(num_key_heads=2), "one key head, got 128 and 2"),
        (SERVED._replace(is_empty=True), "there are no queries, keys or lists"),
    ],
)
def test_what_is_refused(lists: Lists, reason: str) -> None:
    assert reason in str(LISTED.supports(lists))


def test_facts_of_a_call() -> None:
    case = CASES["plain"]
    query, residents, selected, _ = case.tensors()
    found = lists_of(query, residents, selected, case.scale)
    served = with_problem(SERVED, device_type="cpu")._replace(num_heads=3)
    assert found == served._replace(problem=found.problem)
    facts = [
        "device_type", "dtype", "head_dim", "value_head_dim", "scale", "differentiable_lse"
    ]  # fmt: skip
    assert [getattr(found.problem, x) for x in facts] == [
        *("cpu", torch.bfloat16, 576, 512, case.scale, False)
    ]
    saved = Saved(query, query, query, grad_lse=query)
    trained = lists_of(query, residents, selected, case.scale, saved)
    assert trained.is_backward
    assert trained.problem.differentiable_lse
    apart = residents._replace(apart=residents.rows)
    after = residents._replace(values=(64, 576))
    wide = residents._replace(rows=residents.rows.float())
    for other in (apart, after):
        assert not lists_of(query, other, selected, case.scale).is_latent
    assert lists_of(query, wide, selected, case.scale).problem.dtype == torch.float32
    none = residents._replace(rows=residents.rows[:0])
    assert lists_of(query, none, selected, case.scale).is_empty
    assert lists_of(query, residents, selected[..., :0], case.scale).is_empty
    assert lists_of(query[:, :, :0], residents, selected[:, :, :0], case.scale).is_empty


def test_other_calls_are_gathered() -> None:
    """Here is no package: a call of it would fail."""
    case = CASES["sinks"]
    query, residents, selected, sinks = case.tensors()
    how = query, residents, selected, case.scale, sinks
    torch.testing.assert_close(listed_forward(*how), gathered_forward(*how), rtol=0, atol=0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    def install(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))
        listed_attention._missing.cache_clear()

    yield install
    listed_attention._missing.cache_clear()


def test_missing(
    gpu: Callable[[int, int], None], package: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LISTED.missing() == "no CUDA device"
    gpu(9, 0)
    assert LISTED.missing() == "it needs compute capability 10.x or 11.x, this GPU has 9.0"
    assert listed_attention.refused(SERVED) == LISTED.missing()
    gpu(10, 0)
    monkeypatch.setattr(flash_attn4, "_missing_package", lambda: "it is not installed")
    assert LISTED.missing() == "it is not installed"
    monkeypatch.setattr(flash_attn4, "_missing_package", lambda: None)
    interface = flash_attn4.load("flash_attn.cute.interface")
    monkeypatch.setattr(interface, "_flash_attn_fwd", eval(f"lambda {FORWARD}: None"))
    assert LISTED.missing() is None
    assert listed_attention.refused(SERVED) is None
    old = FORWARD.replace(", gather_bwd_recompute_p=False", "")
    monkeypatch.setattr(interface, "_flash_attn_fwd", eval(f"lambda {old}: None"))
    assert LISTED.missing() == "its flash-attn-4 has no lists of keys; 4.0.0b36 has them"
    monkeypatch.setattr(interface, "_flash_attn_fwd", eval(f"lambda {FORWARD}: None"))
    monkeypatch.delattr(interface, "_flash_attn_bwd_sparse_mla")
    assert LISTED.missing() == "its flash-attn-4 has no lists of keys; 4.0.0b36 has them"


@on_ranks(2)
def test_on_ranks() -> None:
    """The whole call, of local shards, whose keys and gradients travel."""
    generator = torch.Generator().manual_seed(3)
    query, latents = (
        torch.randn(2, heads, 20, 576, generator=generator).bfloat16() for heads in (4, 1)
    )
    selected = torch.rand(2, 20, 20, generator=generator).argsort(-1)[..., :9].int()
    grad_out = torch.randn(2, 4, 20, 512, generator=generator).bfloat16()
    whole = [x.double().requires_grad_() for x in (query, latents)]
    value = whole[1][..., :512]
    out, lse = dense(*whole, value, selected.unsqueeze(1), 0.05)
    expected = [out, lse, *torch.autograd.grad(out, whole, grad_out.double())]
    mesh = init_device_mesh("cpu", (2,))
    mine = SequenceAxis(mesh, "contiguous").positions(20)
    leaves = [x[:, :, mine].requires_grad_() for x in (query, latents)]
    calls: list[Lists] = []
    with pytest.MonkeyPatch.context() as patched:
        install(patched)
        patched.setattr(listed_attention, "refused", calls.append)
        lists, how = selected[:, mine], {"scale": 0.05, "return_lse": True, "mesh": mesh}
        found = selected_attention(*leaves, 512, lists, **how)
        grads = torch.autograd.grad(found[0], leaves, grad_out[:, :, mine])
    assert [call.is_backward for call in calls] == [False, True]
    for actual, of_dense in zip((*found, *grads), expected, strict=True):
        part, largest = of_dense[:, :, mine], of_dense.abs().max().item()
        torch.testing.assert_close(actual.double(), part, rtol=0, atol=2**-7 * largest)
