"""What an indexer of blocks describes is what it computes, and anything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_plans.huggingface.core.key_index import KeyIndex
from parallel_plans.huggingface.selecting.block_scores import (
    ALL_KEYS,
    BlockScores,
    CountedPlaces,
    Places,
    UnknownScoresError,
)
from parallel_plans.huggingface.selecting.indexers import (
    choose_blocks,
    describing_scores,
    indexers_of,
)
from tests.families import CHOOSES_BLOCKS, SELECTING, VOCABULARY, small_model
from tests.huggingface.selecting.test_index_scores import described

SEQ_LEN = 23


def dense_blocks(index: KeyIndex) -> Tensor:
    """Which blocks queries choose by the definition, `(B, heads, L, blocks)`, in float64."""
    assert index.weights is None
    query, keys, size = index.query.double(), index.keys.double(), index.block_size
    place = torch.arange(query.shape[1])
    scores = torch.einsum("blhd,bsd->bhls", query, keys)
    scores = scores.masked_fill(place > place.unsqueeze(1), -torch.inf)
    best = torch.stack([x.amax(-1) for x in scores.split(size, -1)], -1)
    back = place.unsqueeze(1) // size - torch.arange(best.shape[-1])
    best = best.masked_fill((back >= 0) & (back < index.local_blocks), torch.inf)
    last = best.topk(index.k, -1).values[..., -1:]
    return (best >= last) & (best > -torch.inf)


@pytest.mark.parametrize("local_blocks", [0, 1, 2])
@pytest.mark.parametrize("family", CHOOSES_BLOCKS)
def test_description_is_what_an_indexer_computes(family: str, local_blocks: int) -> None:
    """The blocks by the description are those of the stock model, in each layer with an indexer."""
    model = small_model(family, index_local_blocks=local_blocks)
    calls: list[Any] = []
    for indexer in indexers_of(model):
        indexer.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True)
    tokens = torch.randint(2, VOCABULARY, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(tokens, use_cache=False)
        chosen = list(calls)
        assert len(chosen) == 2
        with describing_scores(model):
            for indexer, args, kwargs, blocks in chosen:
                found = dense_blocks(described(indexer(*args, **kwargs)))
                expected = torch.zeros_like(found[..., :1]).repeat(1, 1, 1, found.shape[-1] + 1)
                expected.scatter_(-1, blocks % expected.shape[-1], True)
                assert torch.equal(found, expected[..., :-1])


def test_which_models_choose_blocks() -> None:
    assert all(choose_blocks(small_model(x)) for x in CHOOSES_BLOCKS)
    assert not any(choose_blocks(small_model(x)) for x in SELECTING)


QUERIES, KEYS = Places("queries"), Places("keys", ALL_KEYS)
LATER: Any = KEYS > QUERIES
SHAPE = 1, 2, 3, -(-ALL_KEYS // 4), 4


def keys() -> Any:
    return BlockScores(torch.randn(1, 5, 8))


def products() -> Any:
    return torch.matmul(torch.randn(1, 2, 3, 8), keys().float().transpose(-1, -2))


def hidden() -> Any:
    return products().masked_fill(LATER, -torch.inf)


def scores() -> Any:
    return torch.nn.functional.pad(hidden(), (0, 1), value=-torch.inf).view(*SHAPE).amax(dim=-1)


def last(size: int = 4, number: int = 1) -> Any:
    return (QUERIES // size) - Places("keys", number)


def test_what_is_described() -> None:
    best, blocks = scores().scatter_(-1, last(), torch.inf).topk(3)
    index = described(blocks.masked_fill(best == -torch.inf, -1))
    assert (index.k, index.block_size, index.local_blocks, index.weights) == (3, 4, 1, None)
    assert index.query.shape == (1, 3, 2, 8)


UNKNOWN: dict[str, tuple[str, Callable[[], Any]]] = {
    "another function": ("softmax on its keys", lambda: torch.softmax(products(), -1)),
    "a ReLU": ("relu on its keys", lambda: torch.relu(products())),
    "other keys hidden": ("with 0.0 at", lambda: products().masked_fill(LATER, 0.0)),
    "a mask": ("with -inf at tensor", lambda: products().masked_fill(torch.ones(1), -torch.inf)),
    "nothing hidden": ("takes its products for", lambda: products().view(*SHAPE)),
    "blocks of no keys": ("views its products up to the query", lambda: hidden().view(1, 2, 3, 4)),
    "other heads": ("as \\(1, 2, 1,", lambda: hidden().view(1, 2, 1, *SHAPE[3:])),
    "padding that may win": ("pad on its", lambda: torch.nn.functional.pad(hidden(), (0, 1))),
    "best of heads": ("best of dim 1", lambda: hidden().view(*SHAPE).amax(dim=1)),
    "no best key": ("keys by blocks for scores", lambda: hidden().view(*SHAPE).topk(2)),
    "other blocks": ("sets its scores", lambda: scores().scatter_(-1, last(8), torch.inf)),
    "last blocks last": ("to -inf", lambda: scores().scatter_(-1, last(), -torch.inf)),
    "scores compared": ("compares its scores with 0", lambda: scores().topk(2)[0] == 0),
    "other blocks filled": ("fills its blocks", lambda: scores().topk(2)[0].masked_fill(None, 0)),
    "fewer keys": ("places of keys, and compares", lambda: Places("keys", 7) > QUERIES),
    "queries compared": ("places of queries, and", lambda: QUERIES > KEYS),
    "keys divided": ("places of keys, and divides", lambda: KEYS // 4),
    "a number taken away": ("and subtracts 1", lambda: (QUERIES // 4) - 1),
    "clamped at 1": ("clamps them at 1", lambda: last().clamp(min=1)),
}


def test_anything_else_is_unknown() -> None:
    for match, call in UNKNOWN.values():
        with pytest.raises(UnknownScoresError, match=match):
            call()


def test_ranges_from_0_are_places() -> None:
    with CountedPlaces() as places:
        assert isinstance(torch.arange(3), Tensor), "a hook of a projection counts"
        places.has_keys = True
        assert torch.arange(3, device="cpu") == Places("keys", 3)
        assert isinstance(torch.arange(1, 3), Tensor)
        assert isinstance(torch.ones(2), Tensor)


def test_narrow_keys_stay_narrow_and_wide_ones_are_float32() -> None:
    for given, expected in ((torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)):
        assert BlockScores(torch.randn(1, 4, 8, dtype=given)).float().keys.dtype is expected
