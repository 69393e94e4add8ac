"""Workloads of a continuous batch, and each of their requests alone on the stock model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from transformers import ContinuousBatchingConfig

from parallel_plans.huggingface.serving.continuous_batch import ContinuousBatch
from tests.families import VOCABULARY
from tests.huggingface.generation.generating import exact_softmax
from tests.huggingface.serving.choices import CHOICES
from tests.paged.test_block_pool_walks import check_counts

LONGEST = 300
"""Tokens of a prompt and of what follows."""
GREEDY = {"eos_token_id": None, "pad_token_id": 0}


@dataclass(frozen=True)
class Arrival:
    """A request, the step before which it comes, and that before which it is cancelled.

    `kind` is the name of its options in `CHOICES`; several samples are always sampled.
    """

    step: int
    prompt: tuple[int, ...]
    num_new: int
    num_samples: int = 1
    cancelled: int | None = None
    kind: str = "greedy"

    @property
    def how(self) -> dict[str, Any]:
        """Its options, but for its length and the number of samples."""
        return GREEDY | CHOICES[self.kind] | ({"do_sample": True} if self.num_samples > 1 else {})

    def names(self, number: int) -> list[str]:
        """The ids of its outputs."""
        return [str(number), *(f"{number}__child#{i}" for i in range(self.num_samples - 1))]


@dataclass(frozen=True)
class Workload:
    """Requests and sizes of the pool; `spare` blocks more than the longest of them needs."""

    arrivals: tuple[Arrival, ...]
    block: int = 4
    spare: int = 2
    max_tokens: int = 16
    max_requests: int = 8

    def batch(self, model: Any, **options: Any) -> ContinuousBatch:
        """One whose pool is just large enough."""
        return self.batch_of(model, model.context_parallel_sharding.axis.mesh.size(), **options)

    def batch_of(
        self, model: Any, size: int, groups: dict[str, Any] | None = None, **options: Any
    ) -> ContinuousBatch:
        """One whose pool is just large enough on so many ranks."""
        longest = max(len(x.prompt) + x.num_new for x in self.arrivals) - 1
        config = ContinuousBatchingConfig(
            page_size=self.block,
            num_blocks=-(-longest // (self.block * size)) + self.spare,
            max_batch_tokens=self.max_tokens,
            max_requests_per_batch=self.max_requests,
            seed=7,
            **options,
        )
        return model.init_continuous_batching(None, config, **groups or {})


@contextmanager
def in_groups(prefill: tuple[int, ...], decode: tuple[int, ...]) -> Iterator[None]:
    """Batches of workloads have these groups; all ranks must call it."""
    meshes = [DeviceMesh("cpu", [*ranks]) for ranks in (prefill, decode)]
    size = min(len(prefill), len(decode))

    def batch(self: Workload, model: Any, **options: Any) -> Any:
        groups = {"prefill": meshes[0], "decode": meshes[1]}
        return self.batch_of(model, size, groups, **options)

    with mock.patch.object(Workload, "batch", batch):
        yield


def served(model: Any, workload: Workload, **options: Any) -> tuple[ContinuousBatch, dict]:
    """The batch at its end, and the outputs by id; the pool is checked after each step."""
    batch, outputs, step = workload.batch(model), {}, 0
    while batch.has_requests() or any(x.step >= step for x in workload.arrivals):
        for number, arrival in enumerate(workload.arrivals):
            if arrival.step == step:
                how = arrival.how | {"max_new_tokens": arrival.num_new, **options}
                how |= {"num_return_sequences": arrival.num_samples}
                batch.add_request(arrival.prompt, str(number), seed=100 * number, **how)
            if arrival.cancelled == step and str(number) in batch._requests:
                batch.cancel_request(str(number))
        outputs |= {x.request_id: x for x in batch.step()}
        check_pool(batch)
        step += 1
        assert step < 5000, "it does not end"
    usage = batch.pool.usage()
    assert not usage.num_sequences
    assert not any(usage.held)
    return batch, outputs


def check_pool(batch: ContinuousBatch) -> None:
    """Each block is held by the sequences of requests that run, and by no others."""
    scheduler = batch._scheduler
    running = scheduler.prefilling + scheduler.decoding
    assert len(running) == batch.pool.usage().num_sequences
    assert all(x.sequence is None for x in scheduler.waiting)
    check_counts(batch.pool, [x.held for x in running])


def check_workload(model: Any, alone: Any, workload: Workload, **options: Any) -> ContinuousBatch:
    """All requests have the tokens that the stock model gives to each of them alone."""
    batch, outputs = served(model, workload, **options)
    for number, arrival in enumerate(workload.arrivals):
        for sample, name in enumerate(arrival.names(number)):
            output = outputs[name]
            assert output.prompt_ids == list(arrival.prompt)
            expected = alone(arrival, 100 * number + sample)
            if output.error is not None:
                assert arrival.cancelled is not None
                assert "cancelled" in output.error
                expected = expected[: len(output.generated_tokens)]
            assert output.generated_tokens == expected, f"{name} of {workload}"
    return batch


def alone_on(model: Any) -> Any:
    """What the stock model gives to a prompt, with the random state of a seed."""

    @cache
    def generate(prompt: tuple[int, ...], num_new: int, kind: str, seed: int | None) -> list[int]:
        with exact_softmax(), torch.random.fork_rng():
            torch.manual_seed(seed or 0)
            how = {"do_sample": seed is not None, **GREEDY, **CHOICES[kind]}
            found = model.generate(torch.tensor([prompt]), max_new_tokens=num_new, **how)
        return found[0, len(prompt) :].tolist()

    def alone(arrival: Arrival, seed: int) -> list[int]:
        is_drawn = arrival.how.get("do_sample")
        given = arrival.prompt, arrival.num_new, arrival.kind
        return generate(*given, seed if is_drawn else None)

    return alone


def prompt_of(kind: int, num_tokens: int) -> tuple[int, ...]:
    """The first tokens of one of a few endless texts."""
    generator = torch.Generator().manual_seed(kind)
    return tuple(
        torch.randint(2, VOCABULARY, (LONGEST,), generator=generator)[:num_tokens].tolist()
    )


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    """Prompts begin like one of two texts, and go on like another."""
    num_new = draw(st.integers(1, 8))
    # Most are short, since a long prompt takes many steps.
    longest = draw(st.sampled_from([12, 12, 40, LONGEST - 8]))
    shared, own = draw(st.integers(0, longest)), draw(st.integers(0, 4))
    prompt = prompt_of(draw(st.integers(0, 1)), shared) + prompt_of(
        2 + draw(st.integers(0, 2)), own
    )
    step = draw(st.integers(0, 6))
    cancelled = draw(st.none() | st.none() | st.integers(step + 1, step + 8))
    return Arrival(step, prompt or (5,), num_new, draw(st.sampled_from([1, 1, 1, 3])), cancelled)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    return Workload(
        tuple(draw(st.lists(arrivals(), min_size=2, max_size=6))),
        block=draw(st.sampled_from([1, 4, 8])),
        spare=draw(st.sampled_from([0, 1, 4, 40])),
        max_tokens=draw(st.sampled_from([4, 16, 64, 400])),
        max_requests=draw(st.sampled_from([1, 2, 4])),
    )
