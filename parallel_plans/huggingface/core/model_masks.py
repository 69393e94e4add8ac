"""Turns the masks that an outer model made into the keys that each token sees."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dtensor_ring import Slices
from dtensor_ring.extension import visible_pairs
from parallel_plans.huggingface.core import patterns

# Up to this many tokens, all pairs are checked: each query must see one range of keys.
FEW = 512

# With more tokens, this many keys are checked per query; the odd factor scatters them.
NUM_SAMPLES, SCATTER = 64, 40_503


class PrecomputedMask:
    """The range of keys that each position of a layer sees, `(B, S)`."""

    def __init__(self, begins: Tensor, ends: Tensor) -> None:
        self._ranges = begins, ends
        self._slices: dict[int, Slices] = {}

    def slices(self, origin: int = 0) -> Slices:
        """Return the ranges as slices of positions from `origin`, made once for all layers."""
        if origin not in self._slices:
            begins, ends = ((x[:, origin:] - origin).clamp(min=0) for x in self._ranges)
            self._slices[origin] = Slices.per_query(begins, ends)
        return self._slices[origin]


class ModelMask:
    """A mask as transformers composes it: a function of (batch, head, query, key), and padding.

    Queries are the new tokens, which follow `past` cached ones; keys are all tokens.

    This is not a tuple: fully_shard moves the tensors in a layer's tuples to the device.
    """

    def __init__(
        self,
        pattern: patterns.Pattern,
        function: patterns.MaskFunction,
        shape: tuple[int, int],
        padding: Tensor | None,
        past: int = 0,
    ) -> None:
        self.pattern, self.shape, self.padding = pattern, shape, padding
        self._function, self._past = function, past

    def __getitem__(self, index: Any) -> ModelMask:
        """Return the mask that a model cuts from this one."""
        return patterns.cut(self, index)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse a function of torch that takes this for a tensor.

        Raises:
            ValueError: saying that a layer does not attend by the ring.
        """
        name = getattr(func, "__name__", func)
        raise ValueError(
            f"a layer gave the mask of a model under a context_parallel_plan to {name}: it attends "
            "to this rank's tokens by itself, as a layer of another model does that was put in "
            "place after the plan; change layers before the plan, or set config."
            '_attn_implementation = "ring" of the layer'
        )

    def precompute(self) -> PrecomputedMask:
        """Return the keys that each token of the batch sees.

        Raises:
            ValueError: if a token sees more than one range of keys.
        """
        # One range of keys for each query is all that slices can say; `_check` proves that it is
        # one.
        begins, ends = self._edge(-1), self._edge(1) + 1
        self._check(begins, ends)
        # Cached tokens are not queries: their ranges are empty.
        begins, ends = (nn.functional.pad(x, (self._past, 0)) for x in (begins, ends))
        return PrecomputedMask(begins, ends)

    @property
    def _queries(self) -> Tensor:
        """Positions of the queries, `(T,)`."""
        device = None if self.padding is None else self.padding.device
        return torch.arange(self._past, self._past + self.shape[1], device=device)

    def _edge(self, step: int) -> Tensor:
        """Return the furthest key before (-1) or after (1) each query up to which it sees all."""
        # A query that does not see itself gets an edge that makes its range empty.
        query = self._queries.expand(self.shape)
        # Bisection: each query is checked about log2(length) times.
        near, far = torch.zeros_like(query), query if step < 0 else query[:, -1:] - query
        # All queries at once, as the model's function takes tensors of them.
        while (near < far).any():
            # Rounded up: `near` moves there, so it grows even if both are one apart.
            middle = (near + far + 1) // 2
            is_seen = self._sees(query + step * middle)
            near, far = torch.where(is_seen, middle, near), torch.where(is_seen, far, middle - 1)
        sees_itself = self._sees(query)
        return torch.where(sees_itself, query + step * near, query - int(step > 0))

    def _sees(self, key: Tensor, head: int = 0) -> Tensor:
        """Return whether each query sees its key in `key`, `(B, S)`."""
        query = self._queries.expand(self.shape)
        row = torch.arange(len(key), device=key.device).unsqueeze(1).expand_as(key)
        seen = self._function(row, torch.full_like(row, head), query, key)
        seen = torch.as_tensor(seen, device=key.device).expand(key.shape)
        return seen if self.padding is None else seen & self.padding.bool().gather(1, key)

    def _check(self, begins: Tensor, ends: Tensor) -> None:
        is_token = None if self.padding is None else self.padding[:, self._past :].bool()
        for keys in _samples(self._queries):
            key = keys.expand(begins.shape)
            # Ranges came from head 0; head 1 must agree, because all heads share the slices.
            wrong = self._sees(key, head=1) != ((begins <= key) & (key < ends))
            # Padding sees nothing here, whatever the mask says: nobody reads its outputs.
            if (wrong if is_token is None else wrong & is_token).any():
                raise ValueError(
                    "a mask that the model made for this batch shows some tokens keys that do not "
                    "follow one another; supported are masks in which each token sees one range"
                )


