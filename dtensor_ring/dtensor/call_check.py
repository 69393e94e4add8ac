"""Checks the arguments of an attention, and that all ranks of a ring make the same call."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring.agreement.call_record import CallRecord
from dtensor_ring.agreement.checked_transport import checked_transport
from dtensor_ring.agreement.group_state import group_state_of
from dtensor_ring.all_to_all.ulysses import as_autocast
from dtensor_ring.compute.dropout import draw_seed
from dtensor_ring.compute.kernels import Scores, available_kernels, check_kernel
from dtensor_ring.dtensor.annotation import axis_group, group_of
from dtensor_ring.dtensor.choice import chosen
from dtensor_ring.dtensor.dispatch import local_call, ring_of_call
from dtensor_ring.dtensor.placement import SEQUENCE, local_of, placements_text
from dtensor_ring.ops.attention_record import attention_facts
from dtensor_ring.ops.checks import check_head_dims, check_inputs, check_strided
from dtensor_ring.ops.options import Batch, Call, default_scale
from dtensor_ring.ops.ring_op import ring_record
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import Strategy
from dtensor_ring.planning.tile import CAUSAL, FULL

SAME_CALL = "make the same call"

# The largest number of characters of a description that an error quotes.
MAX_QUOTED = 200


def validated(
    build: Callable[[], Call], query: Any, key: Any, value: Any, mesh: DeviceMesh | None
) -> Call:
    """Build the call of `ring_attention`, and compare its record with those of the other ranks.

    Raises:
        ValueError: on every rank, if records differ, or only some ranks raise; or here, if the call
            is being compiled.
    """
    if torch.compiler.is_compiling():
        raise ValueError("validate=True compares ranks in eager calls only; compile without it")
    if isinstance(query, DTensor):
        axes = [axis for axis, where in enumerate(query.placements) if where == Shard(SEQUENCE)]
        groups = [group_of(query.device_mesh, axis) for axis in axes]
    else:
        groups = [axis_group(mesh)] if mesh is not None else []
    try:
        call = build()
        record = _record(call, query, key, value)
    except Exception as error:
        # A sequence over several axes is an error, which the ranks of all these axes must raise.
        for group in groups:
            check_agreement(group, {"error": f"{type(error).__name__}: {error}"}, SAME_CALL)
        raise
    # First whether all ranks could build it: one that could not has no record to compare.
    for group in groups:
        check_agreement(group, {"error": "none"}, SAME_CALL)
        check_agreement(group, record, SAME_CALL)
    return call


def _record(call: Call, query: Any, key: Any, value: Any) -> dict[str, str]:
    """Describe a call as its op does, and what a rank without call records would not notice.

    Raises:
        ValueError: what the op would raise on this rank before it sends anything.
    """
    check_options(query, call)
    inputs, placements = (query, key, value, call.scores.sinks), "none"
    if isinstance(query, DTensor):
        ring = ring_of_call(query, key, value, call)
        call, placements = (
            local_call(call, query, key, value, ring),
            placements_text(ring.placements),
        )
        query, key, value = (local_of(x, ring) for x in (query, key, value))
    query, key, value = as_autocast(query, key, value)
    check_inputs(query, key, value, call.scores.sinks)
    call = chosen(call, query, value)
    request = call.request(len(query))
    # Shards have these lengths before an all-to-all, too.
    request._replace(strategy=Strategy(), block=None).plan(query, key)
    call.select(query, key, value, request.slices)
    facts = attention_facts("forward", query, value, call.scores, (query.shape[1], value.shape[1]))
    kernels = [name for name, missing in available_kernels().items() if missing is None]
    needs = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    more = {"placements": placements, "gradients": str(needs), "kernels": str(kernels)}
    return ring_record(facts, call.place.policy, call.place.machine, request).fields | more


def check_agreement(
    group: ProcessGroup, here: dict[str, str], what: str, told: Any = None
) -> list[Any]:
    """Compare descriptions, by name, over the ranks of a group.

    Args:
        group: the group of the ranks.
        here: what must be equal on all ranks.
        what: names the call in errors.
        told: what this rank tells the others beside it, which may differ; it is pickled.

    Returns:
        What each rank told, in the order of the ranks.

    Raises:
        ValueError: on every rank, if they differ; says which global ranks have which.
        RingError: on every rank, if some ranks make another call, or a rank ended.
    """
    with _checked_barrier(group, "a comparison", {}):
        pass  # raises if a rank is in another call, where the collective below would hang
    ranks = dist.get_process_group_ranks(group)
    everyone: list[Any] = [None] * group.size()
    with group_state_of(group).naming_cause():
        dist.all_gather_object(everyone, (here, told), group)
    differing = []
    # Names keep the order of the call; a rank may lack names that others have.
    for name in dict.fromkeys(name for theirs, _ in everyone for name in theirs):
        ranks_by_text: dict[str, list[int]] = {}
        for rank, (theirs, _) in zip(ranks, everyone, strict=True):
            ranks_by_text.setdefault(theirs.get(name, "none"), []).append(rank)
        if len(ranks_by_text) > 1:
            begin = _begin(list(ranks_by_text))
            sides = (f"{_part(text, begin)} on {ranks}" for text, ranks in ranks_by_text.items())
            differing.append(f"{name}: " + ", ".join(sides))
    if differing:
        listed = "; ".join(differing)
        raise ValueError(f"the ranks of a ring must {what}, they differ in {listed}")
    return [x for _, x in everyone]


@contextmanager
def checked_barrier(group: ProcessGroup, direction: str, here: dict[str, str]) -> Iterator[None]:
    """Return a context at whose end the ranks of a group compare descriptions.

    The comparison is checked like a call of the ring: if a rank is in an attention instead, or
    leaves the context with an error, no rank waits for it. A group without call records (NCCL,
    where gloo finds no network) only compares the descriptions, and ranks wait until the time limit
    of the group.

    Raises:
        RingError: on every rank, if ranks differ, or some raise.
        ValueError: on every rank, if ranks of a group without call records differ.
    """
    with _checked_barrier(group, direction, here):
        yield
    if group.size() > 1 and not group_state_of(group).sends_records:
        check_agreement(group, here, f"agree on {direction}")


def _checked_barrier(
    group: ProcessGroup, direction: str, here: dict[str, str]
) -> AbstractContextManager[Any]:
    """Return a context that compares call records at its end, if the group has them."""
    if group.size() == 1 or not group_state_of(group).sends_records:
        return nullcontext()
    record = CallRecord({"direction": direction} | here)
    # Send to all ranks, not only to the next, so that every rank detects a mismatch.
    return checked_transport(group, record, direction, torch.device("cpu"), first_bytes=0)


def _begin(texts: list[str]) -> int:
    """Return where a quote begins: at 0, unless the texts differ only far behind it."""
    # What the first and the last in alphabetical order share, all share.
    columns = enumerate(zip(min(texts), max(texts), strict=False))
    num_alike = next((i for i, (first, last) in columns if first != last), 0)
    # Long descriptions: quote the end of the common part, then the difference.
    return max(0, num_alike - MAX_QUOTED // 4) if num_alike > MAX_QUOTED // 2 else 0


def _part(text: str, begin: int) -> str:
    end = begin + MAX_QUOTED
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"


# Bounds of `scale` and `softcap`, unless tensors are float64.
SMALLEST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def mask_of(mask: Mask | None, slices: Slices | Tensor | None) -> Mask:
    """Return the given mask, or the default: causal without slices, full with them."""
    if mask is not None:
        return mask
    return CAUSAL if slices is None else FULL


def batch_of(
    cu_seqlens: Tensor | None,
    key_cu_seqlens: Tensor | None,
    runs: Tensor | None,
    slices: Slices | Tensor | None,
    key_runs: Tensor | None = None,
) -> Batch:
    """Collect the options that differ from batch to batch.

    Raises:
        TypeError: if slices are not a tensor while a compiler traces.
    """
    if isinstance(slices, Slices):
        if torch.compiler.is_compiling():
            raise TypeError(
                "slices must be a tensor in a compiled function, whose argument it is: make it "
                "outside, by sequence_slices(slices, num_slices)"
            )
        slices = torch.from_numpy(slices.numbers)  # shares memory: the cache looks it up by address
    return Batch(cu_seqlens, key_cu_seqlens, runs, slices, key_runs)


def as_flag(name: str, given: Any) -> bool:
    """Convert an argument of any type with a truth value to a bool.

    Raises:
        TypeError: if it has none, like a tensor of several elements; names the argument.
    """
    try:
        return bool(given)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be True or False, got {given!r}") from None


def check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Refuse arguments that are not tensors of four dims.

    Raises:
        TypeError: if one is not a tensor.
        ValueError: if one does not have four dims, or is nested, or queries are wider than keys.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_dims(name, x, 4, "(B, N, L, H)")
    check_head_dims(query, key, value)


def check_dims(name: str, x: Any, ndim: int, form: str) -> None:
    """Refuse what is not a tensor of these dims; `form` names them, such as `(B, N, L, H)`.

    Raises:
        TypeError: if it is not a tensor.
        ValueError: if it has other dims, or is nested.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor or a DTensor, got {type(x).__name__}")
    if x.is_nested:  # a nested tensor has no shape to read
        check_strided(name, x)
    if x.ndim != ndim:
        raise ValueError(f"{name} must be {form}, got shape {tuple(x.shape)}")


