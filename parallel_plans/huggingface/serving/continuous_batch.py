"""Many sequences that come and go, generated over a sharded pool, and `generate_batch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any
from zlib import crc32

import torch

from dtensor_ring import BlockPool, RingError
from dtensor_ring.extension import axis_group, check_agreement, checked_barrier, unit_of
from parallel_plans.huggingface.generation.generate import written
from parallel_plans.huggingface.serving.draft_model import Drafters
from parallel_plans.huggingface.serving.drafts import DraftOptions, propose_all
from parallel_plans.huggingface.serving.pooled_forward import PooledForward, check_servable
from parallel_plans.huggingface.serving.scheduler import Scheduler, ServingCounts
from parallel_plans.huggingface.serving.served_request import (
    ServedRequest,
    TokenChoice,
    extend_all,
    generation_output,
    prepare_choice,
    stop_strings_as_criterion,
)
from parallel_plans.huggingface.serving.serving_options import ServingOptions
from parallel_plans.huggingface.serving.state_slots import KnownStates
from parallel_plans.huggingface.sharding.sharding import Sharding

SAME_REQUESTS = (
    "get the same requests in the same order, with the same options and, to sample, one seed or "
    "random state (torch.manual_seed(s), one s on all ranks)"
)


class ContinuousBatch:
    """Generates for requests that come and go, over a pool of blocks that all of them share.

    All ranks of the axis make the same calls in the same order. They compare requests when these
    come, and the tokens of each step in the messages of its attention.

        batch = model.init_continuous_batching(generation_config, continuous_batching_config)
        batch.add_requests(prompts)
        for output in batch:  # a GenerationOutput of transformers, as soon as a request ends
            batch.add_request(more)  # others may join at any time, or `cancel_request`

    Args:
        model: a causal language model under a `context_parallel_plan`.
        sharding: how the plan shards it.
        generation_config: how tokens are chosen; by default as the model's config says.
        options: sizes of the pool and of steps.
        plan_of: returns a plan for a stock `assistant_model`.

    Raises:
        ValueError: if the model cannot be served.
    """

    def __init__(
        self,
        model: Any,
        sharding: Sharding,
        generation_config: Any,
        options: ServingOptions,
        plan_of: Callable[[Any], Any],
    ) -> None:
        self._model, self._sharding, self._config = model, sharding, generation_config
        self._options, self._seed = options, options.seed
        self._group = axis_group(sharding.axis.mesh)
        self._requests: dict[str, ServedRequest] = {}
        self._outputs: list[Any] = []
        self._num_added = self._num_samples = 0
        self._drafters = Drafters(
            model,
            sharding.axis,
            plan_of,
            max_tokens=options.max_batch_tokens,
            max_requests=options.max_requests_per_batch,
        )
        self._unit = unit_of(options.page_size) if sharding.cache_dtype else None
        self._parts: tuple[Scheduler, PooledForward] | None = None
        if options.num_blocks is not None:
            self._parts = self._made(options.num_blocks)

    @property
    def counts(self) -> ServingCounts:
        """Return the counts of all steps so far."""
        return ServingCounts() if self._parts is None else self._parts[0].counts

    @property
    def pool(self) -> BlockPool | None:
        """Return the pool; `None` before the first request, if its size follows from requests."""
        return None if self._parts is None else self._parts[0].pool

    @property
    def num_bytes(self) -> int:
        """Return the bytes of keys, values and states on this rank."""
        return 0 if self._parts is None else self._parts[1].num_bytes

    def has_requests(self) -> bool:
        """Return whether there is anything left to do or to return."""
        return bool(self._requests or self._outputs)

    def new_tokens(self, request_id: str, start: int = 0) -> list[int] | None:
        """Return the tokens so far, but for the first `start`; `None` for a request that ended."""
        request = self._requests.get(request_id)
        return None if request is None else request.tokens_from(start)

    def add_request(
        self, input_ids: Sequence[int], request_id: str | None = None, **options: Any
    ) -> str:
        """Add one request, and return its id; see `add_requests`."""
        ids = None if request_id is None else [request_id]
        return self.add_requests([input_ids], ids, **options)[0]

    def add_requests(
        self,
        inputs: Sequence[Sequence[int]],
        request_ids: Sequence[str] | None = None,
        *,
        seed: int | None = None,
        **options: Any,
    ) -> list[str]:
        """Add requests; they join as soon as blocks are free.

        A prompt that cannot be served gives an output with an `error`, and the others go on.

        Args:
            inputs: the prompts, tokens each.
            request_ids: the ids of their outputs; by default `"req_0"`, `"req_1"`, ... Further
                samples of a prompt, by `num_return_sequences`, have `"__child#0"`, ... after its
                id.
            seed: the seed of the first sample's random state; each sample after it has the next
                one. By default seeds go on from those of the requests before.
            options: options of `generate`, as `max_new_tokens`, for these requests. With
                `prompt_lookup_num_tokens` or `assistant_model` a step verifies several tokens of a
                request. The assistant is a model, or a function that gets tokens of requests and
                how many to propose of each, and returns a list of tokens for each.

        Returns:
            The ids, one for each prompt.

        Raises:
            ValueError: on every rank, if ranks differ, an id is taken, or an option is not one of
                greedy decoding or sampling. Nothing was added then.
        """
        prompts = [_tokens_of(x) for x in inputs]
        if request_ids is None:
            request_ids = [f"req_{self._num_added + i}" for i in range(len(prompts))]
        described = {name: written(x) for name, x in options.items()} | {
            "requests": repr(list(request_ids)),
            "tokens": f"checksum {crc32(repr(prompts).encode()):08x}",
            "generation_config": written(self._config),
            "options of the batch": repr(self._options),
            "cache_dtype of the plan": str(self._sharding.cache_dtype),
            "seed": str(seed),
        }
        check_agreement(self._group, described, SAME_REQUESTS)
        if len({*request_ids} - {*self._requests}) < len(prompts):
            raise ValueError(f"ids of requests must be new and differ, got {list(request_ids)}")
        # All are prepared before any is added: `generate` may refuse an option.
        drafts, options, config = DraftOptions.take(
            options, self._config, self._model.generation_config
        )
        options = stop_strings_as_criterion(options, config, self._model.generation_config)
        # What `generate` prepares depends on a prompt's length alone, where nothing reads its
        # tokens.
        known: dict[int, TokenChoice] = {}
        prepared = [self._prepared(prompt, options, config, known) for prompt in prompts]
        # A pool is made for requests that can be served; others end with their reason.
        choices = [x for x in prepared if isinstance(x, TokenChoice)]
        if choices:
            parts = self._parts or self._made(self._num_blocks_for(choices))
            drafter = self._drafters.of(drafts, parts[0].pool)
            prepared = [x if isinstance(x, str) else replace(x, drafter=drafter) for x in prepared]
            self._parts = parts
        if seed is None:
            seed = self._next_seed(any(x.config.do_sample for x in choices))
        for request_id, prompt, choice in zip(request_ids, prompts, prepared, strict=True):
            seed = self._add(request_id, prompt, choice, seed)
        self._num_added += len(prompts)
        return list(request_ids)

    def cancel_request(self, request_id: str) -> None:
        """Take a request away, whose output then has an error; the others go on.

        Raises:
            ValueError: on every rank, if ranks differ, or the id is unknown or of a request that
                ended.
        """
        # All ranks must cancel the same request before the same step.
        check_agreement(self._group, {"request to cancel": repr(request_id)}, SAME_REQUESTS)
        if request_id not in self._requests:
            raise ValueError(
                f"no request {request_id!r} to cancel: it is unknown, or ended before; there are "
                f"{list(self._requests)}"
            )
        request = self._requests.pop(request_id)
        self._scheduler.cancel(request)
        self._outputs.append(request.output("the request was cancelled"))

    def step(self) -> list[Any]:
        """Compute the next tokens of some requests, and return the outputs of those that ended.

        One run of the model computes the next token of each request whose prompt is done, and as
        many tokens of prompts as the step allows, through the ring.

        Raises:
            RingError: on every rank, if a rank raised, or ranks drifted apart. Requests then wait
                again, and no block is lost.
        """
        if self._requests:
            try:
                scheduler, forward = self._made_parts
                self._compute(scheduler, forward)
            except BaseException:
                # Nobody knows which layers have written: all requests compute their keys again.
                self._scheduler.release()
                raise
        found, self._outputs = self._outputs, []
        return found

    def __iter__(self) -> Iterator[Any]:
        """Yield outputs as requests end, until there are none."""
        while self.has_requests():
            yield from self.step()

    def _compute(self, scheduler: Scheduler, forward: PooledForward) -> None:
        scheduler.counts.steps += 1
        scheduler.admit()
        propose_all(scheduler.decoding, self._drafters.share, self._unit)
        # Room for what decodes comes first: prompts only fill what is left of the step.
        copies, requests = scheduler.grow(), scheduler.decoding[:]
        chunks = scheduler.chunks()
        forward.copy(copies)
        parts = [(request.held, num) for request, num in chunks]
        logits = forward.run(parts, [request.held for request in requests])
        scheduler.prefilled(chunks)
        ends = extend_all(requests, logits)
        if forward.states is not None:
            # A draft may have gone further: states stay at the last token that was right.
            forward.states.keep([len(x.tokens) - 1 - x.held.num_written for x in requests])
        scheduler.decoded(requests)
        self._end_requests(requests, ends)

    def _end_requests(self, requests: Sequence[ServedRequest], ends: Sequence[bool]) -> None:
        """Give out those of some requests that end."""
        for request, has_ended in zip(requests, ends, strict=True):
            if has_ended:
                self._scheduler.remove(request)
                del self._requests[request.request_id]
                self._outputs.append(request.output())

    @property
    def _made_parts(self) -> tuple[Scheduler, PooledForward]:
        assert self._parts is not None, "a request makes them"
        return self._parts

    @property
    def _scheduler(self) -> Scheduler:
        return self._made_parts[0]

    def _made(self, num_blocks: int) -> tuple[Scheduler, PooledForward]:
        mesh, options = self._sharding.axis.mesh, self._options
        pool = self._pool(num_blocks, mesh.size())
        scheduler = Scheduler(pool, options.max_batch_tokens, options.max_requests_per_batch)
        return scheduler, PooledForward(self._model, self._sharding, pool)

    def _pool(self, num_blocks: int, size: int) -> BlockPool:
        """Return a pool in which prompts are prefilled over so many ranks."""
        if self._sharding.passing is None:
            return BlockPool(num_blocks, self._options.page_size, size)
        return KnownStates(
            num_blocks,
            self._options.page_size,
            size,
            max_known=2 * self._options.max_requests_per_batch,
        )

    def _next_seed(self, is_used: bool) -> int:
        """Return the seed after those of the requests before; draw the first if it is used.

        Raises:
            ValueError: on every rank, if ranks have different random states.
        """
        if self._seed is None and is_used:
            drawn = int(torch.randint(2**62, ()))
            check_agreement(self._group, {"random state": str(drawn)}, SAME_REQUESTS)
            self._seed = drawn
        return (self._seed or 0) + self._num_samples

    def _prepared(
        self,
        prompt: list[int],
        options: dict[str, Any],
        config: Any,
        known: dict[int, TokenChoice],
    ) -> TokenChoice | str:
        """Return how tokens are chosen after a prompt, or why it cannot be served.

        `known` has what prompts of the same length share: choices that read no tokens.
        """
        num_entries = self._model.get_input_embeddings().weight.shape[0]
        if not prompt:
            return "a prompt must have at least one token, got none"
        if not 0 <= min(prompt) <= max(prompt) < num_entries:
            wrong = next(x for x in prompt if not 0 <= x < num_entries)
            return f"tokens must be from 0 to {num_entries - 1}, got {wrong}"
        if len(prompt) in known:
            return known[len(prompt)]
        found = prepare_choice(self._model, prompt, config, options)
        found = replace(found, returns_logprobs=self._options.return_logprobs)
        if found.batch_key is not None and found.ends is not None:
            known[len(prompt)] = found
        return found

    def _num_blocks_for(self, choices: Sequence[TokenChoice]) -> int:
        """Return the blocks of a rank with which no request has to wait for another's."""
        each = [x.config.num_return_sequences * self._need(x) for x in choices]
        return max(1, sum(each))

    def _need(self, choice: TokenChoice, size: int | None = None) -> int:
        """Return the blocks that a request has at its end, on the rank of `size` with the most."""
        size = size or self._sharding.axis.mesh.size()
        # The last token is not kept. Block 0 is on the first rank, so it has as many as any other.
        return -(-(choice.config.max_length - 1) // (self._options.page_size * size))

    def _add(self, request_id: str, prompt: list[int], choice: TokenChoice | str, seed: int) -> int:
        """Let a request and its other samples wait; return the seed that comes after theirs."""
        error = choice if isinstance(choice, str) else self._too_long(choice)
        if error is not None or isinstance(choice, str):
            self._outputs.append(generation_output(request_id, prompt, [], [], error))
            return seed + 1
        names = [request_id]
        names += [f"{request_id}__child#{i}" for i in range(choice.config.num_return_sequences - 1)]
        made = [
            ServedRequest(name, self._num_samples + i, prompt, choice, self._model.device, seed + i)
            for i, name in enumerate(names)
        ]
        # They begin when the prompt is done, and share all of its blocks.
        made[0].siblings = made[1:]
        self._requests |= {request.request_id: request for request in made}
        self._num_samples += len(made)
        self._scheduler.add(made[0])
        return seed + len(made)

    def _too_long(self, choice: TokenChoice) -> str | None:
        """Return why a request can never have all its blocks, or `None`."""
        return self._error_of_length(choice, self._scheduler.pool, self._need(choice))

    def _error_of_length(self, choice: TokenChoice, pool: BlockPool, need: int) -> str | None:
        if need <= pool.num_blocks:
            return None
        return (
            f"prompt and new tokens are up to {choice.config.max_length}, which need {need} "
            f"blocks of {pool.dealing.block} tokens on a rank, and the pool has {pool.num_blocks}; "
            "ask for fewer tokens, or give continuous_batching_config a larger num_blocks"
        )


def _tokens_of(given: Any) -> list[int]:
    """Return a prompt as a list.

    Raises:
        TypeError: if it is not a row of integers.
    """
    tokens = given.tolist() if hasattr(given, "tolist") else list(given)
    if not all(type(x) is int for x in tokens):
        raise TypeError(f"a prompt must be a row of token ids, integers, got {given!r}")
    return tokens


def install_generate_batch(model: Any, plan_of: Callable[[Any], Any]) -> None:
    """Make continuous batching of this model run over a pool; `plan_of` is for its assistants."""
    can_generate = getattr(model, "can_generate", None)
    if can_generate is None or not can_generate():
        return
    begin: Any = partial(init_continuous_batching, plan_of=plan_of)
    model.init_continuous_batching = MethodType(begin, model)
    for function in (continuous_batching_context_manager, generate_batch):
        setattr(model, function.__name__, MethodType(function, model))


def init_continuous_batching(
    self: Any,
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    workload_hints: Any = None,
    *,
    plan_of: Callable[[Any], Any],
) -> ContinuousBatch:
    """Return a batch that requests can join, see `ContinuousBatch`."""
    check_servable(self)
    options = ServingOptions.of(continuous_batching_config, self.device)
    sharding = self.context_parallel_sharding
    return ContinuousBatch(self, sharding, generation_config, options, plan_of)


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
    prefill: Any = None,
    decode: Any = None,
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
        prefill: with `decode`, the 1-D mesh of the ranks that prefill prompts; the plan's axis has
            all ranks of both, and all of them call this. See docs/inference.md, "Two groups".
        decode: the 1-D mesh of the ranks that decode.
        options: options of `generate`, as `max_new_tokens`, and as `prompt_lookup_num_tokens` or
            `assistant_model`, see `ContinuousBatch.add_requests`.

    Raises:
        ValueError: on every rank, if ranks differ, or an option is not supported. A prompt that
            cannot be served gives an output with an `error`.
        RingError: on every rank, if a rank raised, or ranks drifted apart; with two groups a
            `RequestsHandedBack`, which has the requests that have not started.
    """
    if record_timestamps or persistent_manager:
        raise ValueError(
            "record_timestamps and persistent_manager are not supported over a sharded pool; "
            "leave them out, or take model.init_continuous_batching(...) for a batch that "
            "persists"
        )
    group = axis_group(self.context_parallel_sharding.axis.mesh)
    try:
        groups = {"prefill": prefill, "decode": decode}
        groups = {name: mesh for name, mesh in groups.items() if mesh is not None}
        batch = self.init_continuous_batching(
            generation_config, continuous_batching_config, **groups
        )
        ids = batch.add_requests(inputs, **options)
        with _progress(batch, progress_bar and group.rank() == 0) as outputs:
            by_id = {output.request_id: output for output in outputs}
    except RingError:
        raise
    except BaseException:
        with checked_barrier(group, "generate_batch", {}):  # the others would wait for this rank
            raise
    with checked_barrier(group, "the end of generate_batch", {}):
        return {x: by_id[x] for first in ids for x in _samples_of(first, by_id)}


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
