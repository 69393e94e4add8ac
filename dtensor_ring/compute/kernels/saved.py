"""Outputs of the forward pass and their gradients, for backward."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dtensor_ring.compute.memory import Region, part_of


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """Outputs and their gradients of some rows, over all keys of the ring, not only a launch's.

    Attributes:
        grad_out: gradient of `out`.
        out: the attention's output `(B, N, R, Hv)`.
        lse: log-sum-exp of the scores of each row `(B, N, R)`, float32 or wider.
        grad_lse: gradient of `lse`, and of its shape; `None` where nothing uses `lse`.
    """

    grad_out: Tensor
    out: Tensor
    lse: Tensor
    grad_lse: Tensor | None = None

    def at(self, rows: Region) -> Saved:
        """The same of a region of the rows, as views."""
        grad_out, out, lse = (part_of(x, rows) for x in (self.grad_out, self.out, self.lse))
        grad_lse = None if self.grad_lse is None else part_of(self.grad_lse, rows)
        return Saved(grad_out, out, lse, grad_lse)
