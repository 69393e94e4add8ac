"""Context parallelism for PyTorch by annotation: ring attention over DTensors."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dtensor_ring.command.first import parse_first as _parse_first

_parse_first()  # in a process of `python -m dtensor_ring`: help need not wait for torch

from dtensor_ring.agreement.call_record import RingError
from dtensor_ring.balanced.balanced import Balanced
from dtensor_ring.compute.kernels import available_kernels, register_kernel
from dtensor_ring.decode.api import decode_attention
from dtensor_ring.decode.cache import ShardedCache
from dtensor_ring.dtensor.annotation import sequence_layout
from dtensor_ring.dtensor.attention import ring_attention
from dtensor_ring.dtensor.axis import SequenceAxis
from dtensor_ring.dtensor.document_room import DocumentRoom
from dtensor_ring.dtensor.exchange import exchange, relayout
from dtensor_ring.dtensor.flex.block_mask import slices_of_block_mask
from dtensor_ring.dtensor.gather import sequence_runs, sum_over_sequence
from dtensor_ring.dtensor.in_blocks import InBlocks
from dtensor_ring.dtensor.merge_attention import merge_attention
from dtensor_ring.dtensor.sequence import (
    next_token_labels,
    sequence_slices,
    shard_sequence,
    unshard_sequence,
)
from dtensor_ring.dtensor.style import ContextParallel
from dtensor_ring.handover.api import HandOver, hand_over
from dtensor_ring.paged.api import PagedBatch, PagedCache
from dtensor_ring.paged.block_pool import BlockPool
from dtensor_ring.paged.blocks import OutOfBlocks
from dtensor_ring.planning.layout import BlockCyclic, Contiguous, Striped, WholeBlocks, ZigZag
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.slices import Slices
from dtensor_ring.selected.api import select_keys, selected_attention
from dtensor_ring.selected.decode_calls import decode_select_keys, decode_selected_attention
from dtensor_ring.states.api import StateMap, exclusive_scan
from dtensor_ring.transport.transport import TransferPolicy, Transport

if TYPE_CHECKING:
    from dtensor_ring.lab.choose import choose_layout
    from dtensor_ring.lab.comparison import compare_strategies
    from dtensor_ring.lab.machine import Machine
    from dtensor_ring.lab.preference import prefer_measured
    from dtensor_ring.lab.schedule import compare_layouts, describe_schedule
    from dtensor_ring.lab.simulated_attention import simulate_attention
    from dtensor_ring.lab.training.longest import longest_sequences
    from dtensor_ring.lab.training.step import simulate_step

__version__ = "0.1.0"

__all__ = [
    "Balanced",
    "BlockCyclic",
    "BlockPool",
    "ContextParallel",
    "Contiguous",
    "DocumentRoom",
    "HandOver",
    "InBlocks",
    "Machine",
    "Mask",
    "OutOfBlocks",
    "PagedBatch",
    "PagedCache",
    "RingError",
    "SequenceAxis",
    "ShardedCache",
    "Slices",
    "StateMap",
    "Striped",
    "TransferPolicy",
    "Transport",
    "WholeBlocks",
    "ZigZag",
    "available_kernels",
    "choose_layout",
    "compare_layouts",
    "compare_strategies",
    "decode_attention",
    "decode_select_keys",
    "decode_selected_attention",
    "describe_schedule",
    "exchange",
    "exclusive_scan",
    "hand_over",
    "longest_sequences",
    "merge_attention",
    "next_token_labels",
    "prefer_measured",
    "register_kernel",
    "relayout",
    "ring_attention",
    "select_keys",
    "selected_attention",
    "sequence_layout",
    "sequence_runs",
    "sequence_slices",
    "shard_sequence",
    "simulate_attention",
    "simulate_step",
    "slices_of_block_mask",
    "sum_over_sequence",
    "unshard_sequence",
]

# Names of the laboratory and their modules, which are imported when a name is asked for.
_LABORATORY = {
    "Machine": "dtensor_ring.lab.machine",
    "choose_layout": "dtensor_ring.lab.choose",
    "compare_layouts": "dtensor_ring.lab.schedule",
    "compare_strategies": "dtensor_ring.lab.comparison",
    "describe_schedule": "dtensor_ring.lab.schedule",
    "longest_sequences": "dtensor_ring.lab.training.longest",
    "prefer_measured": "dtensor_ring.lab.preference",
    "simulate_attention": "dtensor_ring.lab.simulated_attention",
    "simulate_step": "dtensor_ring.lab.training.step",
}


def __getattr__(name: str) -> Any:
    if name not in _LABORATORY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LABORATORY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
