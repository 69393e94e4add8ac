"""What the first rank says to all of them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from parallel_plans.huggingface.server.engine import FRAME, AskedTokens, Word, spoken
from tests.pool import Pool


def hear(sizes: list[int]) -> list[bytes]:
    group = dist.new_group(backend="gloo")
    said = [bytes(i % 251 for i in range(size)) if group.rank() == 0 else b"" for size in sizes]
    return [spoken(group, data) for data in said]


def test_words_of_any_size(pool: Pool) -> None:
    """Those that fit the first message, just or not at all, and empty ones."""
    sizes = [0, 1, FRAME - 9, FRAME - 8, FRAME - 7, 3 * FRAME]
    for found in pool.run(3, hear, sizes):
        assert found == [bytes(i % 251 for i in range(size)) for size in sizes]


@pytest.mark.parametrize(
    "word",
    [
        Word(),
        Word(is_end=True),
        Word(
            [AskedTokens("a", [1, 2], {"temperature": 0.1 + 0.2, "do_sample": True}, 2**61)], ["b"]
        ),
    ],
)
def test_words_are_read_as_they_were_said(word: Word) -> None:
    assert Word.of(word.to_bytes()) == word
