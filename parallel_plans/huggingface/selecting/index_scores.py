"""Writes down the scores of an index in place of computing them.

Note [Scores that are not computed]: an indexer of transformers scores each token for each query,
`(B, S, S)` numbers, and takes the best. Under a plan its own forward runs on `IndexScores` in place
of the keys. Products, ReLU and weights are written down there, and what it chooses is a
`Selection`: an op makes it later of queries, keys and weights. So projections and rotations are
those of the model, no scores of all pairs exist, and code that does anything else is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from parallel_plans.huggingface.core.layer_inputs import KeyIndex
from parallel_plans.huggingface.selecting.selection import Selection


class SeenLater:
    """Stands for the mask of an indexer: attention knows what a query sees."""

    dtype = torch.float32
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        """Refuse an indexer that reads which tokens a query sees.

        Raises:
            UnknownScoresError: always.
        """
        raise UnknownScoresError(f"it compares its mask with {other}, to find what a query sees")

    def __getattr__(self, name: str) -> Any:
        """Refuse an indexer that does anything with its mask but adding it.

        Raises:
            UnknownScoresError: for any name but those of Python's protocols.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        raise UnknownScoresError(f"it reads {name} of its mask, to find what a query sees")


class UnknownScoresError(ValueError):
    """An indexer does something else with its keys than to choose by sums of products."""


@dataclass(frozen=True, eq=False)
class IndexScores:
    """Scores of keys, `(B, L, S)`, as far as an indexer has described them.

    They are `sum over heads of weights * relu(scale * query @ key)`.

    Attributes:
        keys: the keys of this rank, `(B, C, D)`.
        stage: what the indexer has: "keys", "products", "rectified products" or "scores".
        query: queries, `(B, L, heads, D)`.
        weights: weights of the heads, `(B, L, heads)`.
        scale: the factor of the products.
    """

    keys: Tensor
    stage: str = "keys"
    query: Tensor | None = None
    weights: Tensor | None = None
    scale: float = 1.0

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> IndexScores:
        """Write down a product or a ReLU.

        Raises:
            UnknownScoresError: for any other function.
        """
        name = getattr(func, "__name__", str(func))
        if name == "matmul" and isinstance(args[1], cls) and isinstance(args[0], Tensor):
            return args[1]._times(args[0])
        if name == "relu" and isinstance(args[0], cls):
            return args[0]._having("products", stage="rectified products")
        raise UnknownScoresError(f"it calls {name} on its keys or on scores by them")

    def transpose(self, *dims: int) -> IndexScores:
        """Return the keys as columns for a product."""
        return self._having("keys")

    def unsqueeze(self, dim: int) -> IndexScores:
        """Return the keys, which all heads share."""
        return self._having("keys")

    def float(self) -> IndexScores:
        """Return the keys, whose products are computed in float32 at least."""
        # Narrower keys travel as they are, and become float32 where they arrive.
        wide = self.keys.float() if self.keys.dtype is torch.float64 else self.keys
        return self._having("keys", keys=wide)

    def __mul__(self, factor: Any) -> IndexScores:
        """Scale the products; a positive factor commutes with the ReLU."""
        if not isinstance(factor, (int, float)) or factor <= 0 or "products" not in self.stage:
            raise UnknownScoresError(f"it multiplies its {self.stage} by {factor}")
        return replace(self, scale=self.scale * factor)

    def squeeze(self, dim: int) -> IndexScores:
        """Return the scores, whose heads are summed."""
        return self._having("scores")

    def __add__(self, mask: Any) -> IndexScores:
        """Return the scores; the keys that a query does not see are left out later."""
        if not isinstance(mask, SeenLater):
            raise UnknownScoresError(f"it adds a {type(mask).__name__} to its {self.stage}")
        return self._having("scores")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, with an unbounded number of keys: other ranks have more of them."""
        return (*self.keys.shape[:1], sys.maxsize)

    def topk(self, k: int, dim: int = -1) -> Selection:
        """Return the choice of the best `k` keys of each query."""
        found = self._having("scores")
        assert found.query is not None and found.weights is not None
        return Selection(KeyIndex(found.query, found.keys, found.weights, k, found.scale))

    def _times(self, left: Tensor) -> IndexScores:
        """Return products with queries, or sums of rectified ones by weights `(B, L, 1, N)`."""
        if self.stage == "keys":
            return replace(self, stage="products", query=left)
        return self._having("rectified products", stage="scores", weights=left.squeeze(-2))

    def _having(self, needed: str, **changes: Any) -> IndexScores:
        """Return the scores with changes, if the indexer has got to the stage that is needed."""
        if self.stage != needed:
            raise UnknownScoresError(f"it takes its {self.stage} for {needed}")
        return replace(self, **changes)
