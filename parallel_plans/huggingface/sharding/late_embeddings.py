"""Embeddings of all tokens that no rank holds: they are looked up once a rank knows its tokens.

An outer model looks up the embeddings of a batch, puts those of images among them, and hands them
to its language model, which shards them: `(B, S, H)` on every rank, of which it keeps a part.
`LateEmbeddings` stands for them on this way. Two operations keep it late, `masked_scatter` of
features and `index_select` of tokens; any other gets the embeddings themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Embed = Callable[[Tensor], Tensor]


class Merge(NamedTuple):
    """Features that replace embeddings.

    Attributes:
        is_feature: which tokens they replace, `(B, S)`.
        features: one row for each of these tokens, in their order, `(T, H)`.
    """

    is_feature: Tensor
    features: Tensor

    def put(self, embeds: Tensor, tokens: Tensor) -> Tensor:
        """Return the embeddings `(B, L, H)` of some tokens of each row, with their features."""
        if not len(self.features):
            return embeds + self.features.sum()  # zero, and so is the gradient of what made them
        # Tokens that are features, 0 1 1 0 1, have the rows 0, 1 and 2: counted, -1 0 1 1 2.
        counted = self.is_feature.flatten().cumsum(0, dtype=torch.int32) - 1
        local = counted.view(self.is_feature.shape).index_select(1, tokens)
        rows = self.features.index_select(0, local.clamp_(min=0).flatten()).view(embeds.shape)
        # No boolean index: the host would wait for a GPU to count.
        return torch.where(self.is_feature.index_select(1, tokens).unsqueeze(-1), rows, embeds)


class LateEmbeddings(Tensor):
    """Stands for the embeddings of a batch, `(B, S, H)`, and has no memory.

    Attributes:
        embed: looks up the embeddings of ids.
        ids: the ids of all tokens, `(B, S)`.
        merges: features that replace embeddings, later ones over earlier ones.
        whole: the embeddings themselves, once an operation needed them.
    """

    embed: Embed
    ids: Tensor
    merges: tuple[Merge, ...]
    whole: Tensor | None

    @classmethod
    def of(cls, embed: Embed, ids: Tensor, like: Tensor, merges: tuple[Merge, ...] = ()) -> Any:
        """Return late embeddings of `ids`; `like` has their last dim, dtype and device."""
        shape = *ids.shape, like.shape[-1]
        late: Any = Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)
        late.embed, late.ids, late.merges, late.whole = embed, ids, merges, None
        return late

    @property
    def parts(self) -> dict[str, Tensor]:
        """What the embeddings are made of beside weights, by name: what ranks compare."""
        named = {"ids": self.ids}
        for i, merge in enumerate(self.merges):
            named |= {f"is_feature[{i}]": merge.is_feature, f"features[{i}]": merge.features}
        return named

    def looked_up(self, tokens: Tensor) -> Tensor:
        """Return the embeddings of the tokens at the indices `(L,)` of each row, `(B, L, H)`."""
        embeds = self.embed(self.ids.index_select(1, tokens))
        for merge in self.merges:
            embeds = merge.put(embeds, tokens)
        return embeds

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation late if that is possible, else on the embeddings themselves."""
        kwargs = kwargs or {}
        if func in METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        run = LATE.get(func)
        result = NotImplemented if run is None or kwargs else run(*args)
        if result is not NotImplemented:
            return result
        args, kwargs = tree_map_only(LateEmbeddings, _made, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, *others: Any) -> Any:  # pyrefly: ignore[bad-override]
        """Refuse an operation that went around `__torch_function__`: there is no memory to read.

        Raises:
            RuntimeError: naming it.
        """
        raise RuntimeError(f"{func} got embeddings that are not looked up yet, which no op takes")


def _made(late: LateEmbeddings) -> Tensor:
    """Return the embeddings themselves; an operation in place changes them for all that follow."""
    if late.whole is None:
        late.whole = late.looked_up(torch.arange(late.ids.shape[1], device=late.ids.device))
    return late.whole


def _is_late(x: Any) -> bool:
    return isinstance(x, LateEmbeddings) and x.whole is None


def _select(x: Any, dim: int, index: Tensor) -> Any:
    """Do `x.index_select(dim, index)`: these tokens are all that a rank looks up."""
    return x.looked_up(index) if _is_late(x) and dim == 1 else NotImplemented


def _scatter(x: Any, mask: Any, source: Any) -> Any:
    """Do `x.masked_scatter(mask, source)`, where the mask chooses whole tokens."""
    if not _is_late(x) or mask.ndim != 3 or source.dtype != x.dtype:
        return NotImplemented
    *of_tokens, width = x.shape
    # A mask that was expanded over features has no stride there: it chooses whole tokens.
    is_of_tokens = mask.shape[2] == 1 or mask.stride(2) == 0
    if not is_of_tokens or [*mask.shape[:2]] != of_tokens or source.numel() % width:
        return NotImplemented
    merge = Merge(mask[..., 0], source.reshape(-1, width))
    # PyTorch's own error, before ranks take their tokens: else only some of them would raise it.
    if not mask.is_cuda and int(merge.is_feature.sum()) > len(merge.features):
        return NotImplemented
    return LateEmbeddings.of(x.embed, x.ids, x, (*x.merges, merge))


def _expand_as(x: Tensor, other: Tensor) -> Any:
    """Do `x.expand_as(other)`, which reads the shape of `other` only."""
    return NotImplemented if isinstance(x, LateEmbeddings) else x.expand(other.shape)


def _to(x: Any, other: Any) -> Any:
    """Do `x.to(other)`, where `x` is on that device, or `other` is late."""
    if _is_late(x):
        return x if isinstance(other, torch.device) and other == x.device else NotImplemented
    return x.to(other.device, other.dtype) if isinstance(other, LateEmbeddings) else NotImplemented


LATE: dict[Any, Callable[..., Any]] = {
    Tensor.index_select: _select,
    Tensor.masked_scatter: _scatter,
    Tensor.expand_as: _expand_as,
    Tensor.to: _to,
}
_ATTRIBUTES = (
    *("shape", "dtype", "device", "layout", "ndim", "requires_grad", "itemsize", "nbytes"),
    *("is_meta", "is_cpu", "is_cuda", "is_nested", "is_quantized", "is_sparse"),
)
METADATA = (
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.element_size),
    *(Tensor.is_floating_point, Tensor.is_complex),
)
"""What no value is needed for."""


def late_or_now(embedding: Any, embed: Embed, ids: Tensor) -> Tensor:
    """Return the embeddings of the tokens of a batch, `(B, S)`: late ones where they may be late.

    Hooks may change what a module returns, or free its weight after it: then it is needed now.
    """
    weight: Any = getattr(embedding, "weight", None)
    has_hooks = embedding._forward_hooks or embedding._forward_pre_hooks
    is_plain = not has_hooks and not hasattr(embedding, "_hf_hook")  # accelerate's
    is_plain = is_plain and type(ids) is Tensor and type(weight) in (Tensor, nn.Parameter)
    if not is_plain or not ids.numel():
        return embed(ids)
    # All ranks refuse a wrong id, not only the one that has the token.
    if not ids.is_cuda and not _are_in_range(ids, len(weight)):
        return embed(ids)
    # One token tells width and dtype of what the embedding returns.
    with torch.no_grad():
        one = embed(ids[:1, :1])
    return LateEmbeddings.of(embed, ids, one)


def _are_in_range(ids: Tensor, count: int) -> bool:
    """Return whether an embedding has a row for each id."""
    least, most = ids.aminmax()
    return int(least) >= 0 and int(most) < count
