"""Replaces `generate` of a sharded model: all ranks must do the same at every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from hashlib import blake2b
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from dtensor_ring import RingError
from dtensor_ring.extension import axis_group, check_agreement, checked_barrier
from parallel_plans.huggingface.core.versions import cache_argument, with_cache
from parallel_plans.huggingface.generation.cached_forward import cache_of
from parallel_plans.huggingface.sharding.batch import described
from parallel_plans.huggingface.sharding.sharding import Sharding, whole_outputs

SAME_CALL = (
    "generate from the same prompt with the same options and, with do_sample, from the same "
    "random state (torch.manual_seed(s), one s on all ranks, before generate)"
)
# Arguments that may differ from rank to rank.
OWN_OF_RANKS = ("streamer", "self")
CACHES = (None, "dynamic")


def install_generate(model: Any, sharding: Sharding) -> None:
    """Make `generate` of this model, not of its class, compare the ranks and gather outputs."""
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate():
        return
    plain = type(model).generate

    @wraps(plain)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = axis_group(sharding.axis.mesh)
        try:
            kwargs = with_cache(self, kwargs)
            _check(self, sharding, _asked(plain, self, args, kwargs))
            with whole_outputs(self), _generating(sharding):
                result = type(self).generate(self, *args, **kwargs)
        except RingError:
            raise
        except BaseException:
            with checked_barrier(group, "generate", {}):  # the others would wait for this rank
                raise
        with checked_barrier(group, "the end of generate", _tokens_of(result)):
            return result

    model.generate = MethodType(generate, model)


@contextmanager
def _generating(sharding: Sharding) -> Iterator[None]:
    """Mark that `generate` calls the forward, which may then replace caches made there."""
    before, sharding.generates = sharding.generates, True
    try:
        yield
    finally:
        sharding.generates = before


def _option(model: Any, asked: dict[str, Any], name: str) -> Any:
    """Return an option of the call, of its config, or of the model's config, in this order."""
    value = asked.get(name)
    for config in (asked.get("generation_config"), model.generation_config):
        value = getattr(config, name, None) if value is None else value
    return value


def _asked(
    plain: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    asked = dict(signature(plain).bind(model, *args, **kwargs).arguments)
    return asked | asked.pop("kwargs", {})


def _check(model: Any, sharding: Sharding, asked: dict[str, Any]) -> None:
    """Refuse calls that differ between ranks, or would be wrong over a sharded sequence.

    Raises:
        ValueError: on every rank, naming the argument.
    """
    # Compare first: late ranks would take an error of earlier ranks for a failure.
    described = _described(model, asked) | {"cache_dtype of the plan": str(sharding.cache_dtype)}
    check_agreement(axis_group(sharding.axis.mesh), described, SAME_CALL)
    if cache_argument(asked) is not None:
        cache_of(model, sharding, asked)
    limits = [x for x in asked.get("stopping_criteria") or () if "MaxTime" in type(x).__name__]
    if limits or _option(model, asked, "max_time") is not None:
        raise ValueError(
            "max_time would stop ranks at different tokens over a sharded sequence; use "
            "max_new_tokens"
        )
    implementation = _option(model, asked, "cache_implementation")
    if implementation not in CACHES:
        raise ValueError(
            f"cache_implementation={implementation!r} is not supported over a sharded sequence, "
            'whose cache is dynamic; leave it out, or say "dynamic" if it comes from the '
            "generation_config"
        )


def _described(model: Any, asked: dict[str, Any]) -> dict[str, str]:
    """Describe what must be the same on all ranks."""
    listed = {name: x for name, x in asked.items() if x is not None and name not in OWN_OF_RANKS}
    found = described(listed)
    found |= {name: written(x) for name, x in listed.items() if not isinstance(x, Tensor)}
    found["generation_config of the model"] = written(model.generation_config)
    if _option(model, asked, "do_sample"):
        found["random state"] = _digest(model.device)
    return found


def _tokens_of(result: Any) -> dict[str, str]:
    """Describe the generated tokens, which must be the same on all ranks."""
    tokens = getattr(result, "sequences", result)
    return described({"tokens": tokens}) if isinstance(tokens, Tensor) else {}


def written(x: Any) -> str:
    """Describe options by value, and other objects by type."""
    if hasattr(x, "to_dict"):
        return str(sorted(x.to_dict().items(), key=str))
    if isinstance(x, (list, tuple)):
        return str([written(part) for part in x])
    return repr(x) if isinstance(x, (bool, int, float, str, dict)) else type(x).__name__


def _digest(device: torch.device) -> str:
    states = b"".join(bytes(state.cpu().numpy()) for state in _random_states(device))
    return blake2b(states, digest_size=6).hexdigest()


def _random_states(device: torch.device) -> Iterator[Tensor]:
    yield torch.get_rng_state()
    if device.type != "cpu":
        yield torch.get_device_module(device).get_rng_state(device)
