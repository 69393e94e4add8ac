"""Replaces the forward of indexers: they describe their scores, and attention chooses the keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from types import MethodType
from typing import Any

from torch import Tensor, nn

from parallel_plans.huggingface.core.versions import names_in_forward, parameter_of_cache
from parallel_plans.huggingface.selecting.index_scores import (
    IndexScores,
    SeenLater,
    UnknownScoresError,
)
from parallel_plans.huggingface.selecting.latents import keep_latents
from parallel_plans.huggingface.selecting.selection import Selection

# The cache method to which indexers give their keys.
UPDATE = "update_indexer"
# The type, in a config, of layers whose attention gets what an indexer chooses.
INDEXED_KIND = "indexed_attention"
MASK = "attention_mask"


def indexers_of(model: nn.Module) -> list[Any]:
    """Return the modules whose forward gives keys of an index to a cache."""
    return [x for x in model.modules() if UPDATE in names_in_forward(x)]


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
    describe_scores(indexers)
    try:
        yield
    finally:
        for indexer in indexers:
            del indexer.forward


def describe_scores(indexers: list[Any]) -> None:
    """Make these indexers describe their scores from now on."""
    for indexer in indexers:
        indexer.forward = MethodType(_forward(indexer), indexer)


def select_keys_of(model: Any) -> None:
    """Make the indexed layers of a model attend to the keys that they choose over all ranks."""
    describe_scores(indexers_of(model))
    keep_latents(selecting_layers(model))


class KeyTaker:
    """Stands in for the cache in one call of an indexer, and takes its keys.

    Args:
        cache: the cache of the call, if there is one.
    """

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def update_indexer(self, keys: Tensor, layer_idx: int) -> IndexScores:
        """Store keys of new tokens, `(B, L, D)`, and return what stands for all keys."""
        if self._cache is not None:
            keys = self._cache.update_indexer(keys, layer_idx)
        return IndexScores(keys)


def _forward(indexer: nn.Module) -> Any:
    """Return a forward of the indexer that returns a `Selection`."""
    plain, cache = type(indexer).forward, parameter_of_cache(type(indexer).forward)
    known = signature(plain)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Selection:
        bound = known.bind(self, *args, **kwargs)
        given = bound.arguments
        if MASK in given:
            given[MASK] = SeenLater()
        if cache is not None:
            given[cache] = KeyTaker(given.get(cache))
        try:
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
        "times rectified products of queries and keys"
    )
