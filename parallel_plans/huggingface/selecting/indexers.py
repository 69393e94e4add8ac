"""Replaces the forward of indexers: they describe their scores, and attention chooses the keys."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parallel_plans.huggingface.core.key_index import KeyIndex
from parallel_plans.huggingface.core.versions import names_in_forward, parameter_of_cache
from parallel_plans.huggingface.core.whole_rows import DOCUMENTS, ROW, TOKENS
from parallel_plans.huggingface.selecting import compressed
from parallel_plans.huggingface.selecting.block_scores import (
    BlockScores,
    CountedPlaces,
    Places,
    UnknownScoresError,
)
from parallel_plans.huggingface.selecting.pools import (
    check_pools,
    form_of,
    hand_on_choice,
    pool_forward,
)
from parallel_plans.huggingface.selecting.selection import Selection, keep_latents

# The methods to which indexers give their keys: of a cache, or of one of its layers.
UPDATE, UPDATE_LAYER = "update_indexer", "update_index"
# The type, in a config, of layers whose attention gets what an indexer chooses.
INDEXED_KIND = "indexed_attention"
MASK, POSITIONS = "attention_mask", "position_ids"


def indexers_of(model: nn.Module) -> list[Any]:
    """Return the modules whose forward gives keys of an index to a cache."""
    updates = {UPDATE, UPDATE_LAYER}
    return [x for x in model.modules() if updates.intersection(names_in_forward(x))]


# Where a layer of a stock cache keeps the positions of all tokens, by three axes.
POSITIONS_OF_INDEX = "indexer_position_ids"


def give_index(indexer: Any, layer: Any, keys: Tensor, padding: Tensor | None = None) -> None:
    """Give the keys of an index, `(B, S, D)`, to a layer of a stock cache.

    With pools they are the rows that a cache keeps for them. `padding` is the number of padding
    tokens before each row, `(B,)`.
    """
    if (form := form_of(indexer)) is not None:
        batch, num_tokens, _ = keys.shape
        places = torch.arange(num_tokens, device=keys.device).expand(batch, -1)
        if padding is not None:
            places = places - padding.to(keys.device).unsqueeze(-1)
        # Our rows may hold more than those of the stock cache, such as angles.
        keys = keys[..., : form.stock_row(indexer)]
        if form.is_turned:
            setattr(layer, POSITIONS_OF_INDEX, places.clamp(min=0).expand(3, -1, -1))
        else:  # the last number of a row says what is no padding
            keys = torch.cat([keys[..., :-1], (places >= 0).unsqueeze(-1).to(keys)], -1)
        layer.update_indexer(keys)
    elif hasattr(layer, UPDATE):
        layer.update_indexer(keys)
    else:
        layer.update_index(keys.unsqueeze(1))


def keeps_positions(indexer: Any) -> bool:
    """Return whether a stock cache keeps positions beside the keys of an index."""
    form = form_of(indexer)
    return form is not None and form.is_turned


def choose_blocks(model: nn.Module) -> bool:
    """Return whether indexers describe blocks."""
    return any(UPDATE_LAYER in names_in_forward(x) for x in indexers_of(model))


def choose_pools(model: nn.Module) -> bool:
    """Return whether indexers describe pools."""
    return any(form_of(x) is not None for x in indexers_of(model))


def count_places(model: nn.Module) -> str | None:
    """Return from where on layers with blocks or pools count places: `ROW`, `TOKENS`, `DOCUMENTS`.

    `None` stands for a model without such layers.
    """
    if choose_blocks(model) or compressed.compressing_layers(model):
        return ROW
    found = {form.counted for x in indexers_of(model) if (form := form_of(x)) is not None}
    return next((x for x in (TOKENS, DOCUMENTS) if x in found), None)


def selecting_layers(model: Any) -> list[Any]:
    """Return the attention modules that get the selection of an indexer, their own or another's."""
    types = getattr(model.config, "layer_types", None) or ()
    layers = {number for number, kind in enumerate(types) if kind == INDEXED_KIND}
    return [
        x
        for x in model.modules()
        if getattr(x, "layer_idx", None) in layers and hasattr(x, "indexer")
    ]


