"""One sequence to generate, its tokens and when it ends, and the next tokens of all sequences."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Hashable, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from math import inf
from typing import Any, Protocol

import torch
from torch import Tensor

from dtensor_ring.extension import PooledSequence
from parallel_plans.huggingface.serving.verify import Draft, drawn, probabilities

NO_TOKEN = -1  # where none can be drawn
UNDRAWABLE = (
    "no token can be drawn, as scores are inf or NaN after the processors; ask for a temperature "
    "or penalties nearer to 1, or look for NaN in the model's logits"
)
# Processors of transformers that read the scores of a row, and not the tokens before it.
BY_ROW = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper")


@dataclass(frozen=True)
class TokenChoice:
    """How the tokens of a request are chosen, as `generate` of transformers prepared it.

    Attributes:
        processors: turns logits `(1, V)` into scores, given the tokens before, `(1, S)`.
        criteria: says whether a sequence `(1, S)` ends.
        config: the generation config with all defaults.
        returns_logprobs: whether to keep the log-probability of each token.
        drafter: what proposes tokens, a `Drafter`; `None` if nothing does.
    """

    processors: Any
    criteria: Any
    config: Any
    returns_logprobs: bool = False
    drafter: Any = None

    @cached_property
    def batch_key(self) -> Hashable:
        """Return what choices have in common whose scores are computed together.

        `None` if a processor reads the tokens before, or may do so.
        """
        from transformers.generation import logits_process

        alone = tuple(getattr(logits_process, name) for name in BY_ROW)
        if any(type(x) not in alone for x in self.processors):
            return None
        return tuple((type(x), repr(sorted(vars(x).items()))) for x in self.processors)

    @cached_property
    def ends(self) -> tuple[float, frozenset[int]] | None:
        """Return the largest length and the tokens that end a sequence, if nothing else does."""
        from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

        # Subclasses may end a sequence in other ways, so only these types are read.
        lengths = [x.max_length for x in self.criteria if type(x) is MaxLengthCriteria]
        tokens = [x.eos_token_id.tolist() for x in self.criteria if type(x) is EosTokenCriteria]
        if len(lengths) + len(tokens) < len(self.criteria):
            return None
        return min(lengths, default=inf), frozenset(chain.from_iterable(tokens))

    def own(self) -> TokenChoice:
        """Return the same for one sequence: processors that read tokens may keep a state of them.

        Raises:
            ValueError: if a processor of the user's cannot be copied.
        """
        from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

        if self.batch_key is not None:
            return self
        found = copy(self.processors)
        for number, processor in enumerate(found):
            if type(processor) is not PrefixConstrainedLogitsProcessor:  # it holds a function only
                found[number] = _copied(processor)
        return replace(self, processors=found)


def _copied(processor: Any) -> Any:
    try:
        return deepcopy(processor)
    except TypeError as error:
        raise ValueError(
            f"each request needs its own {type(processor).__name__}, which cannot be copied "
            f"({error}); give it a __deepcopy__, or call generate for each prompt"
        ) from error


# Options of `generate` that choose tokens, beside those of a GenerationConfig.
CRITERIA, STOPS = "stopping_criteria", "stop_strings"
FUNCTIONS = ("logits_processor", CRITERIA, "prefix_allowed_tokens_fn", "tokenizer")


def stop_strings_as_criterion(
    options: dict[str, Any], config: Any, of_model: Any
) -> dict[str, Any]:
    """Return options of `generate` whose stop strings are a criterion, made once for all prompts.

    `generate` drops the tokenizer where it is given a function in place of a way to decode.

    Args:
        options: options of the call, with a `tokenizer` if there are stop strings.
        config: a GenerationConfig, or `None`.
        of_model: the GenerationConfig of the model.

    Raises:
        ValueError: if there are stop strings, and no tokenizer.
    """
    from transformers import StopStringCriteria

    asked = dict(options)
    tokenizer, given = asked.pop("tokenizer", None), getattr(config, STOPS, None)
    stops = asked.get(STOPS, getattr(of_model, STOPS, None) if given is None else given)
    if not stops:
        return asked
    if tokenizer is None:
        raise ValueError(f"{STOPS}={stops!r} need the model's tokenizer; give tokenizer=...")
    criterion = StopStringCriteria(tokenizer, stops)
    # `None` as an option counts more than what configs say.
    return asked | {STOPS: None, CRITERIA: [*(asked.get(CRITERIA) or ()), criterion]}


# Options of a GenerationConfig that are for one call of `generate`, and the values that ask for
# nothing.
ALLOWED = (
    ("max_time", (None,)),
    ("guidance_scale", (None, 1)),
    ("cache_implementation", (None, "dynamic")),
    ("token_healing", (None, False)),
    ("assistant_early_exit", (None,)),
    ("assistant_ensemble_weight", (None,)),
    ("speculation_type", (None,)),
    ("use_mtp", (None, False)),
)


def prepare_choice(
    model: Any, prompt: list[int], generation_config: Any, options: dict[str, Any]
) -> TokenChoice:
    """Let `generate` of the model prepare how tokens are chosen after a prompt.

    Raises:
        ValueError: if `generate` refuses an option, it asks for anything but greedy decoding or
            sampling, or a processor cannot be copied.
    """

    def keep(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **_: Any,
    ) -> TokenChoice:
        return TokenChoice(logits_processor, stopping_criteria, generation_config)

    _check_options(options)
    ids = torch.tensor([prompt], device=model.device)
    # A function in place of a way to decode gets all that was prepared for it.
    choice = type(model).generate(
        model, ids, generation_config=generation_config, custom_generate=keep, **options
    )
    mode = choice.config.get_generation_mode()
    if mode not in ("greedy_search", "sample"):
        raise ValueError(
            f"generate_batch decodes greedily or samples, and the options ask for {mode.value}; "
            "call generate for it"
        )
    for name, allowed in ALLOWED:
        if getattr(choice.config, name, None) not in allowed:
            raise ValueError(
                f"{name}={getattr(choice.config, name)!r} is not supported by generate_batch over "
                "a sharded pool; leave it out"
            )
    return choice.own()


def _check_options(options: dict[str, Any]) -> None:
    """Refuse options that are about a whole batch, not about how tokens are chosen.

    Raises:
        ValueError: naming the first one.
    """
    from transformers import GenerationConfig

    known = GenerationConfig().to_dict()
    for name, given in options.items():
        if name not in known and name not in FUNCTIONS:
            raise ValueError(
                f"{name} is not an option of generate_batch, which takes those of a "
                f"GenerationConfig, and {', '.join(FUNCTIONS)}; got {given!r}"
            )
    for criterion in options.get(CRITERIA) or ():
        # Each rank has another clock.
        if "MaxTime" in type(criterion).__name__:
            raise ValueError("time would stop ranks at different tokens; use max_new_tokens")


class ServedRequest:
    """A sequence that grows in each step in which it decodes, by a token or by a draft and one.

    Args:
        request_id: the id that its output has.
        number: how many requests came before it: its age.
        prompt: the tokens of the prompt, at least one.
        choice: how tokens are chosen.
        device: where they are chosen.
        seed: the seed of its random state.

    Attributes:
        sequence: the sequence in the pool that holds all tokens but the last; `None` while it
            waits.
        siblings: other samples of the prompt, which wait until it is prefilled.
        is_cancelled: whether nobody waits for it any more.
        logprobs: the log-probabilities of the new tokens, if they are asked for.
        generator: its random state, `None` for greedy decoding.
        draft: what is proposed for the next step in which it decodes; `None` until then.
        error: why it ended without all of its tokens. Its last token then stands for none.
        num_drafts: how many tokens are proposed at once.
    """

    def __init__(
        self,
        request_id: str,
        number: int,
        prompt: list[int],
        choice: TokenChoice,
        device: torch.device,
        seed: int,
    ) -> None:
        self.request_id, self.number, self.prompt = request_id, number, prompt
        self.choice, self.logprobs = choice.own(), list[float]()
        self.sequence: PooledSequence | None = None
        self.siblings: list[ServedRequest] = []
        self.is_cancelled = False
        self.draft: Draft | None = None
        self.error: str | None = None
        self.num_drafts: int = 0 if choice.drafter is None else choice.drafter.num_tokens
        self._tokens = array("q", prompt)
        self._ids = torch.empty(1, 0, dtype=torch.int64, device=device)
        self.generator: torch.Generator | None = None
        if choice.config.do_sample:
            self.generator = torch.Generator(device).manual_seed(seed)

    @property
    def held(self) -> PooledSequence:
        """Return the sequence of a request that has one."""
        assert self.sequence is not None, "it waits"
        return self.sequence

    @property
    def tokens(self) -> array[int]:
        """Return all tokens, which only `extend` may change."""
        return self._tokens

    @property
    def last_token(self) -> int:
        """Return the last token, whose keys are not in the pool yet."""
        return self._tokens[-1]

    @property
    def drafted(self) -> Sequence[int]:
        """Return the tokens that are proposed after the last one."""
        return () if self.draft is None else self.draft.tokens

    @property
    def new_tokens(self) -> list[int]:
        """Return the tokens after the prompt."""
        end = len(self._tokens) - (self.error is not None)
        return self._tokens[len(self.prompt) : end].tolist()

    def tokens_from(self, start: int) -> list[int]:
        """Return the tokens after the prompt, but for the first `start`."""
        return self._tokens[len(self.prompt) + start :].tolist()

    def written(self) -> array[int]:
        """Return the tokens whose keys the pool holds before the next token is chosen."""
        return self._tokens[:-1]

    def take_siblings(self) -> list[ServedRequest]:
        """Return the other samples of its prompt that were not cancelled, and forget them."""
        found, self.siblings = self.siblings, []
        return [x for x in found if not x.is_cancelled]

    @property
    def ids(self) -> Tensor:
        """Return all tokens `(1, S)` where they are chosen, for processors that read them."""
        # Most requests have no processor that reads tokens, and never pay for this copy.
        missing = self._tokens[self._ids.shape[1] :]
        if missing:
            self._ids = torch.cat([self._ids, self._ids.new_tensor(missing).unsqueeze(0)], 1)
        return self._ids

    def extend(self, token: int, scores: Tensor) -> bool:
        """Add the next token, and return whether the sequence ends.

        Args:
            token: the token; `NO_TOKEN` if none can be drawn, which ends it by an error.
            scores: the scores `(1, V)` that it was chosen by, for stopping criteria.
        """
        self._tokens.append(max(token, 0))
        if token == NO_TOKEN:
            self.error = UNDRAWABLE
            return True
        if self.choice.ends is None:
            return bool(self.choice.criteria(self.ids, scores).all())
        longest, tokens = self.choice.ends
        return len(self._tokens) >= longest or token in tokens

    def note(self, tokens: Sequence[int]) -> None:
        """Add the next tokens, which other ranks chose."""
        self._tokens.extend(tokens)

    def learn(self, num_accepted: int) -> None:
        """Forget the draft, of which so many tokens were right, and adapt the length of the next.

        The numbers are those of transformers' schedule "heuristic".
        """
        if self.drafted and self.choice.drafter.is_adaptive:
            is_right = num_accepted == len(self.drafted)
            self.num_drafts = self.num_drafts + 2 if is_right else max(1, self.num_drafts - 1)
        self.draft = None

    def output(self, error: str | None = None) -> Any:
        """Return the result, or why there is none, as transformers' `GenerationOutput`."""
        tokens = self.new_tokens
        return generation_output(
            self.request_id, self.prompt, tokens, self.logprobs[: len(tokens)], error or self.error
        )


