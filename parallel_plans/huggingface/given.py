"""Masks that a model around the sharded one has made for the batch, as what tokens see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dtensor_ring import Slices
from dtensor_ring.extension import visible_pairs
from parallel_plans.huggingface.patterns import MaskFunction, Pattern, cut, is_pattern, pattern_of

FEW = 512
"""Tokens up to which all pairs are asked whether a mask shows one range of keys to each query."""

NUM_SAMPLES, SCATTER = 64, 40_503
"""Of more tokens, each query is asked for so many keys; an odd number scatters them."""


class ModelMask:
    """A mask as transformers composes it: a function of (batch, head, query, key), and padding.

    Its queries are the new tokens, after the `past` ones that are cached; keys are all tokens.

    Not a tuple: fully_shard moves the tensors in a layer's tuples to the device.
    """

    def __init__(
        self,
        pattern: Pattern,
        function: MaskFunction,
        shape: tuple[int, int],
        padding: Tensor | None,
        past: int = 0,
    ) -> None:
        self.pattern, self.shape, self.padding = pattern, shape, padding
        self._function, self._past = function, past

    def __getitem__(self, index: Any) -> ModelMask:
        """What a model cuts from its mask."""
        return cut(self, index)

    def given(self) -> GivenMask:
        """What each token of the batch sees.

        Raises:
            ValueError: if a token sees more than one range of keys.
        """
        begins, ends = self._edge(-1), self._edge(1) + 1
        self._check(begins, ends)
        # Tokens that are cached ask nothing any more.
        return GivenMask(*(nn.functional.pad(x, (self._past, 0)) for x in (begins, ends)))

    @property
    def _queries(self) -> Tensor:
        """Their positions, `(T,)`."""
        device = None if self.padding is None else self.padding.device
        return torch.arange(self._past, self._past + self.shape[1], device=device)

    def _edge(self, step: int) -> Tensor:
        """By query: the furthest key before (-1) or after it (1) up to which it sees all.

        A query that does not see itself has an edge beside it, so that its range is empty.
        """
        query = self._queries.expand(self.shape)
        # Bisection: each query is asked as often as the length has digits.
        near, far = torch.zeros_like(query), query if step < 0 else query[:, -1:] - query
        while (near < far).any():
            middle = (near + far + 1) // 2
            is_seen = self._sees(query + step * middle)
            near, far = torch.where(is_seen, middle, near), torch.where(is_seen, far, middle - 1)
        sees_itself = self._sees(query)
        return torch.where(sees_itself, query + step * near, query - int(step > 0))

    def _sees(self, key: Tensor, head: int = 0) -> Tensor:
        """Whether each query sees the key that is given for it, `(B, S)`."""
        query = self._queries.expand(self.shape)
        row = torch.arange(len(key), device=key.device).unsqueeze(1).expand_as(key)
        seen = self._function(row, torch.full_like(row, head), query, key)
        seen = torch.as_tensor(seen, device=key.device).expand(key.shape)
        return seen if self.padding is None else seen & self.padding.bool().gather(1, key)

    def _check(self, begins: Tensor, ends: Tensor) -> None:
        is_token = None if self.padding is None else self.padding[:, self._past :].bool()
        for keys in _samples(self._queries):
            key = keys.expand(begins.shape)
            # Of another head than before: all heads share the slices.
            wrong = self._sees(key, head=1) != ((begins <= key) & (key < ends))
            # What padding sees matters to nobody: here it sees nothing.
            if (wrong if is_token is None else wrong & is_token).any():
                raise ValueError(
                    "a mask that the model made for this batch shows some tokens keys that do not "
                    "follow one another; supported are masks in which each token sees one range"
                )


def _samples(query: Tensor) -> Iterator[Tensor]:
    """Keys for all queries: each key once if they are few, else near and far ones."""
    num_tokens = int(query[-1]) + 1
    if num_tokens <= FEW:
        yield from ((query + distance) % num_tokens for distance in range(num_tokens))
        return
    yield from ((query + 2**power) % num_tokens for power in range(num_tokens.bit_length()))
    # At other distances for each query, so that what neighbours see is asked at many.
    scattered = query * SCATTER
    for part in range(NUM_SAMPLES):
        yield (scattered + part * num_tokens // NUM_SAMPLES) % num_tokens


def mask_of(
    *,
    mask_function: MaskFunction | None = None,
    batch_size: int = 1,
    q_length: int = 0,
    attention_mask: Tensor | None = None,
    q_offset: int = 0,
    **kwargs: Any,
) -> Pattern | ModelMask:
    """The mask interface named `ring`: a name for what a sharded model asks for by itself.

    What a model around it asks for is about the whole batch, and may differ with it.
    """
    pattern = pattern_of(**kwargs)
    if mask_function is None or torch.compiler.is_compiling():
        return pattern  # a compiler cannot follow objects that hold functions
    return ModelMask(pattern, mask_function, (batch_size, q_length), attention_mask, q_offset)


class GivenMask:
    """What a layer's tokens see: the range of keys of each position, `(B, S)`."""

    def __init__(self, begins: Tensor, ends: Tensor) -> None:
        self._ranges = begins, ends
        self._slices: dict[int, Slices] = {}

    def slices(self, origin: int = 0) -> Slices:
        """The same as slices, once for all layers, of positions that count from `origin`."""
        if origin not in self._slices:
            ranges = ((x[:, origin:] - origin).clamp(min=0) for x in self._ranges)
            self._slices[origin] = Slices.per_query(*ranges)
        return self._slices[origin]