def scores_of(
    query: Tensor,
    mask: Mask,
    scale: float | None,
    softcap: float,
    sinks: Tensor | None,
    kernel: str | None,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> Scores:
    """Check the options of the scores and collect them; draw a seed if dropout has none.

    Raises:
        TypeError: if one has a wrong type.
        ValueError: if scores cannot be computed with one of the numbers.
    """
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a dtensor_ring.Mask, such as Mask.causal(), got {mask!r}")
    # Fast path: usual values take one comparison, all others are checked below.
    if type(softcap) is not float or (softcap and not SMALLEST <= softcap <= LARGEST):
        softcap = _softcap(softcap, query.dtype)
    if scale is None:
        scale = default_scale(query.shape[-1])
    elif type(scale) is not float or not SMALLEST <= abs(scale) <= LARGEST:
        scale = _number("scale", scale, query.dtype)
        # Kernels would round it to 0 anyway; as a known 0, they do not multiply -inf by it.
        scale = scale if abs(scale) >= _limits(query.dtype)[0] else 0.0
    if sinks is not None and not isinstance(sinks, Tensor):
        raise TypeError(
            f"sinks must be a tensor of one logit per query head, got {type(sinks).__name__}; "
            "use torch.tensor(sinks)"
        )
    if kernel is not None and type(kernel) is not str:
        check_kernel(kernel)  # the op would accept bytes as a name
    if not dropout_p:
        return Scores(mask, scale, softcap, sinks, kernel)
    dropout_p = _number("dropout_p", dropout_p, query.dtype)
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be at least 0 and less than 1, got {dropout_p}")
    seed = draw_seed(query.device) if dropout_seed is None else _seed(dropout_seed, query.device)
    return Scores(mask, scale, softcap, sinks, kernel, dropout_p, seed)


def _seed(given: Any, device: torch.device) -> Tensor:
    """Refuse a seed that is no plain int64 number on the device of the query, or on the CPU."""
    if not isinstance(given, Tensor) or isinstance(given, DTensor):
        raise TypeError(
            "dropout_seed must be a plain tensor, as torch.randint(2**62, (), device=device), got "
            f"{type(given).__name__}"
        )
    if given.ndim or given.dtype != torch.int64 or given.device.type not in ("cpu", device.type):
        raise ValueError(
            f"dropout_seed must be one int64 number, shape (), on {device}, got "
            f"{tuple(given.shape)} {given.dtype} on {given.device}"
        )
    return given


class Options(Protocol):
    """The options of a call of any op: integer tensors of the batch, and how queries score keys."""

    @property
    def batch(self) -> Any:
        """Tensors, by name, or `None`."""

    @property
    def scores(self) -> Scores:
        """How a query scores a key."""


def check_options(query: Tensor, call: Options) -> None:
    """Refuse tensors, besides query, key and value, of a kind that the op does not take.

    Raises:
        TypeError: if boundaries or runs are not plain tensors, or only sinks are a DTensor.
        ValueError: if one is not strided.
    """
    batch, sinks = call.batch, call.scores.sinks
    for name, x in zip(batch._fields, batch, strict=True):
        if x is None:
            continue
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            makers = {"runs": "sequence_runs(layout)", "slices": "sequence_slices(slices)"}
            makers |= {"key_runs": "ShardedCache.key_runs"}
            make = makers.get(name, "torch.tensor(x, dtype=torch.int32)")
            raise TypeError(f"{name} must be a plain tensor, as {make}, got {type(x).__name__}")
        check_strided(name, x)
    if sinks is None:
        return
    check_strided("sinks", sinks)
    if isinstance(sinks, DTensor) and not isinstance(query, DTensor):
        raise TypeError(
            "sinks beside plain query, key and value must be plain, too, got a DTensor; pass "
            "sinks.to_local()"
        )


def _softcap(given: Any, dtype: torch.dtype) -> float:
    softcap = None if given is None else _number("softcap", given, dtype)
    if softcap is None or softcap < 0 or 0 < softcap < _limits(dtype)[0]:
        raise ValueError(
            f"softcap must be 0 (none) or positive and finite, got {given}; scores are computed "
            f"in {_wide(dtype)}"
        )
    return softcap


def _number(name: str, given: Any, dtype: torch.dtype) -> float:
    """Convert a number to a float that scores can be computed with."""
    try:
        # `float()` would parse a string, and accept a vector of one element.
        if isinstance(given, (str, bytes, bytearray)) or getattr(given, "ndim", 0):
            raise TypeError
        number = float(given)
    except OverflowError:  # an integer beyond float64
        number = torch.inf
    except (TypeError, ValueError, RuntimeError):  # the latter of a tensor without content
        raise TypeError(f"{name} must be a number, got {given!r}") from None
    if not abs(number) <= _limits(dtype)[1]:
        raise ValueError(
            f"{name} must be finite in {_wide(dtype)}, in which scores are computed, got "
            f"{reprlib.repr(given)}"
        )
    return number


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which scores of tensors of a dtype are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    found = torch.finfo(_wide(dtype))
    return found.tiny, found.max