@contextmanager
def describing_scores(model: Any) -> Iterator[None]:
    """Open a context in which the indexers of a model describe their scores."""
    indexers = indexers_of(model)
    check_pools(indexers)
    compressed.check_compressors(model)
    describe_scores(indexers)
    changed = hand_on_choice(model) + compressed.describe_pools(model)
    try:
        yield
    finally:
        for module, name in [(x, "forward") for x in indexers] + changed:
            delattr(module, name)


def describe_scores(indexers: list[Any]) -> None:
    """Make these indexers describe their scores from now on."""
    for indexer in indexers:
        form = form_of(indexer)
        forward = _forward(indexer) if form is None else pool_forward(indexer, form)
        indexer.forward = MethodType(forward, indexer)


def select_keys_of(model: Any) -> None:
    """Make the indexed layers of a model attend to the keys that they choose over all ranks."""
    describe_scores(indexers_of(model))
    hand_on_choice(model)
    compressed.describe_pools(model)
    keep_latents(selecting_layers(model))


class KeyTaker:
    """Stands in for the cache in one call of an indexer, and takes its keys.

    Args:
        cache: the cache of the call, if there is one.
        places: what counts places from then on, for an indexer of blocks.
    """

    def __init__(self, cache: Any, places: CountedPlaces) -> None:
        self._cache, self._places = cache, places

    def update_indexer(self, keys: Tensor, layer_idx: int) -> IndexScores:
        """Store keys of new tokens, `(B, L, D)`, and return what stands for all keys."""
        if self._cache is not None:
            keys = self._cache.update_indexer(keys, layer_idx)
        return IndexScores(keys)

    @property
    def layers(self) -> KeyTaker:
        """What stands for the layers of the cache."""
        return self

    def __getitem__(self, layer_idx: int) -> LayerTaker:
        """Return what takes the keys of one layer."""
        return LayerTaker(self._cache, layer_idx, self._places)


class LayerTaker(NamedTuple):
    """Stands in for a layer of the cache in one call of an indexer, and takes its keys."""

    cache: Any
    layer_idx: int
    places: CountedPlaces

    def update_index(self, keys: Tensor) -> BlockScores:
        """Store keys of new tokens, `(B, 1, L, D)`, and return what stands for all keys."""
        own = keys.squeeze(1)
        if self.cache is not None:
            own = self.cache.update_indexer(own, self.layer_idx)
        self.places.has_keys = True
        return BlockScores(own)


def _forward(indexer: nn.Module) -> Any:
    """Return a forward of the indexer that returns a `Selection`."""
    plain, cache = type(indexer).forward, parameter_of_cache(type(indexer).forward)
    known, of_blocks = signature(plain), choose_blocks(indexer)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        bound = known.bind(self, *args, **kwargs)
        given, places = bound.arguments, CountedPlaces()
        if MASK in given:
            given[MASK] = SeenLater()
        if cache is not None:
            # Without a cache, too: it is where an indexer shows its keys.
            given[cache] = KeyTaker(given.get(cache), places)
        if of_blocks and POSITIONS in given:
            given[POSITIONS] = Places("queries")
        try:
            with places if of_blocks else nullcontext():
                chosen = plain(*bound.args, **bound.kwargs)
        except (AttributeError, IndexError, TypeError, UnknownScoresError) as error:
            raise ValueError(_refusal(self, str(error))) from error
        if not isinstance(chosen, Selection):
            raise ValueError(_refusal(self, f"it returns {type(chosen).__name__}"))
        return chosen

    return forward


def _refusal(indexer: nn.Module, what: str) -> str:
    return (
        f"no context-parallel plan: {type(indexer).__name__} chooses keys in a way that is not "
        f"known: {what}. Known are the best keys of each query by a sum, over heads, of weights "
        "times rectified products of queries and keys, and the best blocks of each query and head, "
        "by their best product"
    )


class SeenLater:
    """Stands for the mask of an indexer: attention knows what a query sees."""

    dtype = torch.float32
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Refuse an indexer that reads which tokens a query sees.

        Raises:
            UnknownScoresError: always.
        """
        raise UnknownScoresError(f"it compares its mask with {other}, to find what a query sees")

    def __getattr__(self, name: str) -> Any:
        """Refuse an indexer that does anything with its mask but adding it.

        Raises:
            UnknownScoresError: for any name but those of Python's protocols.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownScoresError(f"it reads {name} of its mask, to find what a query sees")