def generation_output(
    request_id: str,
    prompt: list[int],
    new_tokens: list[int],
    logprobs: list[float],
    error: str | None = None,
) -> Any:
    """Return a `GenerationOutput` of transformers: finished, or failed with an error."""
    from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

    status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
    return GenerationOutput(request_id, prompt, new_tokens, logprobs, error, status)


def extend_all(requests: Sequence[ServedRequest], logits: Tensor) -> list[bool]:
    """Choose the next tokens of each request; return which of them end.

    This is what `generate` does with one row, so a request gets the tokens that it gets alone. See
    Note [Exact drafts] in `verify.py`.

    Args:
        requests: the requests.
        logits: `(T, V)`, after the last token of each request, and after each one of its draft.
    """
    # Rows of logits of a request with the draft 5 7, and of one without; `firsts` are 0, 3 and 4:
    #     row           0           1          2          3
    #     token after   the last    5          7          the last
    firsts = [*accumulate((1 + len(x.drafted) for x in requests), initial=0)]
    has_ended, left, number = [False] * len(requests), [*range(len(requests))], 0
    while left:  # the step may have had tokens of prompts only
        # A token may be chosen once the one before it was proposed rightly.
        rows = [firsts[x] + number for x in left]
        given = logits if len(rows) == len(logits) else logits[rows]
        ends = _extend([requests[x] for x in left], given, number)
        for x, is_end in zip(left, ends, strict=True):
            has_ended[x] = is_end
        left = [x for x in left if not has_ended[x] and _is_right(requests[x], number)]
        number += 1
    return has_ended


