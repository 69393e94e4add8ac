"""Labels are the next tokens of the same document."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dtensor_ring import next_token_labels

NONE = -100
TOKENS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 1, 2, 0]])


@pytest.mark.parametrize(
    ("tokens", "cu_seqlens", "expected"),
    [
        (TOKENS[0], None, [4, 5, 6, 7, NONE]),
        (TOKENS, None, [[4, 5, 6, 7, NONE], [9, 1, 2, 0, NONE]]),
        (TOKENS[0], [0, 2, 5], [4, NONE, 6, 7, NONE]),
        (TOKENS[0], [0, 2, 2, 5, 5], [4, NONE, 6, 7, NONE]),
        (TOKENS, [0, 1, 5], [[NONE, 5, 6, 7, NONE], [NONE, 1, 2, 0, NONE]]),
        (TOKENS, [[0, 1, 5], [0, 4, 4]], [[NONE, 5, 6, 7, NONE], [9, 1, 2, NONE, NONE]]),
    ],
)
def test_next_tokens(tokens: Tensor, cu_seqlens: Any, expected: Any) -> None:
    given = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    labels = next_token_labels(tokens, given)
    assert labels.tolist() == expected
    assert labels.dtype == tokens.dtype
    others = next_token_labels(tokens, given, ignore_index=-1)
    assert torch.equal(others, labels.masked_fill(labels == NONE, -1))


@pytest.mark.parametrize(
    ("tokens", "cu_seqlens", "error", "match"),
    [
        ([1, 2], None, TypeError, "tokens must be a tensor of integers, got list"),
        (TOKENS.float(), None, TypeError, "tokens must be .*, got torch.float32"),
        (TOKENS, [0, 5], TypeError, "cu_seqlens must be a tensor of integers, got list"),
        (TOKENS[None], None, ValueError, r"\(B, S\) or \(S,\), got \(1, 2, 5\)"),
        (TOKENS, torch.tensor([[0, 5]]), ValueError, r"cu_seqlens must be .* got \(1, 2\)"),
        (TOKENS, torch.tensor([0, 6]), ValueError, "a sequence of 5 tokens, got 0 to 6"),
    ],
)
def test_refusals(tokens: Any, cu_seqlens: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        next_token_labels(tokens, cu_seqlens)
