"""Pools in eight bits: what is kept, shared and copied, its bytes, and attention to it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import BlockPool, Mask, merge_attention
from dtensor_ring.paged.api import PagedBatch, PagedCache
from dtensor_ring.quantised import kept_tokens
from dtensor_ring.quantised.block_scales import FORMATS
from dtensor_ring.quantised.kept_tokens import KINDS
from tests.dense import dense_attention, visible
from tests.paged.test_paged_cache import paged_cases
from tests.paged_attention import TOLERANCES, PagedCase
from tests.pool import Pool
from tests.quantised.test_kept_tokens import Rounded

every_format = pytest.mark.parametrize("kv_dtype", FORMATS)


def filled(case: PagedCase, kv_dtype: str) -> tuple[list[PagedCache], list[Any]]:
    """As `PagedCase.filled`, in eight bits."""

    def cache(self: PagedCase, pool: BlockPool, rank: int) -> PagedCache:
        dims = self.heads[1], self.head_dims[0], 1, rank, self.head_dims[1]
        return PagedCache(pool, *dims, dtype=self.dtype, kv_dtype=kv_dtype)

    with patch.object(PagedCase, "cache", cache):
        return case.filled()


def rounded(case: PagedCase, kv_dtype: str, x: Tensor, kind: str) -> Tensor:
    """Keys or values of a sequence, as its ranks keep them: a page is on one rank."""
    block, size = case.block, min(kept_tokens.BLOCK_SIZE, case.block)
    parts = []
    with patch.object(kept_tokens, "BLOCK_SIZE", size):
        for page in x.split(block, 2):
            kept = Rounded(page, kv_dtype, kind)
            kept.append(page)
            parts.append(kept.read())
    return torch.cat(parts, 2)


def check_rounded(case: PagedCase, kv_dtype: str) -> None:
    """The partials of all ranks, merged, are dense attention to what is kept."""
    caches, sequences = filled(case, kv_dtype)
    parts = [case.attend(PagedBatch(cache, sequences, case.num_tokens)) for cache in caches]
    check(case, kv_dtype, merge_attention(parts))


def check(case: PagedCase, kv_dtype: str, results: tuple[Tensor, Tensor]) -> None:
    expected = []
    for query, key, value in case.inputs():
        keys, values = (
            rounded(case, kv_dtype, x, kind) for x, kind in zip((key, value), KINDS, strict=True)
        )
        seen = visible(case.mask, (key.shape[2], key.shape[2]), 1)[:, 0, -case.num_tokens :]
        how = {"scale": 0.3, "softcap": case.softcap, "seen": seen}
        last = query[:, :, -case.num_tokens :]
        expected.append(dense_attention(last, keys, values, case.mask, **how))
    tolerance = TOLERANCES[case.dtype]
    dense = torch.cat([x.out for x in expected]), torch.cat([x.lse for x in expected])
    for found, exact in zip(results, dense, strict=True):
        torch.testing.assert_close(found.double(), exact.detach(), atol=tolerance, rtol=tolerance)


CASES = {
    "unequal lengths": PagedCase(lengths=(1, 9, 30, 4), world_size=2),
    "window": PagedCase(lengths=(30, 9), num_tokens=3, mask=Mask.sliding(6)),
    "gathered": PagedCase(lengths=(30, 9), num_tokens=3, kernel="gathered", world_size=3),
    "units of a page": PagedCase(lengths=(300, 64, 127), block=128, num_tokens=5),
    "four ranks": PagedCase(lengths=(90, 41), block=8, world_size=4, head_dims=(8, 4)),
}


@every_format
@pytest.mark.parametrize("name", CASES)
def test_attention_to_what_is_kept(name: str, kv_dtype: str) -> None:
    check_rounded(CASES[name], kv_dtype)


def decoded(case: PagedCase, kv_dtype: str) -> None:
    mesh = init_device_mesh("cpu", (case.world_size,), mesh_dim_names=("cp",))
    caches, sequences = filled(case, kv_dtype)
    batch = PagedBatch(caches[mesh.get_local_rank()], sequences, case.num_tokens)
    how = {"mask": case.mask, "scale": 0.3, "softcap": case.softcap}
    check(case, kv_dtype, batch.decode(0, case.query(), mesh=mesh, **how))


def test_decode_over_a_mesh(pool: Pool) -> None:
    pool.run(2, decoded, CASES["unequal lengths"], "int8")


def test_random_attention_to_what_is_kept() -> None:
    @settings(max_examples=20, deadline=None, derandomize=True, database=None)
    @given(paged_cases(), st.sampled_from([*FORMATS]), st.sampled_from([4, 64]))
    def check_any(case: PagedCase, kv_dtype: str, size: int) -> None:
        with patch.object(kept_tokens, "BLOCK_SIZE", size):
            check_rounded(case, kv_dtype)

    check_any()


def of(positions: range) -> Tensor:
    """Keys or values of some positions, `(1, 2, T, 8)`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, 2, 200, 8, generator=generator)[:, :, positions.start : positions.stop]