def _is_right(request: ServedRequest, number: int) -> bool:
    """Return whether a token was proposed at this place, and was chosen."""
    return request.drafted[number : number + 1] == [request.last_token]


def _extend(requests: Sequence[ServedRequest], logits: Tensor, number: int) -> list[bool]:
    """Choose one token of each request from logits `(B, V)`, at this place of their drafts."""
    scores = processed(requests, logits.to(torch.float32, copy=True))
    chosen = _chosen(requests, scores, number)
    logprobs = _logprobs(requests, scores, chosen)
    found = []
    for request, token, row in zip(requests, chosen.tolist(), scores.split(1), strict=True):
        request.logprobs += logprobs.get(request.number, [])
        found.append(request.extend(token, row))
    return found


class HasChoice(Protocol):
    """What processors are given of a request."""

    choice: TokenChoice

    @property
    def ids(self) -> Tensor:
        """Return all tokens, `(1, S)`."""
        ...


def processed(requests: Sequence[HasChoice], scores: Tensor) -> Tensor:
    """Return scores `(B, V)` after the requests' processors, which may change them in place."""
    groups: dict[Hashable, list[int]] = defaultdict(list)
    for row, request in enumerate(requests):
        key = request.choice.batch_key
        groups[("alone", row) if key is None else key].append(row)
    for key, rows in groups.items():
        if key == ():
            continue  # no processors
        first, where = requests[rows[0]], torch.tensor(rows, device=scores.device)
        # Processors of a group do not read tokens.
        ids = first.ids if first.choice.batch_key is None else first.ids.new_empty(len(rows), 0)
        scores[where] = first.choice.processors(ids, scores[where])
    return scores


