"""What differs between the versions of transformers that the plans work with.

Read from signatures, not from version numbers: a user's own model may follow an older version.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from inspect import signature
from typing import Any

NAMES_OF_CACHE = ("cache", "past_key_values", "cache_params")
"""Names of the cache in arguments and outputs: from transformers 5.24 on, and before."""


@lru_cache(maxsize=256)  # each token asks, and a signature takes 0.1 ms to read
def parameter_of_cache(forward: Callable[..., Any]) -> str | None:
    """The name of the parameter that takes the cache, `None` if there is none."""
    parameters = signature(forward).parameters
    return next((name for name in NAMES_OF_CACHE if name in parameters), None)


def cache_name(model: Any) -> str:
    """The name by which a model's forward takes and returns its cache."""
    from transformers.masking_utils import create_causal_mask

    # Some hand all keywords on, and so name none: then it is that of all of transformers.
    found = parameter_of_cache(type(model).forward) or parameter_of_cache(create_causal_mask)
    assert found is not None
    return found


def given_cache(given: dict[str, Any]) -> Any:
    """The cache among the arguments of a call, under any of its names; `None` without one.

    Raises:
        ValueError: if there are two.
    """
    found = {name: given[name] for name in NAMES_OF_CACHE if given.get(name) is not None}
    if len(found) > 1:
        raise ValueError(
            f"{' and '.join(found)} are names of one argument, the cache; give one of them"
        )
    return next(iter(found.values()), None)


def without_cache(given: dict[str, Any]) -> dict[str, Any]:
    """The other arguments of a call."""
    return {name: x for name, x in given.items() if name not in NAMES_OF_CACHE}


def with_cache(model: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, with the cache by the name that the model takes it by."""
    cache = given_cache(given)
    return without_cache(given) | ({} if cache is None else {cache_name(model): cache})
