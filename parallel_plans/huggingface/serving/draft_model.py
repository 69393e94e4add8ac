"""A smaller model that proposes tokens, over a pool of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring import BlockPool, OutOfBlocks, SequenceAxis
from dtensor_ring.extension import PooledSequence, axis_group, check_agreement
from parallel_plans.huggingface.serving.drafts import Drafter, DraftOptions
from parallel_plans.huggingface.serving.pooled_forward import (
    PooledForward,
    check_servable,
    check_whole_weights,
)
from parallel_plans.huggingface.serving.served_request import ServedRequest, processed
from parallel_plans.huggingface.serving.verify import Draft, probabilities
from parallel_plans.huggingface.sharding.agreement import facts
from parallel_plans.huggingface.sharding.sharding import shardings_of


class Drafters:
    """What proposes tokens for the requests of a batch: one for all requests with the same options.

    Args:
        model: the model of the batch.
        axis: its axis.
        plan_of: returns a plan for a stock model.
        max_tokens: the largest number of tokens of a step.
        max_requests: the largest number of requests at once.

    Attributes:
        axis_of_drafts: the ranks that an assistant with the plan of `axis` runs on; `None` for all.
            Other ranks never ask for a draft, and have anything there.
    """

    axis_of_drafts: SequenceAxis | None = None

    def __init__(
        self,
        model: Any,
        axis: SequenceAxis,
        plan_of: Callable[[Any], Any],
        max_tokens: int,
        max_requests: int,
    ) -> None:
        self._model, self._axis, self._plan_of = model, axis, plan_of
        self._sizes = max_tokens, max_requests
        self._made: list[tuple[DraftOptions, Drafter | None]] = []

    @property
    def share(self) -> int:
        """Return the largest number of tokens of a request in a step, whoever else is there."""
        return self._sizes[0] // self._sizes[1]

    def of(self, options: DraftOptions, pool: BlockPool) -> Drafter | None:
        """Return the drafter of requests with these options; `None` if nothing proposes tokens.

        Args:
            options: what is said about drafts.
            pool: the pool of the requests.

        Raises:
            TypeError: if the assistant is neither a model nor a function.
            ValueError: if the assistant cannot propose tokens for the model.
        """
        for known, drafter in self._made:
            if known == options:
                return drafter
        if isinstance(assistant := options.assistant, nn.Module):
            planned = checked_assistant(assistant, self._model, self._axis, self._plan_of)
            where = self._axis_of(planned)
            max_tokens, max_requests = self._sizes
            found: Drafter | None = ModelDrafter(
                planned, options, pool, max_tokens, max_requests, where
            )
        else:
            found = options.drafter(self._model.get_input_embeddings().weight.shape[0])
        self._made.append((options, found))
        return found

    def _axis_of(self, planned: Any) -> SequenceAxis | None:
        """Return the ranks that an assistant runs on, if they are not those of its plan.

        Raises:
            ValueError: on every rank, if ranks have different assistants, or its weights are
                sharded over all of them.
        """
        (sharding,) = shardings_of(planned)
        if self.axis_of_drafts is None or sharding.axis.mesh.size() == 1:
            return None
        check_whole_weights(planned)
        with torch.no_grad():
            sharding.agree(planned, {})  # on the weights
        return self.axis_of_drafts


class BegunDraft:
    """A request whose draft has begun: what a `ServedRequest` is to its processors.

    Attributes:
        request: the request.
        choice: how its tokens are chosen.
        sequence: its tokens in the draft's pool, up to what was proposed.
        limit: how many tokens may be proposed.
        tokens: what was proposed.
        rows: the probabilities that it was drawn from, `(1, V)` each.
    """

    def __init__(self, request: ServedRequest, sequence: PooledSequence, limit: int) -> None:
        # Processors may keep a state, and that of the request must not see what is only proposed.
        self.request, self.choice = request, request.choice.own()
        self.sequence, self.limit = sequence, limit
        self.tokens, self.rows = list[int](), list[Tensor]()

    @property
    def ids(self) -> Tensor:
        """Return all tokens, `(1, S)`."""
        ids = self.request.ids
        return torch.cat([ids, ids.new_tensor(self.tokens).unsqueeze(0)], 1)

    def draft(self) -> Draft:
        """Return the proposed tokens, with their scores if they have any."""
        return Draft(self.tokens, torch.cat(self.rows) if self.rows else None)


# The first step of a draft computes up to this many missing tokens.
MOST_MISSING = 32


class ModelDrafter(Drafter):
    """Proposes what a smaller model would go on with, for many requests at once.

    The model keeps the keys of the requests in a pool of its own, of as many blocks of as many
    tokens as theirs. It reads what they have got since it proposed last.

    Args:
        assistant: the model under a plan.
        options: how many tokens are proposed.
        pool: the pool of the requests, of all ranks.
        max_tokens: the largest number of tokens of a prompt that are computed at once.
        max_requests: the largest number of requests at once.
        axis: the ranks that it runs on, if they are not all of its plan.

    Raises:
        ValueError: if the model cannot run over pooled sequences.
    """

    def __init__(
        self,
        assistant: Any,
        options: DraftOptions,
        pool: BlockPool,
        max_tokens: int,
        max_requests: int,
        axis: SequenceAxis | None = None,
    ) -> None:
        found = options.of_config(assistant.generation_config)
        self.num_tokens, self.is_adaptive, self._confidence = found
        (sharding,) = shardings_of(assistant)
        size, block = (axis or sharding.axis).mesh.size(), pool.dealing.block
        # Two requests may begin to share a block only once both have written it.
        num_blocks = -(-pool.num_blocks * pool.dealing.world_size // size) + max_requests
        self._pool = BlockPool(num_blocks, block, size)
        self._forward = PooledForward(assistant, sharding, self._pool, axis)
        self._max_tokens = max_tokens
        self._sequences: dict[int, PooledSequence] = {}
        self._agreed: dict[int, int] = {}  # how many tokens were the request's, by number

    def propose(self, requests: Sequence[ServedRequest], limits: Sequence[int]) -> list[Draft]:
        self._forget({x.number for x in requests})
        wanted = zip(requests, limits, strict=True)
        begun = [x for request, limit in wanted if limit for x in self._begin(request, limit)]
        running = begun
        while running:
            self._next(running)
            running = [x for x in running if len(x.tokens) < x.limit]
            for x in running:
                # A block that others share is copied before the draft writes to it.
                self._forward.copy(self._pool.append(x.sequence, x.tokens[-1:]))
        found = {x.request.number: x.draft() for x in begun}
        return [found.get(x.number, Draft()) for x in requests]

    def _forget(self, numbers: set[int]) -> None:
        """Give back the blocks of requests that ended, were cancelled or gave way."""
        for number in [x for x in self._sequences if x not in numbers]:
            self._pool.free(self._sequences.pop(number))

    def _begin(self, request: ServedRequest, limit: int) -> Iterator[BegunDraft]:
        """Enter the tokens that a request got, of which the last few are not computed yet."""
        tokens, number = request.tokens, request.number
        try:
            if number not in self._sequences:
                self._sequences[number] = self._pool.add(tokens[:-1])
                self._agreed[number] = len(tokens) - 1
            sequence = self._sequences[number]
            end, same = (
                min(len(sequence), len(tokens) - 1),
                min(self._agreed[number], len(sequence)),
            )
            # Of the tokens that were proposed, only those that the request took stay.
            while same < end and sequence.tokens[same] == tokens[same]:
                same += 1
            self._pool.crop(sequence, same)
            self._forward.copy(self._pool.append(sequence, tokens[same:]))
        except OutOfBlocks:  # it goes on without a draft
            return
        self._agreed[number] = len(tokens)
        while (missing := len(sequence) - sequence.num_written) > MOST_MISSING:
            # But for the last one, whose logits the first step of the draft needs.
            num_tokens = min(missing - 1, self._max_tokens)
            # As a prompt, over the ranks: a decode step with many tokens would have all of them on
            # each rank.
            self._forward.run([(sequence, num_tokens)], [])
            self._pool.commit(sequence, sequence.num_written + num_tokens)
        yield BegunDraft(request, sequence, limit)

    def _next(self, running: Sequence[BegunDraft]) -> None:
        """Propose one more token for each; one that the model doubts is the last of its draft."""
        ends = [len(x.sequence) - x.sequence.num_written for x in running]
        logits = self._forward.run([], [x.sequence for x in running])
        for x in running:
            self._pool.commit(x.sequence)
        last = torch.tensor(ends, device=logits.device).cumsum(0) - 1
        scores = processed(running, logits[last].to(torch.float32, copy=True))
        weights, _ = probabilities(scores)
        chosen = weights.argmax(-1)
        for row, x in enumerate(running):
            if x.request.generator is not None:
                each = weights[row : row + 1]
                x.rows.append(each)
                chosen[row] = torch.multinomial(each, 1, generator=x.request.generator).squeeze()
        # The host waits for the device once a step, for tokens and confidences of all requests.
        sure = weights.gather(1, chosen.unsqueeze(1)).squeeze(1).tolist()
        for x, token, confidence in zip(running, chosen.tolist(), sure, strict=True):
            x.tokens.append(token)
            if confidence < self._confidence:
                x.limit = len(x.tokens)


SAME_DRAFTS = "have the same assistant_model (loaded, or seeded before it is made)"


def checked_assistant(
    assistant: Any, model: Any, axis: SequenceAxis, plan_of: Callable[[Any], Any]
) -> Any:
    """Return a model that can propose tokens for another: under a plan, over its ranks or alone.

    Args:
        assistant: a model under a plan, or a stock model, the same on all ranks. A stock model
            stays as it is: a copy that shares its weights gets a plan.
        model: the model that tokens are proposed for.
        axis: the axis of that model.
        plan_of: returns the plan of a model.

    Raises:
        ValueError: on every rank, if ranks have different models, or it cannot propose tokens.
    """
    group, shardings = axis_group(axis.mesh), shardings_of(assistant)
    sizes = [x.get_input_embeddings().weight.shape[0] for x in (assistant, model)]
    entries = [x.config.get_text_config(decoder=True).vocab_size for x in (assistant, model)]
    if sizes[0] < entries[1] or entries[0] != entries[1]:
        raise ValueError(
            f"assistant_model has {entries[0]} tokens in its vocabulary, and the model has "
            f"{entries[1]}: what one proposes, the other must know; take an assistant with the "
            "same tokenizer"
        )
    if assistant.config.is_encoder_decoder or not assistant.can_generate():
        raise ValueError(
            f"assistant_model must be a causal language model, got {type(assistant).__name__}"
        )
    if shardings:
        ranks = dist.get_process_group_ranks(axis_group(shardings[0].axis.mesh))
        if len(ranks) > 1 and ranks != dist.get_process_group_ranks(group):
            raise ValueError(
                f"assistant_model is sharded over the ranks {ranks}, and the model over "
                f"{dist.get_process_group_ranks(group)}; give both plans the same mesh, or leave "
                "the assistant without one"
            )
        _check_assistant(assistant)
        return assistant
    check_agreement(group, facts(assistant, group), SAME_DRAFTS)
    planned = _alone(assistant, axis.mesh.device_type, plan_of)
    _check_assistant(planned)
    return planned


def _check_assistant(assistant: Any) -> None:
    """Refuse a model under a plan that cannot propose tokens.

    Raises:
        ValueError: naming what it has.
    """
    check_servable(assistant)
    (sharding,) = shardings_of(assistant)
    if sharding.passing is not None:
        raise ValueError(
            f"assistant_model is a {type(assistant).__name__}, whose layers have states: tokens "
            "that were wrong cannot be taken out of these; take an assistant with attention alone, "
            "or prompt_lookup_num_tokens"
        )


def _alone(assistant: Any, device_type: str, plan_of: Callable[[Any], Any]) -> Any:
    """Return a copy of a model that runs on this rank alone, and shares its weights."""
    shared = [*assistant.parameters(), *assistant.buffers()]
    # What is in the memo is not copied.
    made = deepcopy(assistant, {id(x): x for x in shared})
    group: Any = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    mesh = dist.DeviceMesh.from_group(group, device_type, mesh_dim_names=("assistant",))
    return parallelize_module(made, mesh, plan_of(made))
