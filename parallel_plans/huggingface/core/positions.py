"""Computes positions that depend on the whole sequence, and locates its last tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from dtensor_ring import SequenceAxis
from dtensor_ring.extension import Layout

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
FROM_TOKENS, FROM_EMBEDDINGS = (
    "create_position_ids_from_input_ids",
    "create_position_ids_from_inputs_embeds",
)

# Returns the positions of ids or embeddings under an attention mask, `(B, S)`.
PositionsOf = Callable[[Tensor, Tensor | None], Tensor]


class LargestPosition:
    """The largest position of the batch, on which the factors of some rotary embeddings depend.

    `longrope` has separate factors for long batches, and `dynamic` computes them from the length.
    Both read the largest position that they are called with, but a rank has only a part of the
    positions. So they get one more token at the largest position of the batch, and its output is
    dropped. Transformers passes them nothing else about the batch, so the position is stored here
    while the model runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._position: Tensor | None = None
        self.is_read = False
        for module in length_dependent(model):
            forward = _with_one_more(type(module).forward, self)
            module.forward = MethodType(forward, module)
            self.is_read = True

    def set(self, positions: Tensor) -> None:
        """Set the positions of the whole batch, or the largest, without the layout's padding."""
        if self.is_read:
            self._position = positions.max()

    def clear(self) -> None:
        """Forget the batch."""
        self._position = None

    def appended_to(self, positions: Tensor) -> Tensor:
        """Return this rank's positions with the largest one of the batch appended."""
        if self._position is None:  # called by itself, outside of the model
            return torch.cat([positions, positions[:, -1:]], 1)
        return torch.cat([positions, self._position.expand(positions.shape[0], 1)], 1)


def _with_one_more(plain: Callable[..., Any], largest: LargestPosition) -> Callable[..., Any]:
    """Return the forward of a rotary embedding with the factors of the whole batch."""

    def forward(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, x, largest.appended_to(position_ids), *args, **kwargs)
        return tree_map_only(Tensor, lambda part: part[:, :-1], output)

    return forward


def length_dependent(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the rotary embeddings whose factors depend on the largest position."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)  # one, or one for each type of layer
        kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(kind in LENGTH_DEPENDENT_ROPE for kind in kinds):
            yield module


def counter_of(model: nn.Module) -> PositionsOf | None:
    """Return how the model counts positions; `None` if from zero in each row."""
    for module in model.modules():
        if hasattr(module, FROM_TOKENS):
            return partial(_from_tokens, module)
        if isinstance(module, nn.Embedding) and counts_mask(module):
            return partial(_from_mask, module)
    return None


def counts_mask(embedding: nn.Embedding) -> bool:
    """Return whether it embeds positions that it counts from an attention mask, as in OPT."""
    return {"attention_mask", "position_ids"} <= set(signature(embedding.forward).parameters)


def _from_tokens(owner: Any, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Count positions by the model's own method, which skips padding tokens, as in RoBERTa."""
    method = getattr(owner, FROM_EMBEDDINGS if tokens.is_floating_point() else FROM_TOKENS)
    options = {"padding_idx": owner.padding_idx}
    return method(tokens, **{k: x for k, x in options.items() if k in signature(method).parameters})


def _from_mask(embedding: nn.Embedding, tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Count positions by the embedding, without the offset that it adds to given positions."""
    if mask is None:
        mask = tokens.new_ones(tokens.shape[:2], dtype=torch.long)
    # In a table that holds its own row numbers, each look-up returns the index it read.
    table = {"weight": torch.arange(embedding.num_embeddings, device=mask.device).unsqueeze(1)}
    explicit = {"position_ids": torch.zeros_like(mask, dtype=torch.long)}
    counted, offset = (
        functional_call(embedding, table, mask, more).squeeze(-1) for more in ({}, explicit)
    )
    return counted - offset


class LastTokens(NamedTuple):
    """The last tokens on this rank: a contiguous range, since local positions ascend.

    A rank that has none of them computes one other token, and drops the result: libraries that
    replace a head, for example to quantise it, may not take an empty tensor.

    Attributes:
        axis: the axis that shards the sequence.
        count: number of last tokens on all ranks together.
        begin: local index of the first one on this rank.
        places: index of each local one among all `count` tokens.
    """

    axis: SequenceAxis
    count: int
    begin: int
    places: tuple[int, ...]

    @classmethod
    def of(
        cls, axis: SequenceAxis, layout: Layout, seq_len: int, sharded_length: int, count: int
    ) -> LastTokens:
        """Locate the last `count` of `seq_len` tokens, sharded with padding at the end."""
        count = min(count, seq_len)
        first = seq_len - count
        runs = layout.runs(axis.mesh.get_local_rank(), axis.mesh.size(), sharded_length)
        parts = [(run, *run.indices(first, seq_len)) for run in runs]
        # Of 8 tokens in zigzag order on two ranks, the last 3 are 5 on rank 1, and 6 and 7 on
        # rank 0. There `begin` is 2, and `places` are 1 and 2.
        places = (run.position(x) - first for run, begin, end in parts for x in range(begin, end))
        num_before = sum(run.indices(0, first)[1] for run in runs)
        return cls(axis, count, num_before, tuple(places))

    def local_indices(self, device: torch.device) -> Tensor:
        """Return the indices of the last tokens among this rank's tokens, or one other index."""
        begin = self.begin if self.places else 0
        return torch.arange(begin, begin + max(1, len(self.places)), device=device)

    def join(self, local: Tensor, dim: int) -> Tensor:
        """Gather the results of all `count` tokens, on every rank, from local results."""
        shape = (*local.shape[:dim], self.count, *local.shape[dim + 1 :])
        places = torch.tensor(self.places, dtype=torch.int64, device=local.device)
        own = local.narrow(dim, 0, len(self.places))
        # Each place is filled on one rank: a sum with zeros is exact.
        return self.axis.sum(local.new_zeros(shape).index_copy(dim, places, own))
