"""What an indexer chooses: the positions of keys, and attention to the keys or latents there.

Keys and values of a head are products of one latent per token: `key = W_k @ latent`, and
`value = W_v @ latent`. As `query @ (W_k @ latent) = (W_k.T @ query) @ latent`, heads may attend to
the latents themselves (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). Then one head of latents
travels, and a query that chooses k keys reads k latents.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from parallel_plans.huggingface.core.key_index import KeyIndex
from parallel_plans.huggingface.core.layer_inputs import LayerInputs

# The method that expands the latents of all tokens, and what attention needs beside it.
EXPAND = "expand_kv"
NEEDED = (EXPAND, "kv_b_proj", "kv_lora_rank", "qk_nope_head_dim")


def keep_latents(layers: list[nn.Module]) -> None:
    """Make these attention modules pass their latents to attention as keys, if they have any."""
    for module in layers:
        if all(hasattr(module, name) for name in NEEDED):
            setattr(module, EXPAND, MethodType(_unexpanded, module))


def has_latents(module: nn.Module) -> bool:
    """Return whether a module passes latents to attention."""
    return EXPAND in vars(module)


def _unexpanded(self: nn.Module, latent: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
    """Return latents with their rotary part `(B, 1, C, rank + rotary)`, as key and value."""
    whole = torch.cat([latent, rotary], -1)
    return whole, whole


def attend_to_latents(
    module: Any,
    states: tuple[Tensor, Tensor],
    chosen: Tensor,
    inputs: LayerInputs,
    scores: dict[str, Any],
) -> Tensor:
    """Return attention of queries to the latents that they choose, `(B, N, L, value dim)`.

    Args:
        module: the attention module.
        states: queries `(B, N, L, H)`, and latents `(B, 1, C, rank + rotary)`.
        chosen: positions, `(B, L, k)`.
        inputs: which queries and keys the ranks have.
        scores: scale and sinks.
    """
    (query, latents), rank = states, module.kv_lora_rank
    # What the projection makes of unit vectors is its weight, also with adapters or quantised.
    units = torch.eye(rank, dtype=latents.dtype, device=latents.device)
    weight = module.kv_b_proj(units).view(rank, query.shape[1], -1)
    of_keys, of_values = weight.tensor_split([module.qk_nope_head_dim], -1)
    plain, rotary = query.tensor_split([module.qk_nope_head_dim], -1)
    # The projection of keys moves to the queries, so that no key is expanded.
    absorbed = torch.cat([torch.einsum("bnlh,rnh->bnlr", plain, of_keys), rotary], -1)
    out = inputs.attend_selected(absorbed, latents, rank, chosen, **scores)
    # Values are a linear map of latents, so it applies to their weighted sum.
    return torch.einsum("bnlr,rnh->bnlh", out, of_values)


class Selection:
    """The keys that the tokens of this rank choose, as `topk` returns them to an indexer.

    They are chosen when attention needs them, as it knows what queries see. Layers that share the
    selection of an earlier layer get the same object.

    Args:
        index: queries, keys and weights of the index.

    Attributes:
        of_pools: whether it chooses pools, among those that end before a query in its row.
    """

    def __init__(self, index: KeyIndex) -> None:
        self._index: KeyIndex | None = index
        self._positions: Tensor | None = None
        self.of_pools = index.pools is not None

    @property
    def indices(self) -> Selection:
        """The selection itself, where an indexer reads the indices of its best scores."""
        return self

    def __getattr__(self, name: str) -> Any:
        """Refuse a layer that reads more of a selection.

        Raises:
            ValueError: for any name but those of Python's protocols.
        """
        if name.startswith("__"):
            raise AttributeError(name)
        raise ValueError(
            f"a layer reads {name} of what its indexer chooses, which a plan only passes on to "
            "attention, as indices; it has no context-parallel plan"
        )

    def to(self, *_: Any) -> Selection:
        """Return the selection itself: positions are int32."""
        return self

    def positions(self, inputs: LayerInputs, seen: dict[str, Any]) -> Tensor:
        """Return ascending positions in the whole sequence, see `LayerInputs.select`."""
        if self._positions is None:
            assert self._index is not None
            self._positions = inputs.select(self._index, **seen)
            self._index = None  # frees queries and keys
        return self._positions

    def attend(
        self,
        module: nn.Module,
        states: tuple[Tensor, Tensor, Tensor],
        inputs: LayerInputs,
        seen: dict[str, Any],
        scores: dict[str, Any],
    ) -> Tensor:
        """Return attention of each query to the keys that it chooses, `(B, N, L, H)`.

        Args:
            module: the attention module.
            states: its query, key and value.
            inputs: which queries and keys the ranks have.
            seen: what queries see, see `LayerInputs.attend`.
            scores: scale and sinks.
        """
        chosen = self.positions(inputs, seen)
        if has_latents(module):
            return attend_to_latents(module, states[:2], chosen, inputs, scores)
        return inputs.attend_selected(*states, chosen, **scores)