def _chosen(requests: Sequence[ServedRequest], scores: Tensor, number: int) -> Tensor:
    """Return the tokens `(B,)` with the largest scores, or those that are drawn by them."""
    chosen = scores.argmax(-1)
    drawing = [row for row, x in enumerate(requests) if x.generator is not None]
    if drawing:
        weights, has_none = probabilities(scores)
        # Each request draws from its own generator, and one launch takes one generator.
        tokens = [
            drawn(weights[row : row + 1], x.generator, x.draft or Draft(), number)
            for row in drawing
            for x in requests[row : row + 1]
            if x.generator is not None
        ]
        where = torch.tensor(drawing, device=scores.device)
        chosen[where] = torch.cat(tokens).squeeze(1).masked_fill(has_none[where], NO_TOKEN)
    return chosen


def _logprobs(
    requests: Sequence[ServedRequest], scores: Tensor, chosen: Tensor
) -> dict[int, list[float]]:
    """Return the log-probabilities of tokens, by the numbers of the requests that want them."""
    if not any(x.choice.returns_logprobs for x in requests):
        return {}
    given = chosen.clamp(min=0).unsqueeze(-1)  # one that cannot be drawn is given out by nobody
    found = scores.log_softmax(-1).gather(-1, given).squeeze(-1).tolist()
    wanted = zip(requests, found, strict=True)
    return {x.number: [logprob] for x, logprob in wanted if x.choice.returns_logprobs}
