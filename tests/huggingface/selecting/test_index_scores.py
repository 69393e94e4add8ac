"""What an indexer describes is what it computes, and what it cannot describe is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_plans.huggingface.core.key_index import KeyIndex
from parallel_plans.huggingface.selecting.indexers import (
    IndexScores,
    SeenLater,
    UnknownScoresError,
    describe_scores,
    describing_scores,
    indexers_of,
)
from parallel_plans.huggingface.selecting.selection import Selection
from tests.families import INDEX, SELECTING, VOCABULARY, small_model

SEQ_LEN = 24


def described(selection: Selection) -> KeyIndex:
    """What a selection is made of."""
    found: list[KeyIndex] = []
    selection.positions(SimpleNamespace(select=lambda index: found.append(index)), {})
    return found[0]


def dense_scores(index: KeyIndex) -> Tensor:
    """The scores of all pairs `(B, L, S)` by their definition, in float64; -inf for later keys."""
    query, keys, weights = (x.double() for x in (index.query, index.keys, index.weights))
    products = torch.einsum("blhd,bsd->blhs", query, keys) * index.scale
    scores = torch.einsum("blh,blhs->bls", weights, products.clamp(min=0))
    return scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), -torch.inf)


@pytest.mark.parametrize("family", SELECTING)
def test_description_is_what_an_indexer_computes(family: str) -> None:
    """The best by the description are those of the stock model, in each layer with an indexer."""
    model, calls = small_model(family), []
    indexers = indexers_of(model)
    assert len(indexers) == (2 if "indexer_types" in SELECTING[family][1] else 3)
    for indexer in indexers:
        indexer.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True)
    tokens = torch.randint(2, VOCABULARY, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(tokens, use_cache=False)
        chosen = list(calls)
        with describing_scores(model):
            for indexer, args, kwargs, best in chosen:
                index = described(indexer(*args, **kwargs))
                assert index.k == INDEX["index_topk"]
                found = dense_scores(index).topk(index.k).indices
                # Queries with fewer keys to see take any of the others, which are masked later.
                expected = best.long()
                same = found.sort().values == expected.sort().values
                assert same[:, index.k - 1 :].all()
    assert not any("forward" in vars(x) for x in indexers)


def keys() -> IndexScores:
    return IndexScores(torch.randn(1, 4, 8))


def products() -> Any:
    columns: Any = keys().transpose(-1, -2).float().unsqueeze(1)
    return torch.matmul(torch.randn(1, 3, 2, 8), columns)


UNKNOWN: dict[str, tuple[str, Callable[[], Any]]] = {
    "another function": ("softmax on its keys", lambda: torch.softmax(products(), -1)),
    "no ReLU": ("products for rectified", lambda: torch.matmul(torch.ones(1, 3, 1, 2), products())),
    "two ReLUs": ("for products", lambda: torch.relu(torch.relu(products()))),
    "negative scale": ("multiplies its products by -1", lambda: products() * -1.0),
    "scaled keys": ("multiplies its keys by 2", lambda: keys() * 2.0),
    "another mask": ("adds a Tensor to its products", lambda: products() + torch.zeros(1)),
    "keys chosen": ("takes its keys for scores", lambda: keys().topk(2)),
    "a mask compared": ("compares its mask with 0", lambda: SeenLater() == 0),
    "a mask read": ("reads bool of its mask", lambda: SeenLater().bool()),
    "a mask too early": ("takes its products for scores", lambda: products() + SeenLater()),
}


def test_anything_else_is_unknown() -> None:
    for match, call in UNKNOWN.values():
        with pytest.raises(UnknownScoresError, match=match):
            call()


def test_positive_scale_commutes_with_the_relu() -> None:
    after: Any = torch.relu(products()) * 0.25
    assert after.scale == (products() * 0.25).scale == 0.25


def test_narrow_keys_stay_narrow_and_wide_ones_are_float32() -> None:
    for given, expected in ((torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)):
        assert IndexScores(torch.randn(1, 4, 8, dtype=given)).float().keys.dtype is expected


class PooledIndexer(torch.nn.Module):
    """Gives its keys to a cache, and reads them by itself."""

    layer_idx = 0

    def forward(self, hidden_states: Tensor, cache: Any = None) -> Tensor:
        packed = cache.update_indexer(hidden_states, self.layer_idx)
        return packed[..., -1].bool()


def test_indexer_that_reads_its_keys_is_refused() -> None:
    indexer: Any = PooledIndexer()
    assert indexers_of(indexer) == [indexer]
    describe_scores([indexer])
    with pytest.raises(ValueError, match="PooledIndexer chooses keys in a way that is not known"):
        indexer(torch.randn(1, 4, 8))
