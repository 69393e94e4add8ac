"""Proposes the next tokens of requests: from their own tokens, by a function, or by a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from parallel_plans.huggingface.serving.served_request import ServedRequest
from parallel_plans.huggingface.serving.verify import Draft

ADAPTIVE = ("heuristic", "heuristic_transient")
SCHEDULES = (*ADAPTIVE, "constant")
# Options of a GenerationConfig about drafts, of those that are not the model's.
NUMBER, SCHEDULE, CONFIDENCE = (
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
)
LOOKUP, NGRAM = "prompt_lookup_num_tokens", "max_matching_ngram_size"


@dataclass(frozen=True)
class DraftOptions:
    """The options of requests that are about drafts.

    Attributes:
        assistant: a model or a function that proposes tokens; `None` for none.
        lookup: the number of tokens to look up; `None` for none.
        ngram: the largest number of last tokens that are looked for.
        number: how many tokens are proposed; `None` for what the assistant's config says.
        schedule: whether that number changes; `None` likewise.
        confidence: the probability of a token below which a draft ends; `None` likewise.
    """

    assistant: Any = None
    lookup: int | None = None
    ngram: int | None = None
    number: int | None = None
    schedule: str | None = None
    confidence: float | None = None

    @classmethod
    def take(
        cls, options: dict[str, Any], config: Any, of_model: Any
    ) -> tuple[DraftOptions, dict[str, Any], Any]:
        """Return the options of drafts, and those of the call and the config without them.

        Args:
            options: options of the call.
            config: a GenerationConfig, or `None`.
            of_model: the GenerationConfig of the model.

        Raises:
            ValueError: if a number or a schedule is unknown, or there are two ways to propose.
        """
        assistant, names = options.get("assistant_model"), (LOOKUP, NGRAM)
        names = (*names, NUMBER, SCHEDULE, CONFIDENCE)
        asked = {x: options.get(x, getattr(config, x, None)) for x in names}
        if assistant is None:  # else it is the config of the assistant that counts
            asked = {x: getattr(of_model, x, None) if y is None else y for x, y in asked.items()}
        for name in (LOOKUP, NGRAM, NUMBER):
            number = asked[name]
            if number is not None and not (type(number) is int and number > 0):
                raise ValueError(f"{name} must be a number of tokens from 1, got {number!r}")
        if asked[SCHEDULE] not in (None, *SCHEDULES):
            raise ValueError(f"{SCHEDULE} must be one of {SCHEDULES}, got {asked[SCHEDULE]!r}")
        if assistant is not None and asked[LOOKUP] is not None:
            raise ValueError(
                f"assistant_model and {LOOKUP} both propose tokens; leave one of them out"
            )
        config, rest = copy(config), {x: y for x, y in options.items() if x != LOOKUP}
        if config is not None:
            # Else `generate` would propose tokens by itself.
            setattr(config, LOOKUP, None)
        rest.pop("assistant_model", None)
        if getattr(of_model, LOOKUP, None) is not None:
            rest[LOOKUP] = None  # as an option it counts more than what the model's config says
        drafts = cls(
            assistant,
            lookup=asked[LOOKUP],
            ngram=asked[NGRAM],
            number=asked[NUMBER],
            schedule=asked[SCHEDULE],
            confidence=asked[CONFIDENCE],
        )
        return drafts, rest, config

    def of_config(self, config: Any) -> tuple[int, bool, float]:
        """Return how many tokens are proposed, whether that number changes, and the confidence.

        The config of an assistant says what is not given, or else the defaults of transformers do.
        """
        given = {NUMBER: self.number, SCHEDULE: self.schedule, CONFIDENCE: self.confidence}
        known: dict[str, Any] = {
            x: getattr(config, x, None) if y is None else y for x, y in given.items()
        }
        number, confidence = known[NUMBER], known[CONFIDENCE]
        number = 20 if number is None else number
        return number, known[SCHEDULE] in ADAPTIVE, 0.4 if confidence is None else confidence

    def drafter(self, num_entries: int) -> Drafter | None:
        """Return the drafter, unless it is a model; `None` if nothing proposes tokens.

        Raises:
            TypeError: if the assistant is not a function.
        """
        if self.lookup is not None:
            return LookupDrafter(self.lookup, self.ngram or 2)
        if self.assistant is None:
            return None
        if isinstance(self.assistant, nn.Module) or not callable(self.assistant):
            raise TypeError(
                "assistant_model must be a model, or a function of the tokens of requests and how "
                f"many to propose, got {type(self.assistant).__name__}"
            )
        number, is_adaptive, _ = self.of_config(None)
        return FunctionDrafter(self.assistant, number, num_entries, is_adaptive)


class Drafter(ABC):
    """Proposes tokens.

    Attributes:
        num_tokens: how many of them for a request, at first.
        is_adaptive: whether a request asks for two more after a draft that was right, and for one
            less after any other.
    """

    num_tokens: int
    is_adaptive: bool = False

    @abstractmethod
    def propose(self, requests: Sequence[ServedRequest], limits: Sequence[int]) -> list[Draft]:
        """Return a draft for each request that decodes, up to its limit, which may be 0."""


@dataclass(eq=False)
class LookupDrafter(Drafter):
    """Proposes what came after the first place in a request's tokens that has its last ones.

    Attributes:
        num_tokens: how many tokens are proposed.
        ngram: the largest number of last tokens that are looked for.
    """

    num_tokens: int
    ngram: int

    def propose(self, requests: Sequence[ServedRequest], limits: Sequence[int]) -> list[Draft]:
        pairs = zip(requests, limits, strict=True)
        return [Draft(looked_up(x.tokens, self.ngram, limit)) for x, limit in pairs]


def looked_up(tokens: array[int], ngram: int, count: int) -> list[int]:
    """Return the tokens after the first place where the last ones, `ngram` or fewer, were before.

    >>> looked_up(array("q", [1, 2, 3, 4, 5, 1, 2]), ngram=2, count=3)
    [3, 4, 5]
    """
    if not count:
        return []
    # Of 7 8 9 7 8, the pair 7 8 stood at the start: what followed it is proposed, 9 7 8. The
    # longest group of last tokens that stood before decides.
    ids = np.frombuffer(tokens, dtype=np.int64)
    for size in range(min(ngram, len(ids) - 1), 0, -1):
        # Places that have the last token, then those among them that have the tokens before it,
        # too.
        ends = np.flatnonzero(ids[size - 1 : -1] == ids[-1]) + size - 1
        for back in range(1, size):
            ends = ends[ids[ends - back] == ids[-1 - back]]
        if len(ends):
            return ids[ends[0] + 1 :][:count].tolist()
    return []


Function = Callable[[Sequence[Sequence[int]], Sequence[int]], Sequence[Sequence[int]]]
"""Gets the tokens of some requests, which it must not change, and how many to propose of each."""


@dataclass(eq=False)
class FunctionDrafter(Drafter):
    """Proposes the tokens that a function returns.

    Attributes:
        function: the function.
        num_tokens: how many tokens are asked of it.
        num_entries: the number of tokens that there are.
        is_adaptive: see `Drafter`.
    """

    function: Function
    num_tokens: int
    num_entries: int
    is_adaptive: bool = False

    def propose(self, requests: Sequence[ServedRequest], limits: Sequence[int]) -> list[Draft]:
        proposed = self.function([x.tokens for x in requests], limits)
        if len(proposed) != len(requests):
            raise ValueError(
                f"assistant_model must return a list of tokens for each of {len(requests)} "
                f"requests, got {len(proposed)}"
            )
        return [self._checked(x, limit) for x, limit in zip(proposed, limits, strict=True)]

    def _checked(self, tokens: Sequence[int], limit: int) -> Draft:
        tokens = [int(x) for x in tokens[:limit]]
        wrong = [x for x in tokens if not 0 <= x < self.num_entries]
        if wrong:
            raise ValueError(
                f"assistant_model must return tokens from 0 to {self.num_entries - 1}, got "
                f"{wrong[0]}"
            )
        return Draft(tokens)


def propose_all(requests: Sequence[ServedRequest], share: int, unit: int | None) -> None:
    """Give each request that decodes a draft, unless it has one that was not computed yet.

    Args:
        requests: the requests.
        share: the largest number of tokens of a request in a step.
        unit: the number of tokens that are rounded to eight bits together; `None` for no rounding.
    """
    # Requests of one drafter propose together, in one forward of its model.
    by_drafter: dict[int, list[ServedRequest]] = {}
    for request in requests:
        if request.choice.drafter is None:
            request.draft = Draft()
        else:
            by_drafter.setdefault(id(request.choice.drafter), []).append(request)
    for group in by_drafter.values():
        limits = [0 if x.draft else num_proposed(x, share, unit) for x in group]
        found = group[0].choice.drafter.propose(group, limits)
        for request, draft in zip(group, found, strict=True):
            request.draft = request.draft or draft


# Note [Length of drafts]: how many tokens are proposed depends on the request alone, never on who
# else is in the batch: else the tokens that it samples would. A request has a fixed share of a
# step, and blocks for its draft are taken as for its next token, see Note [Preemption].
def num_proposed(request: ServedRequest, share: int, unit: int | None) -> int:
    """Return how many tokens may be proposed for a request, see Note [Length of drafts]."""
    # The token after the draft is the last one that may follow.
    longest = request.choice.config.max_length - len(request.tokens) - 1
    number = max(0, min(request.num_drafts, share - 1, longest))
    if unit is None:
        return number
    # A proposed token must not be the last one of a unit: tokens before it in the draft would see
    # the unit rounded, and it could not be taken back. The token before the draft may.
    return min(number, (unit - 1 - len(request.tokens)) % unit)
