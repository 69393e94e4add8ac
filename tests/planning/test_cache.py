"""The cache that is bounded in bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dtensor_ring import Mask, ZigZag
from dtensor_ring.planning.lru import ByteCache, cached_bytes
from dtensor_ring.planning.mask import as_documents
from dtensor_ring.planning.plan import plan


@pytest.fixture
def calls() -> list[tuple]:
    return []


@pytest.fixture
def cache(calls: list[tuple]) -> ByteCache[str]:
    @cached_bytes(max_bytes=10, num_bytes=len)
    def repeat(text: str, times: int = 1) -> str:
        """Its docstring stays."""
        calls.append((text, times))
        return text * times

    return repeat


def test_results_are_kept_by_their_arguments(cache: ByteCache[str], calls: list[tuple]) -> None:
    assert [cache("a", 2), cache("a", 2), cache("a", times=2), cache("a"), cache("b")] == [
        *("aa", "aa", "aa", "a", "b")
    ]
    assert calls == [("a", 2), ("a", 2), ("a", 1), ("b", 1)]
    assert cache.__doc__ == "Its docstring stays."
    assert (len(cache), cache.num_bytes) == (4, 6)


def test_the_least_recently_used_goes_first(cache: ByteCache[str], calls: list[tuple]) -> None:
    cache("a", 4), cache("b", 4), cache("a", 4)
    assert cache("c", 4) == "cccc"
    assert cache.num_bytes == 8
    calls.clear()
    cache("a", 4), cache("c", 4)
    assert not calls
    cache("b", 4)
    assert calls == [("b", 4)]


def test_what_is_too_large_is_returned_and_evicts_nothing(
    cache: ByteCache[str], calls: list[tuple]
) -> None:
    cache("a", 9)
    assert cache("b", 11) == cache("b", 11) == "b" * 11
    assert calls == [("a", 9), ("b", 11), ("b", 11)]
    assert (len(cache), cache.num_bytes) == (1, 9)


def test_clear(cache: ByteCache[str], calls: list[tuple]) -> None:
    cache("a")
    cache.clear()
    assert (len(cache), cache.num_bytes) == (0, 0)
    cache("a")
    assert len(calls) == 2


def test_errors_are_not_kept() -> None:
    @cached_bytes(10, len)
    def fails(text: str) -> str:
        raise ValueError(text)

    for _ in range(2):
        with pytest.raises(ValueError, match="why"):
            fails("why")
    assert fails.num_bytes == 0


def test_threads_keep_the_count_right() -> None:
    @cached_bytes(max_bytes=50, num_bytes=len)
    def text_of(number: int) -> str:
        return str(number) * 5

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(text_of, list(range(40)) * 25))
    assert found == [str(number) * 5 for number in range(40)] * 25
    assert text_of.num_bytes <= 50
    assert text_of.num_bytes == sum(len(x.value) for x in text_of._kept.values())


def test_plans_are_bounded_in_bytes() -> None:
    plan.clear()
    sizes = []
    for number in range(20):
        documents = as_documents([0, 1 + number, 4096])
        made = plan(ZigZag(), Mask.causal(), 0, 8, 4096, documents)
        sizes.append(made.num_bytes + documents.num_bytes)  # the key is kept, too
    assert plan.num_bytes == sum(sizes) <= plan.max_bytes
    assert len(plan) == 20