def given_masks(mask: Any, seq_len: int, of: str = "", keeps_plain: bool = False) -> Any:
    """Masks from outside, a mask or a dict of them by layer type, as what tokens see.

    Args:
        mask: or masks.
        seq_len: tokens that ask.
        of: what an error names.
        keeps_plain: leave masks as they are to which the model added nothing: their layers know
            them by their pattern.

    Raises:
        ValueError: if they are dense, were made for a part of the batch, or do not show ranges.
    """
    if isinstance(mask, dict) and mask:
        return {
            name: given_masks(x, seq_len, f" for {name}", keeps_plain) for name, x in mask.items()
        }
    if is_pattern(mask):
        raise ValueError(
            f"an attention_mask that a model makes for each batch{of} cannot be read while the "
            "model is compiled; compile the sharded model alone"
        )
    if not isinstance(mask, ModelMask):
        what = tuple(mask.shape) if isinstance(mask, Tensor) else mask
        raise ValueError(
            f"attention_mask must be one tensor (B, S), got {what}{of}; if the model around this "
            'one made it, set its config.text_config._attn_implementation = "ring", so that it '
            "makes masks that a ring can read"
        )
    if mask.shape[1] != seq_len:
        raise ValueError(f"an attention_mask of {mask.shape[1]} tokens came with {seq_len} tokens")
    return mask if keeps_plain and not mask.pattern.is_extended else mask.given()


def padding_of(mask: Any) -> Tensor | None:
    """The attention mask `(B, S)` of a batch for which these masks were made."""
    masks = mask.values() if isinstance(mask, dict) else [mask]
    return next((x.padding for x in masks if isinstance(x, ModelMask)), None)


def largest(given: Any) -> Slices:
    """Of what `given_masks` returned, the slices that show most."""
    masks = given.values() if isinstance(given, dict) else [given]
    every = [x.slices() for x in masks]
    num_queries = max(int(table[:, 1].max(initial=0)) for x in every for table in x)
    return max(every, key=lambda x: visible_pairs(x, (0, num_queries)))


def is_given(mask: Any) -> bool:
    """Whether an attention mask was made by a model around the sharded one."""
    if isinstance(mask, (dict, ModelMask)) or is_pattern(mask):
        return True
    # A nested tensor has no shape to read.
    return isinstance(mask, Tensor) and not mask.is_nested and mask.ndim == 4
