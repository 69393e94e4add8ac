"""Chooses the next tokens of all requests of a step, with few launches and one wait for a GPU."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from parallel_plans.huggingface.serving.served_request import ServedRequest


def extend_all(requests: Sequence[ServedRequest], logits: Tensor) -> list[bool]:
    """Choose the next token of each request from the logits `(B, V)`; return which of them end.

    This is what `generate` does with one row, so a request gets the tokens that it gets alone.
    """
    if not requests:  # the step had tokens of prompts only
        return []
    scores = _processed(requests, logits.to(torch.float32, copy=True))
    chosen = _chosen(requests, scores)
    logprobs = _logprobs(requests, scores, chosen)
    found = []
    for request, token, row in zip(requests, chosen.tolist(), scores.split(1), strict=True):
        request.logprobs += logprobs.get(request.number, [])
        found.append(request.extend(token, row))
    return found


def _processed(requests: Sequence[ServedRequest], scores: Tensor) -> Tensor:
    """Return what the requests' processors make of their scores `(B, V)`, which they may change."""
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


def _chosen(requests: Sequence[ServedRequest], scores: Tensor) -> Tensor:
    """Return the tokens `(B,)` with the largest scores, or those that are drawn by them."""
    chosen = scores.argmax(-1)
    drawing = {row: x.generator for row, x in enumerate(requests) if x.generator is not None}
    if drawing:
        weights = scores.softmax(-1)
        # Each request draws from its own generator, and one launch takes one generator.
        rows = ((weights[row : row + 1], x) for row, x in drawing.items())
        drawn = torch.cat([torch.multinomial(row, 1, generator=x) for row, x in rows])
        chosen[torch.tensor([*drawing], device=scores.device)] = drawn.squeeze(1)
    return chosen


def _logprobs(
    requests: Sequence[ServedRequest], scores: Tensor, chosen: Tensor
) -> dict[int, list[float]]:
    """Return the log-probabilities of tokens, by the numbers of the requests that want them."""
    if not any(x.choice.returns_logprobs for x in requests):
        return {}
    found = scores.log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1).tolist()
    wanted = zip(requests, found, strict=True)
    return {x.number: [logprob] for x, logprob in wanted if x.choice.returns_logprobs}