# Note [Scores that are not computed]: an indexer of transformers scores each token for each query,
# `(B, S, S)` numbers, and takes the best. Under a plan its own forward runs on `IndexScores` in
# place of the keys. Products, ReLU and weights are written down there, and what it chooses is a
# `Selection`: an op makes it later of queries, keys and weights. So projections and rotations are
# those of the model, no scores of all pairs exist, and code that does anything else is refused.
# `BlockScores` do the same for indexers that choose blocks.
@dataclass(frozen=True, eq=False)
class IndexScores:
    """Scores of keys, `(B, L, S)`, as far as an indexer has described them.

    They are `sum over heads of weights * relu(scale * query @ key)`.

    Attributes:
        keys: the keys of this rank, `(B, C, D)`.
        stage: what the indexer has: "keys", "products", "rectified products" or "scores".
        query: queries, `(B, L, heads, D)`.
        weights: weights of the heads, `(B, L, heads)`.
        scale: the factor of the products.
    """

    keys: Tensor
    stage: str = "keys"
    query: Tensor | None = None
    weights: Tensor | None = None
    scale: float = 1.0

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> IndexScores:
        """Write down a product or a ReLU.

        Raises:
            UnknownScoresError: for any other function.
        """
        name = getattr(func, "__name__", str(func))
        if name == "matmul" and isinstance(args[1], cls) and isinstance(args[0], Tensor):
            return args[1]._times(args[0])
        if name == "relu" and isinstance(args[0], cls):
            return args[0]._having("products", stage="rectified products")
        raise UnknownScoresError(f"it calls {name} on its keys or on scores by them")

    def transpose(self, *dims: int) -> IndexScores:
        """Return the keys as columns for a product."""
        return self._having("keys")

    def unsqueeze(self, dim: int) -> IndexScores:
        """Return the keys, which all heads share."""
        return self._having("keys")

    def float(self) -> IndexScores:
        """Return the keys, whose products are computed in float32 at least."""
        # Narrower keys travel as they are, and become float32 where they arrive.
        wide = self.keys.float() if self.keys.dtype is torch.float64 else self.keys
        return self._having("keys", keys=wide)

    def __mul__(self, factor: Any) -> IndexScores:
        """Scale the products; a positive factor commutes with the ReLU."""
        if not isinstance(factor, (int, float)) or factor <= 0 or "products" not in self.stage:
            raise UnknownScoresError(f"it multiplies its {self.stage} by {factor}")
        return replace(self, scale=self.scale * factor)

    def squeeze(self, dim: int) -> IndexScores:
        """Return the scores, whose heads are summed."""
        return self._having("scores")

    def __add__(self, mask: Any) -> IndexScores:
        """Return the scores; the keys that a query does not see are left out later."""
        if not isinstance(mask, SeenLater):
            raise UnknownScoresError(f"it adds a {type(mask).__name__} to its {self.stage}")
        return self._having("scores")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, with an unbounded number of keys: other ranks have more of them."""
        return (*self.keys.shape[:1], sys.maxsize)

    def topk(self, k: int, dim: int = -1) -> Selection:
        """Return the choice of the best `k` keys of each query."""
        found = self._having("scores")
        assert found.query is not None and found.weights is not None
        return Selection(KeyIndex(found.query, found.keys, found.weights, k, found.scale))

    def _times(self, left: Tensor) -> IndexScores:
        """Return products with queries, or sums of rectified ones by weights `(B, L, 1, N)`."""
        if self.stage == "keys":
            return replace(self, stage="products", query=left)
        return self._having("rectified products", stage="scores", weights=left.squeeze(-2))

    def _having(self, needed: str, **changes: Any) -> IndexScores:
        """Return the scores with changes, if the indexer has got to the stage that is needed."""
        if self.stage != needed:
            raise UnknownScoresError(f"it takes its {self.stage} for {needed}")
        return replace(self, **changes)
