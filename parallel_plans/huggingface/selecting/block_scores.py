"""Scores of blocks of keys, as an indexer describes them: each head chooses blocks by its best key.

An indexer that chooses blocks counts places in the row: it hides the keys after a query, and finds
the block of a query, by `position_ids`. Under a plan these are `Places`, and so is each range that
it counts, for a rank does not have the keys of all places. See Note [Scores that are not computed].
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from parallel_plans.huggingface.core.key_index import KeyIndex
from parallel_plans.huggingface.selecting.selection import Selection


class UnknownScoresError(ValueError):
    """An indexer does something else with its keys than to choose by products."""


# Other ranks have more keys, so an indexer reads this as their number.
ALL_KEYS = sys.maxsize


@dataclass(frozen=True)
class Places:
    """Places in the row, without the numbers: of each query, of all keys, or of the last blocks.

    Changes of shape change nothing. What else an indexer computes is a `TypeError`.

    Attributes:
        what: "queries", "keys", "later keys", "blocks of queries" or "last blocks".
        number: how many there are, for keys and last blocks.
        block_size: places in a block, for blocks.
    """

    what: str
    number: int = 0
    block_size: int = 0

    def __getitem__(self, index: Any) -> Places:
        return self

    def view(self, *shape: int) -> Places:
        """Return the places; new dims of 1 change nothing."""
        return self

    unsqueeze = expand = view

    def clamp(self, min: int) -> Places:
        """Return the places; what is before the first block is that block."""
        return self._having("last blocks", min == 0, f"clamps them at {min}")

    def __gt__(self, other: Any) -> Places:
        """Return which keys come after each query."""
        is_known = isinstance(other, Places) and other.what == "queries"
        self._having("keys", is_known and self.number == ALL_KEYS, "compares them")
        return Places("later keys")

    def __floordiv__(self, size: int) -> Places:
        """Return the block of each query."""
        self._having("queries", isinstance(size, int), f"divides them by {size}")
        return Places("blocks of queries", block_size=size)

    def __sub__(self, other: Any) -> Places:
        """Return the blocks up to that of each query."""
        is_known = isinstance(other, Places) and other.what == "keys"
        self._having("blocks of queries", is_known, f"subtracts {other}")
        return Places("last blocks", other.number, self.block_size)

    def _having(self, what: str, is_known: bool, does: str) -> Places:
        if self.what != what or not is_known:
            raise UnknownScoresError(f"it has the places of {self.what}, and {does}")
        return self


class CountedPlaces(TorchFunctionMode):
    """Makes the ranges that an indexer counts `Places` of as many keys.

    Attributes:
        has_keys: whether the indexer has its keys: modules and hooks that run before count alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.has_keys = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return places in place of a range from 0."""
        if func is torch.arange and self.has_keys and len(args) == 1:
            return Places("keys", args[0])
        return func(*args, **kwargs or {})


# What an indexer of blocks does to its keys, and the stage that each step leads to:
#
#     scores = query @ keys.transpose(-1, -2)            products
#     scores.masked_fill(keys > queries, -inf)           products up to the query
#     scores.view(..., blocks, block_size)               keys by blocks
#     scores.amax(-1)                                    scores
#     scores.scatter_(-1, last blocks, inf).topk(k)      the choice
@dataclass(eq=False)
class BlockScores:
    """Scores of blocks of keys, `(B, heads, L, blocks)`, as far as an indexer has described them.

    They are `max over the keys of a block of query @ key`, and infinite for the last blocks.

    Attributes:
        keys: the keys of this rank, `(B, C, D)`.
        stage: "keys", "products", "products up to the query", "keys by blocks" or "scores".
        query: queries, `(B, heads, L, D)`.
        block_size: keys of a block.
        local_blocks: how many blocks up to that of a query have an infinite score.
    """

    keys: Tensor
    stage: str = "keys"
    query: Tensor | None = None
    block_size: int = 1
    local_blocks: int = 0

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> BlockScores:
        """Write down the products, or places that are added after the last key.

        Raises:
            UnknownScoresError: for any other function.
        """
        name = getattr(func, "__name__", str(func))
        if name == "matmul" and isinstance(args[1], cls) and isinstance(args[0], Tensor):
            args[1].query = args[0]
            return args[1]._goes("keys", "products")
        # What is added has no keys, whatever its number: it belongs to the last block.
        if name == "pad" and isinstance(args[0], cls) and (kwargs or {}).get("value") == -torch.inf:
            return args[0]._goes("products up to the query", "products up to the query")
        raise UnknownScoresError(f"it calls {name} on its keys or on scores by them")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the keys of all ranks, `(B, 1, S, D)`; nobody knows S."""
        batch, _, dim = self._goes("keys", "keys").keys.shape
        return batch, 1, ALL_KEYS, dim

    def float(self) -> BlockScores:
        """Return the keys, whose products are computed in float32 at least."""
        # Narrower keys travel as they are, and become float32 where they arrive.
        if self.keys.dtype is torch.float64:
            self.keys = self.keys.float()
        return self._goes("keys", "keys")

    def transpose(self, *dims: int) -> BlockScores:
        """Return the keys as columns for a product."""
        return self._goes("keys", "keys")

    def masked_fill(self, places: Any, value: Any) -> BlockScores:
        """Hide the keys after each query."""
        # A mask that hides anything else would change what a query may choose.
        if places != Places("later keys") or value != -torch.inf:
            raise UnknownScoresError(f"it fills its {self.stage} with {value} at {places}")
        return self._goes("products", "products up to the query")

    def view(self, *shape: int) -> BlockScores:
        """Sort the keys of all ranks into blocks."""
        assert self.query is not None
        # An indexer rounds the number of keys up to blocks, here that of all ranks.
        *others, number, self.block_size = shape
        if tuple(others) != self.query.shape[:3] or number != -(-ALL_KEYS // self.block_size):
            raise UnknownScoresError(f"it views its {self.stage} as {shape}")
        return self._goes("products up to the query", "keys by blocks")

    def amax(self, dim: int) -> BlockScores:
        """Give each block the score of its best key."""
        if dim != -1:
            raise UnknownScoresError(f"it takes the best of dim {dim} of its {self.stage}")
        return self._goes("keys by blocks", "scores")

    def scatter_(self, dim: int, places: Any, value: Any) -> BlockScores:
        """Give the last blocks of each query an infinite score."""
        is_last = isinstance(places, Places) and places.what == "last blocks"
        if not is_last or places.block_size != self.block_size or value != torch.inf:
            raise UnknownScoresError(f"it sets its {self.stage} to {value} at {places}")
        self.local_blocks = places.number
        return self._goes("scores", "scores")

    def topk(self, k: int, dim: int = -1) -> tuple[ChosenBlocks, ChosenBlocks]:
        """Return the best `k` blocks of each query and head, as scores and as numbers."""
        query = self._goes("scores", "scores").query
        assert query is not None
        chosen = ChosenBlocks(
            KeyIndex(
                query.transpose(1, 2),
                self.keys,
                None,
                k=k,
                scale=1.0,
                block_size=self.block_size,
                local_blocks=self.local_blocks,
            )
        )
        return chosen, chosen

    def _goes(self, needed: str, stage: str) -> BlockScores:
        """Go on to a stage, if the indexer has got to the one that is needed."""
        if self.stage != needed:
            raise UnknownScoresError(f"it takes its {self.stage} for {needed}")
        self.stage = stage
        return self


class ChosenBlocks:
    """The blocks that `topk` returns, by their scores or by their numbers."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, index: KeyIndex) -> None:
        self._index = index

    def __eq__(self, other: object) -> Any:
        """Return which of them have no key that a query sees."""
        if other != -torch.inf:
            raise UnknownScoresError(f"it compares its scores with {other}")
        return self

    def masked_fill(self, is_none: Any, value: Any) -> Selection:
        """Return the choice, in which -1 stands for no block."""
        if is_none is not self or value != -1:
            raise UnknownScoresError(f"it fills its blocks with {value}")
        return Selection(self._index)
