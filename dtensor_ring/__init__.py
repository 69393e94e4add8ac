"""Context parallelism for PyTorch by annotation: ring attention over DTensors."""

from dtensor_ring import flops as _flops  # noqa: F401 - registers the formulas
from dtensor_ring.annotation import sequence_layout
from dtensor_ring.attention import ring_attention
from dtensor_ring.balanced import Balanced
from dtensor_ring.kernels import available_kernels
from dtensor_ring.layout import Contiguous, Striped, ZigZag
from dtensor_ring.mask import Mask
from dtensor_ring.schedule import describe_schedule
from dtensor_ring.sdpa import set_sequence_layout
from dtensor_ring.sequence import sequence_runs, shard_sequence, unshard_sequence
from dtensor_ring.style import ContextParallel

__all__ = [
    "Balanced",
    "ContextParallel",
    "Contiguous",
    "Mask",
    "Striped",
    "ZigZag",
    "available_kernels",
    "describe_schedule",
    "ring_attention",
    "sequence_layout",
    "sequence_runs",
    "set_sequence_layout",
    "shard_sequence",
    "unshard_sequence",
]
