"""What an indexer or a compressor describes is what it computes, and anything else is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_plans.huggingface.core.key_index import KeyIndex
from parallel_plans.huggingface.probing.eligibility import check_model
from parallel_plans.huggingface.selecting.block_scores import (
    ALL_KEYS,
    BlockScores,
    CountedPlaces,
    Places,
)
from parallel_plans.huggingface.selecting.compressed import (
    PooledKeys,
    _pools_in,
    check_compressors,
    compressing_layers,
)
from parallel_plans.huggingface.selecting.indexers import (
    IndexScores,
    SeenLater,
    UnknownScoresError,
    choose_blocks,
    choose_pools,
    count_places,
    describe_scores,
    describing_scores,
    indexers_of,
)
from parallel_plans.huggingface.selecting.pools import check_pools
from parallel_plans.huggingface.selecting.selection import Selection
from tests.families import (
    BESIDE_POOLS,
    CHOOSES_BLOCKS,
    CHOOSES_POOLS,
    INDEX,
    SELECTING,
    VOCABULARY,
    small_model,
)

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


def test_positive_scale_commutes_with_the_relu() -> None:
    after: Any = torch.relu(products()) * 0.25
    assert after.scale == (products() * 0.25).scale == 0.25


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


NUM_TOKENS = 23
"""Which blocks do not divide."""


def dense_blocks(index: KeyIndex) -> Tensor:
    """Which blocks queries choose by the definition, `(B, heads, L, blocks)`, in float64."""
    assert index.weights is None
    query, block_keys, size = index.query.double(), index.keys.double(), index.block_size
    place = torch.arange(query.shape[1])
    scores = torch.einsum("blhd,bsd->bhls", query, block_keys)
    scores = scores.masked_fill(place > place.unsqueeze(1), -torch.inf)
    best = torch.stack([x.amax(-1) for x in scores.split(size, -1)], -1)
    back = place.unsqueeze(1) // size - torch.arange(best.shape[-1])
    best = best.masked_fill((back >= 0) & (back < index.local_blocks), torch.inf)
    last = best.topk(index.k, -1).values[..., -1:]
    return (best >= last) & (best > -torch.inf)


@pytest.mark.parametrize("local_blocks", [0, 1, 2])
@pytest.mark.parametrize("family", CHOOSES_BLOCKS)
def test_described_blocks_are_those_of_an_indexer(family: str, local_blocks: int) -> None:
    """The blocks by the description are those of the stock model, in each layer with an indexer."""
    model = small_model(family, index_local_blocks=local_blocks)
    calls: list[Any] = []
    for indexer in indexers_of(model):
        indexer.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True)
    tokens = torch.randint(
        2, VOCABULARY, (2, NUM_TOKENS), generator=torch.Generator().manual_seed(1)
    )
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


def block_keys() -> Any:
    return BlockScores(torch.randn(1, 5, 8))


def block_products() -> Any:
    return torch.matmul(torch.randn(1, 2, 3, 8), block_keys().float().transpose(-1, -2))


def hidden() -> Any:
    return block_products().masked_fill(LATER, -torch.inf)


def scores() -> Any:
    return torch.nn.functional.pad(hidden(), (0, 1), value=-torch.inf).view(*SHAPE).amax(dim=-1)


def last(size: int = 4, number: int = 1) -> Any:
    return (QUERIES // size) - Places("keys", number)


def test_what_is_described() -> None:
    best, blocks = scores().scatter_(-1, last(), torch.inf).topk(3)
    index = described(blocks.masked_fill(best == -torch.inf, -1))
    assert (index.k, index.block_size, index.local_blocks, index.weights) == (3, 4, 1, None)
    assert index.query.shape == (1, 3, 2, 8)


UNKNOWN_BLOCKS: dict[str, tuple[str, Callable[[], Any]]] = {
    "another function": ("softmax on its keys", lambda: torch.softmax(block_products(), -1)),
    "a ReLU": ("relu on its keys", lambda: torch.relu(block_products())),
    "other keys hidden": ("with 0.0 at", lambda: block_products().masked_fill(LATER, 0.0)),
    "a mask": (
        "with -inf at tensor",
        lambda: block_products().masked_fill(torch.ones(1), -torch.inf),
    ),
    "nothing hidden": ("takes its products for", lambda: block_products().view(*SHAPE)),
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
    for match, call in (*UNKNOWN.values(), *UNKNOWN_BLOCKS.values()):
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
    given = (torch.bfloat16, torch.bfloat16), (torch.float64, torch.float32)
    for kind, (dtype, expected) in product((IndexScores, BlockScores), given):
        assert kind(torch.randn(1, 4, 8, dtype=dtype)).float().keys.dtype is expected


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
