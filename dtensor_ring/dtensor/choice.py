"""Chooses the strategy of a call that has "auto": the fastest one on the machine of its axis.

Lengths are rounded up to three significant bits, in half parts of a rank, so sequences of any
length need a few simulations. Eager calls know documents on the CPU. They count by their mean
length over tokens, to a power of two: documents of many lengths with that mean are simulated, see
`typical_boundaries`, so the next batch seldom needs another simulation. Slices count as a full or
causal mask or a window, by the mean number of keys that a query sees. In a graph neither has
values: documents count as one, slices as their mask, and lengths as those that were traced. So a
graph serves all documents, and it costs nothing.
"""

from __future__ import annotations

import logging
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring.balanced.work import visible_pairs
from dtensor_ring.dtensor.annotation import Annotation, annotation_of
from dtensor_ring.dtensor.laboratory import fastest_strategy, preset_names, read_machine
from dtensor_ring.ops.nodes import autocast_dtype, is_traced
from dtensor_ring.ops.options import Call, Place, group_named
from dtensor_ring.planning.lru import cached_bytes
from dtensor_ring.planning.mask import Documents, Mask
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import AUTO, Strategy

try:
    from torch.fx.experimental.symbolic_shapes import optimization_hint
except ImportError:  # torch 2.11 has another name for it
    from torch.fx.experimental.symbolic_shapes import size_hint as optimization_hint  # pyrefly: ignore[missing-module-attribute]

if TYPE_CHECKING:
    from dtensor_ring.dtensor.laboratory import Machine

_LOG = logging.getLogger("dtensor_ring")

# A document is at least the part of a rank over this; shorter ones send next to nothing.
MAX_DOCUMENTS = 16

# Lengths of documents, in percent of the mean of an exponential distribution, mixed; and the mean
# over their tokens, of the squares over the sum.
QUANTILES = (58, 277, 21, 116, 6, 167, 37, 83)
MEAN_TOKEN = 170

# The most choices that are kept for an axis; a model has a few.
MAX_CHOICES = 4096

# The layout that stands for one that belongs to a batch.
STAND_IN: str = "zigzag"


class CallSizes(NamedTuple):
    """The sizes that a choice depends on.

    Attributes:
        seq_len: the global length, in tokens; of queries or keys, whichever is longer.
        heads: query heads of this rank.
        key_heads: key and value heads of this rank.
        head_dim: mean of the head dims of keys and values.
        batch: rows of this rank.
    """

    seq_len: int
    heads: int
    key_heads: int
    head_dim: int
    batch: int


# Note [What a choice depends on]: the mask, the global length, heads, head dim, batch and dtype of
# this rank's tensors, a named kernel, layout, policy and size of the axis, and its machine. All of
# them are equal on the ranks of an axis, so all choose alike; call records have the machine.
# Whether gradients are enabled does not matter: forward and backward count together.
def chosen(call: Call, query: Tensor, value: Tensor) -> Call:
    """Return the call with a strategy in place of "auto", see Note [What a choice depends on].

    Attention of new tokens to keys that are elsewhere (`key_runs`) is a ring, and so is a compiled
    call with `runs`, as no compiler knows how many tokens an all-to-all would yield.

    Args:
        call: a call on local tensors.
        query: `(B, N, L, H)`, this rank's.
        value: `(B, Nkv, C, Hv)`.
    """
    place: Any = call.place
    if place.strategy != AUTO:
        return call
    is_compiling = is_traced(query)
    has_key_runs = place.seq_len is None or call.batch.key_runs is not None
    if has_key_runs or (is_compiling and call.batch.runs is not None):
        return call._replace(place=place._replace(strategy=Strategy.default))
    batch, num_heads, _, head_dim = query.shape
    _, num_key_heads, _, value_head_dim = value.shape
    seq_len = max(place.seq_len, place.key_seq_len)
    # Flops and bytes grow with the sum of both head dims, so their mean may stand for each.
    sizes = seq_len, num_heads, num_key_heads, (head_dim + value_head_dim) // 2, batch
    document, bounds = None, _numbers(call.scores.mask)
    if is_compiling:  # symbols stand for what was traced first
        bounds, sizes = _traced(bounds), _traced(sizes)
    else:
        document, bounds = _seen(call, batch, bounds)
    device = query.device.type
    dtype = autocast_dtype(device) or query.dtype
    asked = place.layout, device, dtype, call.scores.kernel, document, bounds, sizes
    choose = _constant if is_compiling else choice_of
    spec, machine = choose(place.group_name, asked)
    # A constructor takes a third of the time of `_replace`.
    chosen_place = Place(
        place.layout,
        spec,
        place.seq_len,
        place.key_seq_len,
        place.group_name,
        place.policy,
        machine,
    )
    return Call(call.batch, call.scores, chosen_place)


