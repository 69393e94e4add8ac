"""What a launch over segments leaves to do around the kernels of variable length.

Note [Segments without keys or without rows]: the code of all four kernels provides for both, but
each in its own way. Read there:

- Rows without keys, forward: flash attention 2, in flash-attn and in PyTorch, writes out 0 and lse
  +inf, flash attention 3 out 0 and lse -inf. Flash attention 4 masks a whole block: lse -inf, and
  out 0 times the values of whatever segment lies before, which is NaN if those are not finite.
  `clear_blind_rows` writes (0, -inf) after all of them, and launches nothing if no row is blind.
- Rows without keys, backward: no block of keys reads them. All of them clear the sum of the
  gradient of queries in the launch before, which goes over queries only. That one looks at lse in
  flash attention 3 and 4, which take -inf for 0; flash attention 2 reads lse beside keys only. So
  the -inf of such rows meets no other number.
- Keys without rows, backward: a block that no row sees writes zeros to its gradients, or adds
  nothing to zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dtensor_ring.segments import Segments


def clear_blind_rows(out: Tensor, lse: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """`out` `(T, N, Hv)` and `lse` `(N, T)`, of which rows without keys become (0, -inf)."""
    if segments.has_blind_rows:
        rows, cols = segments.boundaries(out.device)
        blind = (cols.diff() == 0).repeat_interleave(rows.diff(), output_size=out.shape[0])
        out.masked_fill_(blind.view(-1, 1, 1), 0)
        lse.masked_fill_(blind, -torch.inf)
    return out, lse


def longest(segments: Segments) -> tuple[int, int]:
    """Rows and columns of the longest segment, at least 2 rows.

    For a longest of one row, flash attention 2 folds the heads of grouped-query into rows, and
    takes for granted that no segment is without rows.
    """
    return max(2, segments.max_rows), segments.max_cols


def lengths(segments: Segments, device: torch.device) -> dict[str, object]:
    """As flash attention 3 and 4 call them."""
    rows, cols = segments.boundaries(device)
    max_rows, max_cols = longest(segments)
    return {
        "cu_seqlens_q": rows,
        "cu_seqlens_k": cols,
        "max_seqlen_q": max_rows,
        "max_seqlen_k": max_cols,
    }
