"""What an indexer chooses: the positions of keys, and attention to the keys there."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from parallel_plans.huggingface.core.layer_inputs import KeyIndex, LayerInputs
from parallel_plans.huggingface.selecting.latents import attend_to_latents, has_latents


class Selection:
    """The keys that the tokens of this rank choose, as `topk` returns them to an indexer.

    They are chosen when attention needs them, as it knows what queries see. Layers that share the
    selection of an earlier layer get the same object.

    Args:
        index: queries, keys and weights of the index.
    """

    def __init__(self, index: KeyIndex) -> None:
        self._index: KeyIndex | None = index
        self._positions: Tensor | None = None

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
        """Return ascending positions in the whole sequence, `(B, L, k)`, int32; -1 for none."""
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
