"""Gives a sharded model `generate_batch`, with the call of transformers' continuous batching."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

from dtensor_ring import RingError
from dtensor_ring.extension import axis_group, checked_barrier
from parallel_plans.huggingface.serving.continuous_batch import ContinuousBatch
from parallel_plans.huggingface.serving.pooled_forward import check_servable
from parallel_plans.huggingface.serving.serving_options import ServingOptions


def install_generate_batch(model: Any) -> None:
    """Make continuous batching of this model, not of its class, run over a sharded pool."""
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate():
        return
    for function in (init_continuous_batching, continuous_batching_context_manager, generate_batch):
        setattr(model, function.__name__, MethodType(function, model))


def init_continuous_batching(
    self: Any,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
) -> ContinuousBatch:
    """Return a batch that requests can join, see `ContinuousBatch`."""
    check_servable(self)
    options = ServingOptions.of(continuous_batching_config, self.device)
    return ContinuousBatch(self, self.context_parallel_sharding, generation_config, options)


@contextmanager
def continuous_batching_context_manager(
    self: Any, *args: Any, **kwargs: Any
) -> Iterator[ContinuousBatch]:
    """Return a context with a batch that requests can join."""
    yield self.init_continuous_batching(*args, **kwargs)


def generate_batch(
    self: Any,
    inputs: Sequence[Sequence[int]],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    record_timestamps: bool = False,
    progress_bar: bool = False,
    persistent_manager: bool = False,
    warmup: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Generate for all prompts; return transformers' `GenerationOutput` by id, in order.

    All ranks of the axis get the same prompts, and return the same.

    Args:
        self: the model.
        inputs: the prompts, tokens each.
        generation_config: how tokens are chosen; by default the model's.
        continuous_batching_config: of transformers: `page_size`, `num_blocks` of each rank,
            `max_batch_tokens`, `max_requests_per_batch`, `return_logprobs` and `seed`.
        record_timestamps: not supported.
        progress_bar: whether the first rank shows how many requests have ended.
        persistent_manager: not supported: `init_continuous_batching` returns what persists.
        warmup: ignored: there is nothing to warm up.
        options: options of `generate`, as `max_new_tokens`.

    Raises:
        ValueError: on every rank, if ranks differ, or an option is not supported. A prompt that
            cannot be served gives an output with an `error`.
        RingError: on every rank, if a rank raised, or ranks drifted apart.
    """
    if record_timestamps or persistent_manager:
        raise ValueError(
            "record_timestamps and persistent_manager are not supported over a sharded pool; "
            "leave them out, or take model.init_continuous_batching(...) for a batch that "
            "persists"
        )
    group = axis_group(self.context_parallel_sharding.axis.mesh)
    try:
        batch = self.init_continuous_batching(generation_config, continuous_batching_config)
        ids = batch.add_requests(inputs, **options)
        with _progress(batch, progress_bar and group.rank() == 0) as outputs:
            found = {output.request_id: output for output in outputs}
    except RingError:
        raise
    except BaseException:
        with checked_barrier(group, "generate_batch", {}):  # the others would wait for this rank
            raise
    with checked_barrier(group, "the end of generate_batch", {}):
        return {x: found[x] for first in ids for x in _samples_of(first, found)}


def _samples_of(first: str, found: dict[str, Any]) -> Iterator[str]:
    """Yield the id of a request and those of its other samples."""
    number, name = 0, first
    while name in found:
        yield name
        number, name = number + 1, f"{first}__child#{number}"


@contextmanager
def _progress(batch: ContinuousBatch, is_shown: bool) -> Iterator[Iterator[Any]]:
    """Return a context with the outputs, which counts them in a line."""
    from tqdm import tqdm

    with tqdm(batch, desc="generate_batch", unit="request", disable=not is_shown) as outputs:
        yield iter(outputs)
