"""The options of attentions, for type checkers and editors; `ring_attention` explains them.

Functions that hand options on take `**options: Unpack[...]` of one of these. An option that is left
out has the default of the function that takes it by name, which refuses an unknown one.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import TypedDict

from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.slices import Slices


class CommonOptions(TypedDict, total=False):
    """What queries see, and how scores become weights: options of every attention to all keys."""

    mask: Mask | None
    cu_seqlens: Tensor | None
    slices: Slices | Tensor | None
    key_runs: Tensor | None
    sinks: Tensor | None
    relative_bias: Tensor | None
    scale: float | None
    softcap: float


class _Sharded(CommonOptions, total=False):
    """Options of attentions whose queries are sharded."""

    key_cu_seqlens: Tensor | None
    runs: Tensor | None
    strategy: str | None
    dropout_p: float
    dropout_seed: Tensor | None


class RingOptions(_Sharded, total=False, closed=True):
    """Options of `ring_attention`; kernel and mesh are those of an axis elsewhere."""

    kernel: str | None
    mesh: DeviceMesh | None


class AttentionOptions(_Sharded, total=False, closed=True):
    """Options of `SequenceAxis.attention`."""

    seq_len: int | None


class DecodeOptions(CommonOptions, total=False, closed=True):
    """Options of `decode_attention`, which explains those that `ring_attention` lacks."""

    query_starts: Tensor | None
    kernel: str | None
    mesh: DeviceMesh | None
    merge: str | None
    agree: Tensor | None