def _constant(group_name: str, asked: tuple[Any, ...]) -> tuple[str, str]:
    return spec_of(group_name, asked), label_of(group_name, asked)


def spec_of(group_name: str, asked: tuple[Any, ...]) -> str:
    """Return the strategy of `choice_of`."""
    return choice_of(group_name, asked)[0]


def label_of(group_name: str, asked: tuple[Any, ...]) -> str:
    """Return the machine of `choice_of`."""
    return choice_of(group_name, asked)[1]


# Constant while the group is alive, see `ulysses_heads`.
for _function in (spec_of, label_of):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def choice_of(group_name: str, asked: tuple[Any, ...]) -> tuple[str, str]:
    """Return the spec of a strategy, and the label of the machine that chose it.

    Args:
        group_name: of the axis.
        asked: the layout, the type of the device, the dtype, the named kernel, the length of
            documents, the numbers of a mask, and those of `CallSizes`.
    """
    here = annotation_of(group_named(group_name))
    # An axis has one configuration but for a default, which a first `SequenceAxis` may replace.
    config, known = here.choices
    if config is not here.config or len(known) > MAX_CHOICES:
        known = {}
        here.choices = here.config, known
    chosen = known.get(asked)
    if chosen is None:
        layout, device, dtype, kernel, document, (left, right, chunk, prefix), sizes = asked
        mask, sizes = Mask(left, right, chunk, prefix), CallSizes._make(sizes)
        machine = machine_of(here, device)
        spec = _choose(here, machine, layout, dtype, kernel, document, mask, sizes)
        chosen = known[asked] = spec, machine.label
        if dist.get_rank() == here.ranks[0]:
            _LOG.info('"auto" takes %s on %s for %s, %s', spec, machine.name, mask, sizes)
    return chosen


def _choose(
    here: Annotation,
    machine: Machine,
    layout: str,
    dtype: torch.dtype,
    kernel: str | None,
    document: int | None,
    mask: Mask,
    sizes: CallSizes,
) -> str:
    world_size = len(here.ranks)
    # Heads that do not divide are refused later, by the op.
    if world_size == 1 or not all(sizes) or sizes.heads % sizes.key_heads:
        return Strategy.default
    # Each length is a simulation: batches of nearly one length share theirs.
    seq_len = rounded(sizes.seq_len, world_size)
    return fastest_strategy(
        mask,
        seq_len,
        world_size,
        (sizes.heads, sizes.key_heads),
        sizes.head_dim,
        typical_boundaries(document, seq_len, world_size),
        layout=STAND_IN if as_layout(layout).per_batch else layout,
        batch=sizes.batch,
        dtype=machine.dtype_like(str(dtype).removeprefix("torch.")),
        policy=here.config_or_default.policy,
        # A machine need not know the speed of each kernel; its first one then stands for it.
        kernel=kernel if kernel in {x.kernel for x in machine.kernels} else None,
        machine=machine,
    )


