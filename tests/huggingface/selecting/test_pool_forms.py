"""What an index of pools and a compressor describe is what they compute, else they are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch

from parallel_plans.huggingface.probing.eligibility import check_model
from parallel_plans.huggingface.selecting.compressed import (
    PooledKeys,
    _pools_in,
    check_compressors,
    compressing_layers,
)
from parallel_plans.huggingface.selecting.indexers import (
    choose_pools,
    count_places,
    describing_scores,
    indexers_of,
)
from parallel_plans.huggingface.selecting.pools import check_pools
from tests.families import BESIDE_POOLS, CHOOSES_BLOCKS, CHOOSES_POOLS, SELECTING, small_model

DTYPES = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize("family", [*CHOOSES_POOLS, *BESIDE_POOLS])
def test_stock_code_does_as_described(family: str) -> None:
    for dtype in DTYPES:
        model = small_model(family).to(dtype)
        check_pools(indexers_of(model))
        check_compressors(model)


def without_tail(model: Any) -> None:
    indexers_of(model)[0].index_kpool_always_select_tail = False


def other_numbers(model: Any) -> None:
    """As if it chose by other numbers of a token."""
    kind = type(indexers_of(model)[0])
    changed = type(kind.__name__, (kind,), {"forward": _of_flipped(kind.forward)})
    for indexer in indexers_of(model):
        indexer.__class__ = changed


def _of_flipped(plain: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plain)
    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, hidden_states.flip(-1), *args, **kwargs)

    return forward


def every_pool(model: Any) -> None:
    """As if a compressor showed queries all pools."""
    compressor = compressing_layers(model)[0].compressor
    kind = type(compressor)

    def forward(self: Any, *args: Any) -> Any:
        keys, bias = kind.forward(self, *args)
        return keys, torch.zeros_like(bias)

    compressor.__class__ = type(kind.__name__, (kind,), {"forward": forward})


REFUSED = [
    ("GLM-5-Next", without_tail, "chooses other tokens"),
    ("GLM-5-Next", other_numbers, "chooses other tokens"),
    ("Qwen4-Exp", other_numbers, "chooses other tokens"),
    ("DeepSeek-V4", every_pool, "shows queries other pools"),
]


@pytest.mark.parametrize(("family", "change", "match"), REFUSED)
def test_other_code_is_refused(family: str, change: Callable[[Any], None], match: str) -> None:
    model = small_model(family)
    change(model)
    with pytest.raises(ValueError, match=match), describing_scores(model):
        pass


def test_an_unknown_compressor_is_refused() -> None:
    model = small_model("DeepSeek-V4")
    del compressing_layers(model)[0].compressor.position_bias
    with pytest.raises(ValueError, match=r"\(heavily_compressed_attention\) attend to win"):
        check_model(model)


def test_which_models_count_places() -> None:
    assert all(count_places(small_model(x)) for x in (*CHOOSES_POOLS, *BESIDE_POOLS))
    assert all(choose_pools(small_model(x)) for x in CHOOSES_POOLS)
    assert not any(choose_pools(small_model(x)) for x in (*SELECTING, *CHOOSES_BLOCKS))


def test_nothing_is_left_changed() -> None:
    for family in (*CHOOSES_POOLS, *BESIDE_POOLS):
        model = small_model(family)
        before = [set(vars(x)) for x in model.modules()]
        with describing_scores(model):
            assert [set(vars(x)) for x in model.modules()] != before
        assert [set(vars(x)) for x in model.modules()] == before


def test_pools_are_joined_and_no_more() -> None:
    pools: Any = PooledKeys(torch.ones(1, 4, 2), None, None)  # type: ignore[arg-type]
    tokens = torch.ones(1, 1, 4, 2)
    both: Any = torch.cat([tokens, pools], dim=2)
    assert both.tokens is tokens
    assert both.pools is pools
    with pytest.raises(ValueError, match="calls matmul on keys that are pools"):
        torch.matmul(tokens, pools)


def test_numbers_of_pools() -> None:
    chosen = torch.tensor([[[2, 3, 4, 5, 6], [4, -1, -1, -1, -1], [-1] * 5]]).int()
    assert _pools_in(chosen, 2).tolist() == [[[1, 2], [-1, -1], [-1, -1]]]
