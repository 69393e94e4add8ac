"""Tokens that were proposed for a request, and the rule by which a sampled one is kept.

Greedy tokens do not depend on the draft. Of a draft without probabilities, a sampled token does
neither: it is drawn as without one. The proposed token x is then kept with its probability p(x), as
speculative sampling does where the draft is sure, q(x) = 1. If x was drawn from probabilities q,
speculative sampling keeps it with min(1, p(x) / q(x)), and else draws from what p has more than q
(Leviathan et al., 2023, arXiv 2211.17192). The token is distributed by p, and kept more often.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next.

    Attributes:
        tokens: the proposed tokens.
        probabilities: the probabilities that each was drawn from, `(K, V)`; `None` if none was.
    """

    tokens: Sequence[int] = ()
    probabilities: Tensor | None = None


def probabilities(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities of tokens `(B, V)`, and which rows have none `(B,)`.

    Scores that are NaN or inf give none. Such a row is drawn as if all tokens were alike: an error
    of the draw would be one of all rows, and on a GPU the end of the process.

    >>> probabilities(torch.tensor([[0.0, 0.0], [torch.inf, 0.0]]))
    (tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]]), tensor([False,  True]))
    """
    weights = scores.softmax(-1)
    has_none = weights[:, 0].isnan()  # a row of a softmax is NaN in all numbers, or in none
    return weights.masked_fill_(has_none.unsqueeze(1), 1 / scores.shape[1]), has_none


# Note [Exact drafts]: the model computes the scores after each token of a draft at once, and tokens
# are chosen from them one after another, as without a draft. The draft goes on as long as the
# chosen token is the proposed one. So a draft costs or saves time, and changes nothing else.
def drawn(weights: Tensor, generator: torch.Generator, draft: Draft, number: int) -> Tensor:
    """Return a token `(B, 1)` for each row, drawn by its probabilities.

    Args:
        weights: the probabilities of all tokens after those before, `(B, V)`.
        generator: the random state that is drawn from.
        draft: what was proposed.
        number: the place in the draft; after its end, nothing was proposed.

    >>> weights, generator = torch.tensor([[0.0, 1.0]]), torch.Generator().manual_seed(0)
    >>> drawn(weights, generator, Draft([0], torch.tensor([[0.5, 0.5]])), number=0)
    tensor([[1]])
    """
    if draft.probabilities is None or number >= len(draft.tokens):
        return torch.multinomial(weights, 1, generator=generator)
    proposed = draft.probabilities[number].unsqueeze(0)
    token = torch.full_like(weights[:, :1], draft.tokens[number], dtype=torch.int64)
    limit = torch.rand(token.shape, generator=generator, device=weights.device)
    # u < p / q, as a product; with u in [0, 1) the minimum with 1 needs no line.
    is_kept = limit * proposed[:, token[0]] < weights.gather(1, token)
    rest = (weights - proposed).clamp(min=0)
    # All of the rest may be lost to rounding where both are nearly the same.
    rest = torch.where(rest.sum(1, keepdim=True) > 0, rest, weights)
    # Drawn even if it is not used: the host does not wait for the device to tell.
    return torch.where(is_kept, token, torch.multinomial(rest, 1, generator=generator))