class Model:
    """Two layers that write; a rank's cache, and what each sequence keeps on it."""

    def __init__(self, kv_dtype: str, world_size: int = 1, block: int = 8) -> None:
        self.pool = BlockPool(8, block=block, world_size=world_size)
        self.caches = [
            PagedCache(self.pool, 2, 8, 2, rank, kv_dtype=kv_dtype) for rank in range(world_size)
        ]

    def append(self, sequence: Any, num_tokens: int) -> None:
        copies = self.pool.append(sequence, range(len(sequence), len(sequence) + num_tokens))
        for cache in self.caches:
            cache.copy(copies)
        self.write(sequence, num_tokens)

    def write(self, sequence: Any, num_tokens: int) -> None:
        new = of(range(len(sequence) - num_tokens, len(sequence)))
        for cache in self.caches:
            batch = PagedBatch(cache, [sequence], num_tokens)
            for layer in range(2):
                batch.write(layer, new + layer, new - layer)
        self.pool.commit(sequence)

    def read(self, sequence: Any) -> list[Tensor]:
        return [x for c in self.caches for i in range(2) for x in c.gather(i, sequence)]


@every_format
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("size", [4, 64])
def test_one_by_one_is_at_once(kv_dtype: str, world_size: int, size: int) -> None:
    with patch.object(kept_tokens, "BLOCK_SIZE", size):
        found = []
        for sizes in ([29], [1] * 29, [3, 1, 20, 5], [8, 8, 8, 5]):
            model = Model(kv_dtype, world_size)
            sequence = model.pool.add([])
            for num_tokens in sizes:
                model.append(sequence, num_tokens)
            found.append(model.read(sequence))
        for other in found[1:]:
            assert all(map(torch.equal, found[0], other))


@every_format
@pytest.mark.parametrize("world_size", [1, 2])
def test_forks_prefixes_and_crops(kv_dtype: str, world_size: int) -> None:
    with patch.object(kept_tokens, "BLOCK_SIZE", 4):
        model = Model(kv_dtype, world_size)
        first = model.pool.add(range(22))
        model.write(first, 22)
        before = model.read(first)
        # A twin takes its own copy of the last block, open tokens included.
        twin = model.pool.fork(first)
        model.append(twin, 9)
        assert all(map(torch.equal, model.read(first), before))
        model.append(first, 9)
        assert all(map(torch.equal, model.read(first), model.read(twin)))
        # A prompt that begins alike has the blocks, and their scales.
        other = model.pool.add([*range(16), 1, 2])
        assert other.num_cached == 16
        model.write(other, 2)
        for number, (here, there) in enumerate(
            zip(model.read(first), model.read(other), strict=True)
        ):
            num_shared = model.pool.dealing.num_before(16, number // 4)
            assert torch.equal(here[:, :, :num_shared], there[:, :, :num_shared])
        # A crop into a full block opens it, with what it was rounded to.
        kept = model.read(twin)
        model.pool.crop(twin, 26)
        assert all(
            torch.equal(now, was[:, :, : now.shape[2]])
            for now, was in zip(model.read(twin), kept, strict=True)
        )
        model.append(twin, 1)
        for now, was in zip(model.read(twin), kept, strict=True):
            assert torch.equal(now[:, :, : now.shape[2] - 3], was[:, :, : now.shape[2] - 3])
        assert all(map(torch.equal, model.read(first)[:1], kept[:1]))


def test_bytes_and_open_memory() -> None:
    """About half, however many sequences come and go: open memory of freed ones is used again."""
    pools = [BlockPool(64, block=64) for _ in range(2)]
    plain, cache = (
        PagedCache(pool, 2, 64, 1, dtype=torch.bfloat16, kv_dtype=kv_dtype)
        for pool, kv_dtype in zip(pools, (None, "int8"), strict=True)
    )
    empty = cache.num_bytes
    assert empty <= 0.53 * plain.num_bytes
    for num_full in reversed(range(40)):  # each leaves something open in another block
        num_tokens = 64 * num_full + 3
        new = torch.zeros(1, 2, num_tokens, 64, dtype=torch.bfloat16)
        sequence = cache.pool.add(range(num_tokens))
        PagedBatch(cache, [sequence], num_tokens).write(0, new, new)
        cache.pool.free(sequence)
    assert cache.num_bytes - empty <= 4 * 2 * 2 * 64 * 64 * 2


def test_inference_mode_or_not() -> None:
    model = Model("int8")
    sequence = model.pool.add([])
    for mode in (True, False, True, False):
        with torch.inference_mode(mode):
            model.append(sequence, 5)
    assert model.read(sequence)[0].shape == (1, 2, 20, 8)


REFUSED = {
    "format": (8, {"kv_dtype": "int4"}, 'kv_dtype of a cache must be one of "int8", "fp8"'),
    "integers": (
        8,
        {"kv_dtype": "int8", "dtype": torch.int64},
        "of torch.int64 have no eight bits, only",
    ),
    "blocks": (
        96,
        {"kv_dtype": "fp8"},
        "one scale for 64 tokens, which do not divide blocks of 96; make the pool with block=64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    block, how, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        PagedCache(BlockPool(4, block=block), 2, 8, 1, **how)


def test_ranks_compare_formats() -> None:
    seen = []
    for kv_dtype in (None, *FORMATS):
        cache = PagedCache(BlockPool(4, block=4), 2, 8, 1, kv_dtype=kv_dtype)
        sequence = cache.pool.add([1, 2, 3])
        batch = PagedBatch(cache, [sequence])
        seen.append(batch._plan.request(Mask.causal()).layout.mark)
    assert len({*seen}) == 3
