"""The band of lags that a query sees."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mask:
    """How far back (`left`) and ahead (`right`) of itself a query sees, in tokens.

    Query position q sees key position k if and only if `-right <= q - k <= left`; `None` is
    unbounded. The numbers mean what flash-attn's `window_size` means, where -1 is our `None`.

    >>> Mask.sliding(2).sees(5, 3), Mask.sliding(2).sees(5, 2), Mask.causal().sees(5, 6)
    (True, False, False)

    Raises:
        ValueError: if a bound is negative.
        TypeError: if a bound is neither an int nor None.
    """

    left: int | None
    right: int | None

    def __post_init__(self) -> None:
        for side, bound in (("left", self.left), ("right", self.right)):
            if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
                raise TypeError(f"Mask {side} is an int or None, got {type(bound).__name__}")
            if bound is not None and bound < 0:
                raise ValueError(
                    f"Mask {side} counts tokens and is not negative, got {bound}; "
                    "None means unbounded"
                )

    @classmethod
    def causal(cls) -> Mask:
        """Each query sees itself and everything before it."""
        return cls(None, 0)

    @classmethod
    def full(cls) -> Mask:
        """Each query sees everything."""
        return cls(None, None)

    @classmethod
    def sliding(cls, window: int) -> Mask:
        """Each query sees itself and the `window` tokens before it (lags 0 to `window`).

        A Hugging Face `sliding_window` of w counts the query itself: it is `sliding(w - 1)`.
        """
        return cls(window, 0)

    @classmethod
    def local(cls, left: int | None, right: int | None) -> Mask:
        """Each query sees `left` tokens before itself and `right` after."""
        return cls(left, right)

    def sees(self, query: int, key: int) -> bool:
        """Whether the query at one position sees the key at another."""
        lag = query - key
        return (self.left is None or lag <= self.left) and (
            self.right is None or -lag <= self.right
        )