def _samples(query: Tensor) -> Iterator[Tensor]:
    """Yield one key per query at a time: all keys if they are few, else near and far ones."""
    num_tokens = int(query[-1]) + 1
    if num_tokens <= FEW:
        yield from ((query + distance) % num_tokens for distance in range(num_tokens))
        return
    # Windows and chunks end near powers of two, or multiples of their size.
    yield from ((query + 2**power) % num_tokens for power in range(num_tokens.bit_length()))
    # Distances differ between queries, so neighbours are checked at different ones.
    scattered = query * SCATTER
    for part in range(NUM_SAMPLES):
        yield (scattered + part * num_tokens // NUM_SAMPLES) % num_tokens


def mask_of(
    *,
    mask_function: patterns.MaskFunction | None = None,
    batch_size: int = 1,
    q_length: int = 0,
    attention_mask: Tensor | None = None,
    q_offset: int = 0,
    **kwargs: Any,
) -> patterns.Pattern | ModelMask:
    """Implement the mask interface named `ring`.

    A sharded model needs the pattern of a mask only. An outer model asks for masks of the whole
    batch, which may differ from batch to batch.
    """
    pattern = patterns.pattern_of(**kwargs)
    if mask_function is None or torch.compiler.is_compiling():
        return pattern  # a compiler cannot trace objects that hold functions
    return ModelMask(pattern, mask_function, (batch_size, q_length), attention_mask, q_offset)


# Names of transformers for layers with attention; layers with a state have others.
ATTENTIONS = ("full_attention", "sliding_attention", "chunked_attention")


def precomputed_masks(mask: Any, seq_len: int, of: str = "", keeps_plain: bool = False) -> Any:
    """Return what tokens see by a mask from outside, or by each mask of a dict by layer type.

    Args:
        mask: one mask, or a dict of masks.
        seq_len: number of queries.
        of: suffix that names the mask in errors.
        keeps_plain: return masks unchanged if the model added nothing to them: layers know these
            by their pattern.

    Raises:
        ValueError: if a mask is dense, was made for a part of the batch, or does not show ranges.
    """
    if isinstance(mask, dict) and mask:
        return {
            name: x
            if name not in ATTENTIONS and _is_padding(x)
            else precomputed_masks(x, seq_len, f" for {name}", keeps_plain)
            for name, x in mask.items()
        }
    if patterns.is_pattern(mask):
        raise ValueError(
            f"an attention_mask that a model makes for each batch{of} cannot be read while the "
            "model is compiled; compile the sharded model alone"
        )
    if not isinstance(mask, ModelMask):
        what = tuple(mask.shape) if isinstance(mask, Tensor) else mask
        raise ValueError(
            f"attention_mask must be one tensor (B, S), got {what}{of}; if an outer model made it, "
            'set config.text_config._attn_implementation = "ring" there, so that it makes masks '
            "that a ring can read"
        )
    if mask.shape[1] != seq_len:
        raise ValueError(f"an attention_mask of {mask.shape[1]} tokens came with {seq_len} tokens")
    return mask if keeps_plain and not mask.pattern.is_extended else mask.precompute()


def _is_padding(mask: Any) -> bool:
    """Return whether a mask is for layers with a state, which get the padding of their tokens."""
    return mask is None or (isinstance(mask, Tensor) and mask.ndim == 2)


def padding_of(mask: Any) -> Tensor | None:
    """Return the attention mask `(B, S)` of the batch for which these masks were made."""
    masks = mask.values() if isinstance(mask, dict) else [mask]
    return next((x.padding for x in masks if isinstance(x, ModelMask)), None)


def largest(precomputed: Any) -> Slices:
    """Return the slices with the most visible pairs among the results of `precomputed_masks`."""
    masks = precomputed.values() if isinstance(precomputed, dict) else [precomputed]
    every = [x.slices() for x in masks if not _is_padding(x)]
    num_queries = max(int(table[:, 1].max(initial=0)) for x in every for table in x)
    return max(every, key=lambda x: visible_pairs(x, (0, num_queries)))


def is_precomputed(mask: Any) -> bool:
    """Return whether an attention mask was made by an outer model."""
    if mask is None:
        return False
    if isinstance(mask, Tensor):  # the shape of a nested one cannot be read
        return not mask.is_nested and mask.ndim == 4
    return isinstance(mask, (dict, ModelMask)) or patterns.is_pattern(mask)
