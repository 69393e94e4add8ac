"""What ranks that decode tell the others at the end of a step: tokens, ends, and the next drafts.

Of each request they tell whether it ends, its new tokens and their log-probabilities, and what is
proposed next. All ranks know how many tokens these are at most, and the places of the others have
`NOTHING`. Without drafts these are 24 bytes of a request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from parallel_plans.huggingface.serving.served_request import UNDRAWABLE, ServedRequest
from parallel_plans.huggingface.serving.verify import Draft

FAILED = 2  # the end of a request that has an error


class ToldTokens:
    """The message about the requests that decode in a step; made before their tokens are chosen.

    Args:
        requests: the requests.
        share: the largest number of tokens of a request in a step.
        device: where the message is.

    Attributes:
        message: the numbers, `(N,)`, int64.
    """

    def __init__(self, requests: Sequence[ServedRequest], share: int, device: torch.device) -> None:
        self._requests = requests
        self._lengths = [len(x.tokens) for x in requests]
        # Of each request: its end, as many tokens as log-probabilities, and the next draft.
        self._sizes = [
            (1, 1 + len(x.drafted), 1 + len(x.drafted), _longest_draft(x, share)) for x in requests
        ]
        num = sum(map(sum, self._sizes))
        self.message = torch.zeros(num, dtype=torch.int64, device=device)

    def write(self, ends: Sequence[bool]) -> None:
        """Write what the requests have got, whose next drafts are those of the next step."""
        numbers = list[int]()
        rows = zip(self._requests, ends, self._lengths, self._sizes, strict=True)
        for request, is_end, before, (_, num, _, num_next) in rows:
            new = request.tokens[before:].tolist()
            logprobs = request.logprobs[-len(new) :] if request.logprobs else [0.0] * len(new)
            # A float64 travels as the int64 of its bits, so that the message has one dtype.
            bits = torch.tensor(logprobs, dtype=torch.float64).view(torch.int64).tolist()
            drafted = [] if is_end else [*request.drafted]
            numbers += [
                int(is_end) + (request.error is not None),
                *_filled(new, num),
                *_filled(bits, num),
            ]
            numbers += _filled(drafted, num_next)
        self.message.copy_(torch.tensor(numbers, dtype=torch.int64))

    def note(self) -> tuple[list[bool], list[Draft]]:
        """Add the tokens that were told to the requests; return which end, and the next drafts."""
        ends, drafts = list[bool](), list[Draft]()
        parts = iter(self.message.cpu().split([x for sizes in self._sizes for x in sizes]))
        for request, end, new, bits, drafted in zip(
            self._requests, parts, parts, parts, parts, strict=True
        ):
            tokens = _told(new)
            request.note(tokens)
            if request.choice.returns_logprobs:
                request.logprobs += bits[: len(tokens)].view(torch.float64).tolist()
            if end == FAILED:
                request.error = UNDRAWABLE
            ends.append(bool(end))
            drafts.append(Draft(_told(drafted)))
        return ends, drafts


def _longest_draft(request: ServedRequest, share: int) -> int:
    """Return the largest number of tokens that may be proposed after this step."""
    if request.choice.drafter is None:
        return 0
    return max(0, min(request.num_drafts + 2, share - 1))  # it may learn to ask for two more


NOTHING = -1  # no token has this number


def _filled(numbers: Sequence[int], num: int) -> list[int]:
    return [*numbers, *[NOTHING] * (num - len(numbers))]


def _told(tokens: torch.Tensor) -> list[int]:
    return tokens[tokens != NOTHING].tolist()
