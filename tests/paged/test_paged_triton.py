"""Attention that reads block tables itself: in Triton's interpreter, and on a GPU.

`test_paged_compiled.py` reads its machine code.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from dtensor_ring import BlockPool, Mask
from dtensor_ring.compute.kernels.kernel import Pages, Problem, Scores
from dtensor_ring.paged import api, kernels
from dtensor_ring.paged.kernels import Gathered, PagedTriton
from tests.dense import dense_attention
from tests.paged_attention import PagedCase, check_paged

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TOLERANCES = {BF16: 2e-2, F16: 3e-3, F32: 1e-5}


@dataclass(frozen=True)
class Case:
    """Entries whose blocks lie anywhere in a pool. What no entry reads is NaN."""

    lengths: tuple[int, ...] = (1, 15, 16, 17, 70)
    splits: int | None = 1
    block: int = 16
    num_queries: int = 1
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = F32
    scale: float = 0.3
    softcap: float = 0.0
    is_shared: bool = False
    """Whether entries share the blocks of the longest one, as far as theirs are full."""
    num_infinite: int = 0
    """How many keys at the start of each entry have scores of -inf."""

    @cached_property
    def num_blocks(self) -> int:
        """Some that no entry reads, too."""
        return 3 + max(self._counts) + sum(self._counts)

    @cached_property
    def _counts(self) -> list[int]:
        return [-(-x // self.block) for x in self.lengths]

    @cached_property
    def pages(self) -> Pages:
        counts = self._counts
        tables = np.zeros((len(counts), max(counts)), dtype=np.int32)
        free = np.random.default_rng(0).permutation(self.num_blocks).tolist()
        longest = [free.pop() for _ in range(max(counts))]
        for row, count, length in zip(tables, counts, self.lengths, strict=True):
            num_shared = length // self.block if self.is_shared else 0
            row[:count] = longest[:num_shared] + [free.pop() for _ in range(count - num_shared)]
        return Pages(tables, np.array(self.lengths, dtype=np.int32), self.block)

    @property
    def scores(self) -> Scores:
        return Scores(Mask.full(), self.scale, self.softcap)

    def tensors(self, device: str) -> tuple[Tensor, Tensor, Tensor]:
        """Query, blocks of keys and blocks of values; those of the query are not contiguous."""
        generator = torch.Generator().manual_seed(0)
        (heads, kv_heads), (head_dim, value_dim) = self.heads, self.head_dims
        shapes = [(len(self.lengths), heads + 1, self.num_queries, head_dim)]
        shapes += [(self.num_blocks, self.block, kv_heads, x) for x in (head_dim, value_dim)]
        query, *blocks = (torch.randn(x, generator=generator).to(self.dtype) for x in shapes)
        is_read = torch.zeros(self.num_blocks, self.block, dtype=torch.bool)
        for table, length in zip(self.pages.tables, self.lengths, strict=True):
            for number, page in enumerate(table):
                is_read[page, : max(0, length - number * self.block)] = True
                for place in range(
                    max(0, min(self.num_infinite - number * self.block, self.block))
                ):
                    query[..., 0], blocks[0][page, place, :, 0] = 1.0, -torch.inf
        for x in blocks:
            x.masked_fill_(~is_read[..., None, None], torch.nan)
        query, keys, values = (x.to(device) for x in (query, *blocks))
        return query[:, 1:].transpose(1, 2), keys, values

    def expected(self) -> tuple[Tensor, Tensor]:
        """Dense attention in float64, entry by entry."""
        query, *blocks = self.tensors("cpu")
        outs, lses = [], []
        for number, (table, length) in enumerate(zip(self.pages.tables, self.lengths, strict=True)):
            used = torch.from_numpy(table[: -(-length // self.block)])
            pair = (x[used].flatten(0, 1)[:length].transpose(0, 1)[None] for x in blocks)
            how = {"scale": self.scale, "softcap": self.softcap}
            found = dense_attention(query[number, None].transpose(1, 2), *pair, Mask.full(), **how)
            outs.append(found.out.transpose(1, 2))
            lses.append(found.lse)
        return torch.cat(outs).detach(), torch.cat(lses).detach()


MANY = (40, 1, 333, 128, 129)
SPLIT = Case(MANY, splits=2)
CASES = {
    "": Case(),
    "two splits": SPLIT,
    "five splits": replace(SPLIT, lengths=(300, 1, 555), splits=5),
    "more splits than are merged at once": Case((600, 40), 40, heads=(8, 1), head_dims=(128, 8)),
    "blocks of 5": Case((4, 5, 6, 143), splits=2, block=5),
    "blocks of 64": Case((63, 64, 65, 1), block=64, splits=2),
    "blocks of 128": Case((127, 257), block=128, splits=3),
    "blocks of 256": Case((255, 300), block=256, splits=2),
    "shared blocks": replace(SPLIT, is_shared=True),
    "3 queries": replace(SPLIT, lengths=(40, 150), num_queries=3),
    "17 queries, tiles of rows": Case((20, 80), 2, num_queries=17, heads=(8, 2)),
    "one head of keys": Case((40, 150), 2, num_queries=2, heads=(8, 1)),
    "as many heads": Case((40, 150), 2, heads=(3, 3)),
    "channels that are no power": Case((40, 150), 2, head_dims=(40, 24)),
    "8 channels, 5 of values": Case((40, 150), 2, head_dims=(8, 5)),
    "128 channels, 64 of values": Case((40, 150), 2, head_dims=(128, 64)),
    "64 channels, 128 of values": Case((40, 150), head_dims=(64, 128), dtype=BF16),
    "256 channels": Case((40, 21), head_dims=(256, 256), num_queries=9, dtype=F16),
    "512 channels": Case((17,), head_dims=(512, 16), heads=(1, 1), dtype=F16),
    "softcap": Case((40, 150), 2, softcap=1.5, scale=2.0),
    "a softcap that is reached": Case((40, 150), softcap=1.0, scale=200.0),
    "a negative scale": Case((40, 150), 2, scale=-0.7),
    "a scale of 0": Case((40, 150), scale=0.0),
    "scores of -inf": Case((40, 150, 400), 3, num_infinite=140),
    "bfloat16": replace(SPLIT, dtype=BF16),
    "float16": replace(SPLIT, dtype=F16),
}
LARGE = {
    "as served": Case((8192,) * 3 + (5000, 77), None, 64, 1, (32, 8), (128, 128), BF16),
    "as served, float16": Case((8192, 77), None, 64, 5, (32, 8), (128, 128), F16),
    "one long": Case((70_001,), None, 16, 1, (8, 1), (64, 64), BF16),
    "many short": Case(tuple(range(1, 300)), None, 64, 1, (4, 4), (128, 128), BF16),
    "512 channels": Case((3000, 77), None, 64, 3, (16, 1), (512, 512), BF16),
    "float32": Case((3000, 77), None, 64, 3, (4, 1), (128, 128), F32),
}


def check(case: Case, device: str) -> None:
    from dtensor_ring.paged.paged_triton import attend

    query, *blocks = case.tensors(device)
    out, lse = attend(query, *blocks, case.pages, case.scores, case.splits)
    wanted, wanted_lse = case.expected()
    assert (out.dtype, lse.dtype) == (case.dtype, F32)
    assert out.is_contiguous()
    tolerance = TOLERANCES[case.dtype]
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=tolerance, atol=tolerance)
    # Products of 16-bit numbers are exact, but tensor cores add them up less exactly than float32.
    tolerance = 1e-5 if case.dtype == F32 else 1e-4
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_on_a_gpu(name: str) -> None:
    check((CASES | LARGE)[name], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_next_to_gathered_on_a_gpu(name: str) -> None:
    """With as many splits as are chosen there."""
    case = LARGE[name]
    given = *case.tensors("cuda"), case.pages, case.scores
    assert PagedTriton().missing() is None
    found, wanted = (kernel.forward(*given) for kernel in (PagedTriton(), Gathered()))
    tolerance = TOLERANCES[case.dtype]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=tolerance, atol=tolerance)


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


FEW = ("", "two splits", "blocks of 5", "shared blocks", "3 queries", "17 queries, tiles of rows")
FEW += ("8 channels, 5 of values", "512 channels", "softcap", "a negative scale", "bfloat16")


@needs_triton
@pytest.mark.parametrize(
    ("num_keys", "longest", "heads", "expected"),
    [
        (1, 1, 1, 1),
        (511, 511, 1, 1),
        (512, 512, 1, 2),
        (8192, 8192, 8, 30),
        (16 * 8192, 8192, 8, 2),
        (10**6, 10**6, 1, 241),
        (10**6, 1000, 8, 1),
        (10**6 + 10**5, 10**6, 8, 28),
    ],
)
def test_splits_fill_a_gpu(num_keys: int, longest: int, heads: int, expected: int) -> None:
    from dtensor_ring.paged.paged_triton import num_splits

    assert num_splits(num_keys, longest, heads, 132) == expected


PROBLEM = Problem("cuda", BF16, 128, 128)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (PROBLEM, None),
        (replace(PROBLEM, scale=-1.0, softcap=3.0, head_dim=72, value_head_dim=5), None),
        (replace(PROBLEM, dtype=F32), None),
        (replace(PROBLEM, device_type="cpu"), "it runs on CUDA, the tensors are on cpu"),
        (replace(PROBLEM, dtype=F64), "bfloat16, float16 and float32, not torch.float64"),
        (replace(PROBLEM, head_dim=513), "head dims up to 512 of torch.bfloat16, got 513 and 128"),
        (replace(PROBLEM, dtype=F32, value_head_dim=129), "up to 128 of torch.float32"),
    ],
)
def test_what_it_supports(problem: Problem, reason: str | None) -> None:
    found = PagedTriton().supports(problem, 5)
    assert found is None if reason is None else reason in (found or "")


def test_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert PagedTriton().missing() == "no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "compute capability 8.0" in (PagedTriton().missing() or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(kernels, "has_triton", lambda: False)
    assert PagedTriton().missing() == "Triton is not installed"
    monkeypatch.setattr(kernels, "has_triton", lambda: True)
    assert PagedTriton().missing() is None


def test_blocks_of_a_cache_are_not_copied() -> None:
    pool = BlockPool(8, 4)
    assert all(x.is_contiguous() for x in PagedCase().cache(pool, 0).layer(0))


def check_batches() -> None:
    """As sequences of a pool are attended to: new tokens that see a part, and windows."""
    gpu = SimpleNamespace(multi_processor_count=2)
    with (
        patch.object(api, "paged_kernel", lambda *_: PagedTriton()),
        patch.object(torch.cuda, "get_device_properties", lambda device: gpu),
    ):
        for case in (
            PagedCase(lengths=(600, 7)),
            PagedCase(lengths=(30, 70), num_tokens=5, world_size=2),
            PagedCase(lengths=(70, 60), mask=Mask.sliding(30), num_tokens=3),
        ):
            check_paged(replace(case, block=16, dtype=F32))
        # Blocks that a model made may have any strides.
        strided = replace(CASES["3 queries"], dtype=F32)
        query, *blocks = strided.tensors("cpu")
        blocks = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in blocks]
        out, _ = PagedTriton().forward(query, *blocks, strided.pages, strided.scores)
        tolerance = TOLERANCES[F32]
        torch.testing.assert_close(
            out.double(), strided.expected()[0], rtol=tolerance, atol=tolerance
        )


def check_drawn() -> None:
    """Any lengths, blocks and heads. Machines with a GPU may lack hypothesis."""
    from hypothesis import given, settings
    from hypothesis import strategies as st

    counts = [st.integers(1, x) for x in (4, 40, 3, 4, 2, 20, 20)]
    lengths = st.lists(st.integers(1, 200), min_size=1, max_size=3).map(tuple)

    @settings(max_examples=6, deadline=None, derandomize=True, database=None)
    @given(lengths, st.tuples(*counts), st.booleans())
    def drawn(lengths: tuple[int, ...], counts: tuple[int, ...], is_shared: bool) -> None:
        splits, block, num_queries, group, kv_heads, *dims = counts
        heads = group * kv_heads, kv_heads
        case = Case(lengths, splits, block, num_queries, heads, (dims[0], dims[1]))
        check(replace(case, is_shared=is_shared), "cpu")

    drawn()


def check_far() -> None:
    """Offsets that are computed in 32 bits are addresses outside of the memory."""
    from triton.runtime.interpreter import GridExecutor

    from dtensor_ring.paged.paged_triton import attend
    from tests.compute.test_merge_triton import Distant

    case = Case((40,), dtype=F16)
    query, *near = case.tensors("cpu")
    # The blocks lie beyond 2**31 numbers. What is before them takes no memory.
    first = (1 << 31) // near[0][0].numel() + 1
    size = (first + case.num_blocks) * near[0][0].numel()
    parts = Distant(0, 0)._memory.view(F16)[: 2 * size].split(size)
    far = [part.view(-1, *x.shape[1:]) for part, x in zip(parts, near, strict=True)]
    for blocks, x in zip(far, near, strict=True):
        blocks[first:] = x
    pages = Pages(case.pages.tables + np.int32(first), case.pages.lengths, case.block)
    # The interpreter would copy all the memory onto itself.
    with patch.object(GridExecutor, "_restore_args_dev", lambda *_: None):
        out, _ = attend(query, *far, pages, case.scores, 2)
    torch.testing.assert_close(out.double(), case.expected()[0], rtol=3e-3, atol=3e-3)


@contextmanager
def mended_interpreter() -> Iterator[None]:
    """Triton's interpreter multiplies the bits of bfloat16; that of 3.6 has no bounds of loops.

    It keeps a number as an array of one, and numpy 2.4 makes no integer of that.
    """
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create, patch_tensor = InterpreterBuilder.create_dot, interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def created(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create(self, widened(a), widened(b), *rest)

    with (
        patch.object(InterpreterBuilder, "create_dot", created),
        patch.object(interpreter, "_patch_lang_tensor", patched),
    ):
        yield


def check_in_the_interpreter(names: Sequence[str]) -> None:
    """`tests/interpreted.py` calls it."""
    from tests.compute.test_merge_triton import patched_once

    with warnings.catch_warnings(), mended_interpreter(), patched_once(), np.errstate(all="ignore"):
        # That exp(x) is infinite beyond a softcap is no news, nor that infinities times 0 are NaN
        # in rows that only fill a tile.
        warnings.filterwarnings("ignore", "All-NaN slice")
        for each in names:
            check(CASES[each], "cpu")
        check_batches()
        check_drawn()
        check_far()
