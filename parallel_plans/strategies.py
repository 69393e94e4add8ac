"""Strategies of a model's layers: one for all of them, or one for each kind of attention."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dtensor_ring import Mask
from dtensor_ring.extension import check_strategy

SUFFIX = "_attention"
"""With which the `layer_types` of Hugging Face configs end; here they are named without it."""

Given = str | Mapping[str, str] | None
"""As users say it: a strategy, or strategies by kind, as in `{"sliding": "ring"}`."""


@dataclass(frozen=True)
class Strategies:
    """The strategy of each layer, by its mask.

    >>> strategies = Strategies.of({"sliding": "ring", "full_attention": "ulysses:4"})
    >>> strategies.named(Mask.causal()), strategies.named(Mask.sliding(7))
    ('ulysses:4', 'ring')
    """

    common: str | None = None
    by_kind: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Given) -> Strategies:
        """What a user has said.

        Raises:
            TypeError: if a name is not a string.
            ValueError: if a strategy is unknown.
        """
        if given is None:
            return cls()
        if not isinstance(given, Mapping):
            check_strategy(given)
            return cls(given)
        for kind, strategy in given.items():
            if not isinstance(kind, str):
                raise TypeError(f"strategy must be by names such as 'sliding', got {kind!r}")
            check_strategy(strategy)
        return cls(None, {kind.removesuffix(SUFFIX): x for kind, x in given.items()})

    def check(self, masks: Collection[Mask], world_size: int | None = None) -> None:
        """Refuse kinds that no layer has.

        Args:
            masks: of the layers.
            world_size: ranks of the axis, if it is known.

        Raises:
            ValueError: naming those that there are; or if groups of ranks do not divide the axis.
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
        """The strategy of a layer with that mask; `None` if it is as the axis says."""
        return self.by_kind.get(kind_of(mask), self.common)


def kind_of(mask: Mask) -> str:
    """What configs call attention with that mask."""
    if mask.chunk is not None:
        return "chunked"
    return "full" if mask.left is None else "sliding"
