"""Choose the strategies of a model's layers: one for all, or one per kind of attention."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dtensor_ring import Mask
from dtensor_ring.extension import check_strategy

# The suffix of `layer_types` in Hugging Face configs; kinds are named without it here.
SUFFIX = "_attention"

# What users give: a strategy, or strategies by kind, as in `{"sliding": "ring"}`.
StrategyChoice = str | Mapping[str, str] | None


@dataclass(frozen=True)
class Strategies:
    """The strategy of each layer, by its mask.

    Attributes:
        common: the strategy of all layers; `None` for the strategy of the axis.
        by_kind: strategies by kind of attention, which come before `common`.

    >>> strategies = Strategies.of({"sliding": "ring", "full_attention": "ulysses:4"})
    >>> strategies.named(Mask.causal()), strategies.named(Mask.sliding(7))
    ('ulysses:4', 'ring')
    """

    common: str | None = None
    by_kind: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, choice: StrategyChoice) -> Strategies:
        """Check and return the strategies that a user has given.

        Raises:
            TypeError: if a name is not a string.
            ValueError: if a strategy is unknown.
        """
        if choice is None:
            return cls()
        if not isinstance(choice, Mapping):
            check_strategy(choice)
            return cls(choice)
        for kind, strategy in choice.items():
            if not isinstance(kind, str):
                raise TypeError(f"strategy must be by names such as 'sliding', got {kind!r}")
            check_strategy(strategy)
        return cls(None, {kind.removesuffix(SUFFIX): x for kind, x in choice.items()})

    def check(self, masks: Collection[Mask], world_size: int | None = None) -> None:
        """Refuse kinds that no layer has.

        Args:
            masks: masks of the layers.
            world_size: ranks of the axis, if it is known.

        Raises:
            ValueError: if no layer has a given kind, or if groups of ranks do not divide the axis.
        """
        kinds = {kind_of(mask) for mask in masks}
        unknown = sorted(self.by_kind.keys() - kinds)
        if unknown:
            raise ValueError(
                f"strategy names kinds of attention, got {', '.join(unknown)}; the layers of this "
                f"model have {', '.join(sorted(kinds))}"
            )
        for strategy in self.by_kind.values() if world_size else ():
            check_strategy(strategy, world_size)

    def named(self, mask: Mask) -> str | None:
        """Return the strategy of a layer with that mask; `None` for the strategy of the axis."""
        return self.by_kind.get(kind_of(mask), self.common)


def kind_of(mask: Mask) -> str:
    """Return the name that configs use for attention with that mask."""
    if mask.chunk is not None:
        return "chunked"
    return "full" if mask.left is None else "sliding"
