"""Hides the differences between the supported versions of transformers.

They are read from signatures, not version numbers: a user's model may follow an older version.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from inspect import signature, unwrap
from typing import Any

# Names of the cache in arguments and outputs: first since transformers 5.24, then before it.
NAMES_OF_CACHE = ("cache", "past_key_values", "cache_params")


@lru_cache(maxsize=256)  # called for each token, and a signature takes 0.1 ms to read
def parameter_of_cache(forward: Callable[..., Any]) -> str | None:
    """Return the name of the parameter that takes the cache, `None` if there is none."""
    parameters = signature(forward).parameters
    return next((name for name in NAMES_OF_CACHE if name in parameters), None)


def cache_name(model: Any) -> str:
    """Return the name by which a model's forward takes and returns its cache."""
    from transformers.masking_utils import create_causal_mask

    # Some forwards pass all keywords on and name no cache; then transformers' own name counts.
    found = parameter_of_cache(type(model).forward) or parameter_of_cache(create_causal_mask)
    assert found is not None
    return found


def cache_argument(arguments: dict[str, Any]) -> Any:
    """Return the cache among the arguments of a call, under any name; `None` without one.

    Raises:
        ValueError: if it is given under two names.
    """
    caches = {name: arguments[name] for name in NAMES_OF_CACHE if arguments.get(name) is not None}
    if len(caches) > 1:
        raise ValueError(
            f"{' and '.join(caches)} are names of one argument, the cache; give one of them"
        )
    return next(iter(caches.values()), None)


def uses_cache(arguments: dict[str, Any]) -> bool:
    """Return whether a call has a cache, or asks for a new one, which labels rule out."""
    asks_for_one = bool(arguments.get("use_cache")) and arguments.get("labels") is None
    return asks_for_one or cache_argument(arguments) is not None


def without_cache(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call without the cache."""
    return {name: x for name, x in arguments.items() if name not in NAMES_OF_CACHE}


def with_cache(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call, with the cache under the name that the model takes."""
    cache = cache_argument(arguments)
    return without_cache(arguments) | ({} if cache is None else {cache_name(model): cache})


def names_in_forward(module: Any) -> tuple[str, ...]:
    """Return the names of globals and attributes that the forward of a module's class reads."""
    code = getattr(unwrap(type(module).forward), "__code__", None)
    return () if code is None else code.co_names


def reads_positions(module: Any) -> bool:
    """Return whether the forward of a module's class reads `position_ids` of its keywords."""
    code = getattr(unwrap(type(module).forward), "__code__", None)
    return code is not None and "position_ids" in code.co_consts


def kept_whole() -> tuple[type, ...]:
    """Return the classes of stock cache layers that keep all tokens of a layer."""
    from transformers import cache_utils

    # Layers with an index have a class of their own, in versions that have such models.
    indexed = getattr(cache_utils, "DynamicIndexedLayer", cache_utils.DynamicLayer)
    return cache_utils.DynamicLayer, indexed
