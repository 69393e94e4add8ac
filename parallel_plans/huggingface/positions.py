"""Positions that a rank cannot tell from its own tokens: they are made of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
FROM_TOKENS, FROM_EMBEDDINGS = (
    "create_position_ids_from_input_ids",
    "create_position_ids_from_inputs_embeds",
)

PositionsOf = Callable[[dict[str, Any]], Tensor]
"""Positions of a whole batch, `(B, S)`."""


class LargestPosition:
    """The largest position of the batch, on which the factors of some rotary embeddings depend.

    `longrope` has other factors for long batches than for short ones, `dynamic` computes them of
    the length. Both take the largest of the positions that they are called with, and those of a
    rank are a part. So they get one more: a token at the largest position of the batch, which is
    cut off behind them. Transformers hands them nothing else of the batch, so it is kept here while
    the model runs.
    """

    def __init__(self, model: nn.Module) -> None:
        self._position: Tensor | None = None
        self._is_read = False
        for module in length_dependent(model):
            forward = _with_one_more(type(module).forward, self)
            module.forward = MethodType(forward, module)
            self._is_read = True

    def set(self, positions: Tensor) -> None:
        """Take the positions of the whole batch, without the tokens that fill it up."""
        if self._is_read:
            self._position = positions.max()

    def clear(self) -> None:
        """Forget the batch."""
        self._position = None

    @contextmanager
    def during(self, positions: Tensor) -> Iterator[None]:
        """A context in which the model runs on a batch."""
        self.set(positions)
        try:
            yield
        finally:
            self.clear()

    def appended_to(self, positions: Tensor) -> Tensor:
        """This rank's positions, and the largest one of the batch."""
        if self._position is None:  # called by itself, outside of the model
            return torch.cat([positions, positions[:, -1:]], 1)
        return torch.cat([positions, self._position.expand(positions.shape[0], 1)], 1)


def _with_one_more(plain: Callable[..., Any], largest: LargestPosition) -> Callable[..., Any]:
    """The forward of a rotary embedding, its factors those of the whole batch."""

    def forward(self: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = plain(self, x, largest.appended_to(position_ids), *args, **kwargs)
        return tree_map_only(Tensor, lambda part: part[:, :-1], output)

    return forward


def length_dependent(model: nn.Module) -> Iterator[nn.Module]:
    """The rotary embeddings whose factors depend on the largest position."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)  # one, or one for each type of layer
        kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any(kind in LENGTH_DEPENDENT_ROPE for kind in kinds):
            yield module


def counter_of(model: nn.Module) -> PositionsOf | None:
    """How the model itself counts the positions of a batch, if not from zero in each row."""
    for module in model.modules():
        if hasattr(module, FROM_TOKENS):
            return partial(_from_tokens, module)
        if isinstance(module, nn.Embedding) and counts_mask(module):
            return partial(_from_mask, module)
    return None


def counts_mask(embedding: nn.Embedding) -> bool:
    """Whether it embeds positions that it counts by an attention mask, as in OPT."""
    return {"attention_mask", "position_ids"} <= set(signature(embedding.forward).parameters)


def _from_tokens(owner: Any, batch: dict[str, Any]) -> Tensor:
    """By the model's own method, which leaves out tokens of padding, as in RoBERTa."""
    name, tokens = FROM_TOKENS, batch.get("input_ids")
    if tokens is None:
        name, tokens = FROM_EMBEDDINGS, batch["inputs_embeds"]
    method = getattr(owner, name)
    options = {"padding_idx": owner.padding_idx}
    return method(tokens, **{k: x for k, x in options.items() if k in signature(method).parameters})


def _from_mask(embedding: nn.Embedding, batch: dict[str, Any]) -> Tensor:
    """By the embedding, without the offset that it adds to the positions that it is given."""
    tokens = batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"]
    mask = batch.get("attention_mask")
    if mask is None:
        mask = tokens.new_ones(tokens.shape[:2], dtype=torch.long)
    # Of a table that holds the numbers of its rows, the look-up is the index.
    table = {"weight": torch.arange(embedding.num_embeddings, device=mask.device).unsqueeze(1)}
    given = {"position_ids": torch.zeros_like(mask, dtype=torch.long)}
    counted, offset = (
        functional_call(embedding, table, mask, more).squeeze(-1) for more in ({}, given)
    )
    return counted - offset
