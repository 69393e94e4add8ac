"""What the first rank says to all of them."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from parallel_plans.huggingface.server.engine import FRAME, AskedTokens, Word, spoken
from tests.pool import on_ranks


@on_ranks(3)
def test_words_of_any_size() -> None:
    """Those that fit the first message, just or not at all, and empty ones."""
    group = dist.new_group(backend="gloo")
    for size in (0, 1, FRAME - 9, FRAME - 8, FRAME - 7, 3 * FRAME):
        said = bytes(i % 251 for i in range(size))
        assert spoken(group, b"" if group.rank() else said) == said


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