def rounded(seq_len: int, world_size: int) -> int:
    """Round a length up, so that half the part of a rank has three significant bits.

    >>> [rounded(n, 4) for n in (8, 64, 1000, 4097, 65536)]
    [8, 64, 1024, 5120, 65536]
    """
    parts = 2 * world_size
    half = -(-seq_len // parts)
    step = 1 << max(0, half.bit_length() - 3)
    return -(-half // step) * step * parts


def typical_boundaries(
    document: int | None, seq_len: int, world_size: int
) -> tuple[int, ...] | None:
    """Return the boundaries of documents of which the mean token is in one of that length.

    Their lengths are the quantiles of an exponential distribution. Documents of one length would
    often end where shards end, and a ring would have nothing to send.

    Args:
        document: the length; `None` for a single document.
        seq_len: global length, in tokens.
        world_size: ranks of the axis.

    Returns:
        `None` for a single document.

    >>> typical_boundaries(1024, 4096, 2)
    (0, 349, 2017, 2143, 2841, 2877, 3882, 4096)
    """
    if document is None or document >= seq_len:
        return None
    mean = max(document, seq_len // (MAX_DOCUMENTS * world_size))
    ends, end = [0], 0
    for percent in cycle(QUANTILES):
        end += max(1, percent * mean // MEAN_TOKEN)
        if end >= seq_len:
            return *ends, seq_len
        ends.append(end)


def _numbers(mask: Mask) -> tuple[int | None, ...]:
    """Return the fields of a mask."""
    return mask.left, mask.right, mask.chunk, mask.prefix


def _traced(numbers: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the numbers that a compiler traces, without a guard on symbols."""
    return tuple([None if x is None else optimization_hint(x) for x in numbers])


def _seen(call: Call, batch: int, bounds: tuple[Any, ...]) -> tuple[int | None, tuple[Any, ...]]:
    """Return the typical document of an eager call, and the numbers of its mask."""
    given: Any = call.batch
    if _has_values(given.slices):
        slices: Any = call.slices(batch)
        return None, _mask_like(slices, max(call.place.seq_len or 0, 1))
    if _has_values(given.cu_seqlens):
        documents, _ = call.documents(batch)
        assert documents is not None, "there are boundaries"
        return typical_length(documents) or None, bounds
    return None, bounds


def _has_values(x: Tensor | None) -> bool:
    """Return whether the values of a tensor can be read without waiting for a device."""
    return type(x) is Tensor and x.device.type == "cpu"


@cached_bytes(max_bytes=1 << 20, num_bytes=lambda _: 200)
def typical_length(documents: Documents) -> int:
    """Return the mean length over the tokens of documents, to a power of two; 0 without tokens.

    >>> typical_length(Documents([(0, 4096, 4100, 8000)]))
    4096
    """
    lengths = np.concatenate([np.diff(row) for row in documents.arrays] or [np.empty(0, np.int64)])
    num_tokens = int(lengths.sum())
    if not num_tokens:
        return 0
    mean = int((lengths * lengths).sum()) // num_tokens
    # A power of two, the upper one from 4/3 of the lower: batches alike share a choice.
    return 1 << ((3 * mean // 2).bit_length() - 1)


@cached_bytes(max_bytes=1 << 20, num_bytes=lambda _: 200)
def _mask_like(slices: Slices, seq_len: int) -> tuple[int | None, ...]:
    """Return the numbers of a mask under which queries see about as many keys."""
    mean = visible_pairs(slices, (0, seq_len)) // (len(slices) * seq_len)
    if mean > 3 * seq_len // 4:
        return _numbers(Mask.full())
    if mean > seq_len // 4:
        return _numbers(Mask.causal())
    return _numbers(Mask.sliding((1 << (3 * mean // 2).bit_length()) >> 1))


# The data sheet for devices that have none here, such as CPUs.
DEFAULT_MACHINE: str = "h100"


def machine_of(here: Annotation, device: str) -> Machine:
    """Return the machine of an axis; without one, the data sheet of its device, which is logged.

    Args:
        here: the record of the axis.
        device: type of the device, such as "cuda".
    """
    config = here.config
    if config is not None and config.machine is not None:
        return config.machine
    data_sheet = here.machines.get("")
    if data_sheet is None:
        data_sheet = here.machines[""] = data_sheet_of(device)
        if dist.get_rank() == here.ranks[0]:
            _LOG.warning(
                'strategy "auto" goes by the data sheet of %s; measure this machine by python -m '
                "dtensor_ring calibrate machine.json, and pass machine=",
                data_sheet.name,
            )
    return data_sheet


def data_sheet_of(device: str) -> Machine:
    """Return the preset for a type of device, by the name that PyTorch has for it.

    >>> data_sheet_of("cpu").name
    'h100'
    """
    name = device_name(device).lower()
    return read_machine(next((x for x in preset_names() if x in name), DEFAULT_MACHINE))


def device_name(device: str) -> str:
    """Return the name that PyTorch has for the current device of a type, "" for CPUs."""
    if device in ("cpu", "meta"):
        return ""
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return "" if named is None else named()
