"""The transport of messages: its protocol, buffer pool and policy, and the process group's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from threading import Lock
from typing import Any, NamedTuple, Protocol, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring.compute.capture import RUN_ONCE, is_capturing, refuse_capture
from dtensor_ring.compute.memory import wide_of
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.ranges import as_count
from dtensor_ring.quantised.block_scales import FORMATS

# The buffers of a backward pass. Around the ring: two for shards, two for sums of gradients, and
# one for a sum that returns to its owner. On the direct route: three for shards, two for sums.
MAX_SPARES = 5


class BufferPool:
    """Keeps the last few CPU buffers that were given back.

    New memory costs a page fault every 4 KiB, which on a CPU is more than all other costs that a
    ring adds to its kernels. The allocators of other devices keep memory themselves. At most
    `MAX_SPARES` buffers are kept, each as large as a key and value shard, or its gradients.
    """

    def __init__(self) -> None:
        self._spares: list[Tensor] = []
        self._sizes: list[int] = []  # of the spares: to ask a tensor costs the host time
        self._lock = Lock()  # backward may run in a thread of its own

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return a buffer of at least `num_bytes` bytes; its content is undefined."""
        if device.type == "cpu":
            with self._lock:
                sizes, size = self._sizes, num_bytes
                if size not in sizes:  # most calls ask for a size that was given back
                    # The smallest that fits: larger ones stay for larger messages.
                    size = min([x for x in sizes if x >= num_bytes], default=-1)
                if size >= 0:
                    # The last one given back: processor caches and callers know it best.
                    number = len(sizes) - 1 - sizes[::-1].index(size)
                    del sizes[number]
                    return self._spares.pop(number)
        with torch.inference_mode(False):  # tensors made in it are read-only outside
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def give(self, buffer: Tensor) -> None:
        """Give a buffer back that nothing reads or writes any more."""
        if buffer.is_cpu:
            with self._lock:
                self._spares.append(buffer)
                self._sizes.append(buffer.numel())
                if len(self._spares) > MAX_SPARES:
                    # The oldest are dropped first: no call may need their size any more.
                    del self._spares[0], self._sizes[0]


BUFFERS = BufferPool()


class P2P(NamedTuple):
    """A flat tensor that goes to a peer, or comes from it.

    Attributes:
        flat: the tensor.
        peer: the rank of the other side, counted along the axis.
        tag: a number that both sides of a message share, and other calls do not use.
        source: the rank on the axis whose shard the message has columns of.
    """

    flat: Tensor
    peer: int
    tag: int = 0
    source: int | None = None


class Chain(NamedTuple):
    """Messages along a line of ranks, which does not close to a ring.

    Attributes:
        step: 1 to send to the next rank, -1 to the previous one; the rank at the end sends nothing.
        tag: the tag of the messages; one call sends them, and another call receives them.
    """

    step: int
    tag: int


class Work(Protocol):
    """A message in flight."""

    def wait(self) -> object:
        """Return when the next kernels may read or overwrite the message's tensor."""


def hold_until_complete(works: Sequence[Work], tensors: Iterable[Tensor]) -> None:
    """Hold the memory of messages that an error left in flight until they are complete.

    NCCL's process group of torch 2.15 holds what it sends, but not what it receives. Without this,
    the next kernels would get memory that a message still writes to.
    """
    on_gpu = [x for x in tensors if x.is_cuda]
    if not on_gpu or is_capturing(on_gpu[0].device):
        return  # gloo does not write to what is gone, and a capture runs nothing
    # On a stream of its own: a message may never come, and the current stream must not wait then.
    with suppress(RuntimeError):  # the GPU failed, and runs nothing more
        stream = torch.cuda.Stream(on_gpu[0].device)
        with torch.cuda.stream(stream):
            for work in works:
                with suppress(RuntimeError):  # the group is shut down, and its messages ended
                    work.wait()
        for x in on_gpu:
            x.record_stream(stream)


class Transport(ABC):
    """Allocates the buffers of messages, and starts the messages of a hop.

    A subclass must define `start` only. To use registered memory (NCCL user buffers, symmetric
    memory), it also overrides `allocate` and `free`. Pass it as `SequenceAxis(transport=)`.

    >>> class Alone(Transport):
    ...     def start(self, receives, sends):
    ...         return []  # a ring of one rank has no messages
    >>> Alone().start([], [])
    []
    """

    def keeps_tags(self, device: torch.device) -> bool:
        """Return whether tags separate messages of that device; if not, ranks agree before them."""
        return False

    def at(self, label: Label) -> None:  # noqa: B027 - most need not know
        """Note that a loop is at `label`; called at each step, and after each start of messages.

        Two ranks with the same number of `at` calls have started the same messages.
        """

    def abort(self) -> None:  # noqa: B027 - most are closed with the group
        """End all waits for this rank after an error; no call follows."""

    def prepare(self, device: torch.device) -> None:  # noqa: B027 - most have nothing to prepare
        """Prepare for tensors of that device; every rank calls it before a loop's first hop.

        Raises:
            ValueError: if this transport cannot move tensors of that device.
        """

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return a uint8 buffer of at least `num_bytes` bytes; its content is undefined."""
        return BUFFERS.take(num_bytes, device)

    def free(self, buffer: Tensor) -> None:
        """Take back a buffer of `allocate` that no message and no kernel uses any more.

        It is not called for messages that an error left in flight.
        """
        BUFFERS.give(buffer)

    @abstractmethod
    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        """Start the messages of a hop; two ranks match their messages in the order of the lists.

        On a GPU they begin after all that the current stream holds, see Note [Streams] in
        `rotation.py`. Each `Work` keeps the tensor of its message alive until the message is
        complete.
        """


# The tags of call records, of records that no host waits for, and of a message that nobody sends.
# All other tags are smaller.
RECORD_TAG, LATE_TAG, ABORT_TAG = 0x7FFF_FFFF, 0x7FFF_FFFE, 0x7FFF_FFFD


class ProcessGroupTransport(Transport):
    """Sends point-to-point messages of `torch.distributed`, batched by hop."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def prepare(self, device: torch.device) -> None:
        """Connect all ranks: NCCL needs all of them in its first call, and a hop may have only two.

        Raises:
            ValueError: if the tensors are on a GPU and the group is gloo's.
            RuntimeError: if a CUDA graph is captured before there is a connection.
        """
        if device.type != "cuda" or self._group in _CONNECTED:
            return
        if self._group._get_backend(device).name() == "gloo":
            raise ValueError(
                "the tensors are on CUDA and their group is gloo's, which sends those of CPUs "
                'only; init_process_group("nccl"), or "cpu:gloo,cuda:nccl"'
            )
        refuse_capture(device, "NCCL has not connected the ranks of this axis yet", RUN_ONCE)
        # Any collective of all ranks connects them; this one is small.
        dist.all_reduce(torch.zeros(1, device=device), group=self._group)
        _CONNECTED.add(self._group)

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        # Receives go first: if two ranks both post a send first, gloo sends one after the other,
        # and the hop takes twice as long.
        messages = receives or sends  # of one device
        if messages and messages[0].flat.is_cuda:
            # NCCL deadlocks unless all messages of the hop are in one batch.
            operations = [self._operation(dist.irecv, message) for message in receives]
            operations += [self._operation(dist.isend, message) for message in sends]
            return dist.batch_isend_irecv(operations)
        # The checks of `dist.isend` take longer than the rest, so the group is called directly.
        works = [self._group.recv([x.flat], x.peer, x.tag) for x in receives]
        return works + [self._group.send([x.flat], x.peer, x.tag) for x in sends]

    def _operation(self, what: Callable[..., dist.Work | None], message: P2P) -> dist.P2POp:
        flat, peer, tag, _ = message
        return dist.P2POp(what, flat, group=self._group, tag=tag, group_peer=peer)

    def keeps_tags(self, device: torch.device) -> bool:
        return device.type == "cpu"  # gloo matches tags, NCCL ignores them

    def receive_record(self, message: P2P) -> Work:
        """Start to receive a call record, on the CPU."""
        return self._group.recv([message.flat], message.peer, RECORD_TAG)

    def send_record(self, message: P2P) -> Work:
        """Start to send a call record, on the CPU."""
        return self._group.send([message.flat], message.peer, RECORD_TAG)

    def abort(self) -> None:
        """Close the connections of this rank: ranks that wait for it get an error."""
        group, rank = self._group, self._group.rank()
        # Gloo has no abort, but a wait that times out closes all connections of the rank. It needs
        # one that is open: the rank that failed first may have closed its own.
        unsent = torch.empty(1, dtype=torch.uint8)
        for peer in (*range(rank + 1, group.size()), *range(rank)):
            with suppress(RuntimeError):  # closed already, or by this wait
                group.recv([unsent], peer, ABORT_TAG).wait(timedelta(milliseconds=1))
        with suppress(RuntimeError):
            group.abort()


def is_plain(transport: Transport, device: torch.device) -> bool:
    """Return whether the process group itself moves messages of that device, and keeps tags.

    If so, call records may carry messages.
    """
    return type(transport) is ProcessGroupTransport and transport.keeps_tags(device)


def axis_group_options(device_type: str) -> dist.ProcessGroupNCCL.Options | None:
    """Return options of a new group for an axis; `None` where NCCL does not connect the ranks.

    A stream of high priority gets a free multiprocessor before attention's own blocks do. So a hop
    begins while the tile runs, and not after it.

    Args:
        device_type: the device type of the mesh, `"cuda"` or `"cpu"`.
    """
    world = dist.group.WORLD
    if device_type != "cuda" or world is None:
        return None
    of_all = world._get_backend(torch.device("cuda"))
    if not of_all.name().startswith("nccl"):  # what "nccl" makes is named "nccl2" in torch 2.15
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = of_all.options._timeout  # in a mesh, options set the timeout
    return options


def transport_of(group: dist.ProcessGroup) -> Transport:
    """Return the transport of a group: the one set by the user, else point-to-point messages."""
    found = _TRANSPORTS.get(group)
    return ProcessGroupTransport(group) if found is None else found


def set_transport(group: dist.ProcessGroup, transport: Transport) -> None:
    """Set the transport of a group on this rank.

    Raises:
        TypeError: if it is not a `Transport`.
        ValueError: if the group has another transport.
    """
    if not isinstance(transport, Transport):
        raise TypeError(
            f"transport must be an instance of a subclass of Transport, got {transport!r}"
        )
    known = _TRANSPORTS.setdefault(group, transport)
    if known is not transport:
        raise ValueError(
            f"this axis has the transport {known!r}, it cannot get {transport!r}: an axis is "
            "configured once; use the same transport, or a mesh of other ranks"
        )


# Groups whose ranks NCCL has connected. An entry ends with its group.
_CONNECTED: WeakSet[dist.ProcessGroup] = WeakSet()

# Transports that users set. An entry ends with its group, unless the transport references that.
_TRANSPORTS: WeakKeyDictionary[dist.ProcessGroup, Transport] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class TransferPolicy:
    """The dtypes of a ring's messages, what moves them, and how many partial results a rank keeps.

    All ranks of an axis use the same policy.

    Args:
        kv_dtype: dtype of keys and values, by default their own. A narrower one sends fewer bytes
            and rounds what other ranks see; a rank sees its own keys and values unrounded.
            `"int8"` and `"fp8"` (e4m3) send 8 bits, with scales for blocks of 64 tokens. Then all
            ranks attend to the same rounded keys and values, a rank to its own, too, also where
            nothing is sent; gradients pass straight through the rounding. docs/numerics.md has
            the errors. The field has the dtype: `torch.int8`, or `torch.float8_e4m3fn`. The
            all-to-all of "ulysses" sends them so, too; another narrower dtype serves its ring
            among groups only. Decoding ignores this: caches do not travel.
        grad_dtype: dtype of the sums of key and value gradients. `torch.bfloat16` halves their
            bytes and rounds them at each hop; docs/rounding.md has the errors. float16 overflows
            beyond 65,504. The sums of float64 tensors travel as float64 where this is float32.
        num_parts: the number of partial outputs, or partial gradients of the query, that are kept
            until one pass merges them. Each is as large as the query. On GPUs more of them save
            time, up to one per rank, and fewer save memory. The default is four of 16 bits on a
            GPU, else one; docs/speed.md has what 2, 4 and 8 take on an H200.
        transport: what moves all messages of the axis: `None` for its process group, or
            `"symmetric"` for copy engines within one host, by PyTorch's symmetric memory. No GPU
            has measured the second yet; docs/speed.md says what it needs.
        order: the order of sums. `None` is that of launches and hops; `"fixed"` gives the same bits
            on any number of ranks, with any layout and strategy: partial results of blocks of the
            sequence are summed by a fixed tree. docs/numerics.md says what it serves and costs.
        block: tokens of a block of a fixed order. Runs of equal bits have equal blocks. By default
            it depends on the length of the sequence: the power of two that makes 16 to 32 blocks,
            from 16 to 4,096 tokens.

    Attributes:
        spec: the fields other than the defaults, as a text. An op takes it as one argument, since
            each argument costs the host time.

    Raises:
        TypeError: if a dtype is not a `torch.dtype`, or `num_parts` or `block` is not an integer.
        ValueError: if a dtype is not floating, or has fewer than 16 bits, other than those two; if
            `num_parts` or `block` is less than 1; if the transport, the order or a name of a dtype
            is unknown; if a fixed order is to send anything but whole numbers.

    >>> TransferPolicy(grad_dtype=torch.bfloat16).grad_dtype
    torch.bfloat16
    >>> TransferPolicy(kv_dtype="int8").kv_dtype
    torch.int8
    """

    kv_dtype: torch.dtype | str | None = None
    grad_dtype: torch.dtype = torch.float32
    num_parts: int | None = None
    transport: str | None = None
    order: str | None = None
    block: int | None = None
    spec: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.kv_dtype, str):
            # A dtype is what an op can take. Frozen, so that a policy can be a key.
            object.__setattr__(self, "kv_dtype", _dtype_of(self.kv_dtype))
        for name in ("kv_dtype", "grad_dtype"):
            dtype = getattr(self, name)
            if name == "kv_dtype" and (dtype is None or dtype in QUANTISED):
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name} must be a torch.dtype, got {dtype!r}")
            if not dtype.is_floating_point or dtype.itemsize < 2:
                more = ', "int8" or "fp8"' if name == "kv_dtype" else ""
                raise ValueError(f"{name} must be floating, 16 bits or more{more}, got {dtype}")

        if self.num_parts is not None:
            object.__setattr__(self, "num_parts", as_count("num_parts", self.num_parts, 1))

        if self.transport not in (None, "symmetric"):
            raise ValueError(f'transport must be None or "symmetric", got {self.transport!r}')
        self._check_order()
        given = ((x.name, getattr(self, x.name), x.default) for x in fields(self) if x.init)
        texts = [f"{name}={value}" for name, value, default in given if value != default]
        object.__setattr__(self, "spec", " ".join(texts))

    def _check_order(self) -> None:
        if self.order not in (None, "fixed"):
            raise ValueError(f'order must be None or "fixed", got {self.order!r}')
        if self.block is not None:
            object.__setattr__(self, "block", as_count("block", self.block, 1))
            if self.order is None:
                raise ValueError(
                    f'block={self.block} is for order="fixed"; leave it out, or order it'
                )
        if self.order is not None and (self.kv_dtype, self.grad_dtype) != (None, torch.float32):
            raise ValueError(
                'order="fixed" sends keys and values as they are, and sums as float32, got '
                f"kv_dtype {self.kv_dtype} and grad_dtype {self.grad_dtype}: what is rounded on "
                "its way depends on the number of ranks; leave them out"
            )

    def refuse_order(self, what: str) -> None:
        """Refuse a fixed order where a feature does not keep it.

        Raises:
            ValueError: names the feature `what`.
        """
        if self.order is not None:
            raise ValueError(
                f'{what} has no sums in a fixed order, and the policy has order="{self.order}"; '
                "use ring_attention or SequenceAxis.attention, or a policy without it"
            )

    @classmethod
    def of_spec(cls, spec: str) -> TransferPolicy:
        """Return the policy that has this `spec`.

        >>> TransferPolicy.of_spec(TransferPolicy(num_parts=2).spec).num_parts
        2
        """
        given = (part.split("=") for part in spec.split())
        return cls(**{name: _value_of(text) for name, text in given})

    def dtype_of_keys(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which keys and values of `dtype` are sent."""
        return dtype if self.kv_dtype is None else cast(torch.dtype, self.kv_dtype)

    def sum_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of keys and values of `dtype` are summed and sent."""
        # The default float32 means "at least float32": float64 gradients are not rounded.
        is_default = self.grad_dtype == torch.float32
        return wide_of(dtype) if is_default else self.grad_dtype


# The dtypes of 8 bits in which keys and values may travel.
QUANTISED = tuple(format.dtype for format in FORMATS.values())


def eight_bits_of(policy: TransferPolicy) -> torch.dtype | None:
    """Return the dtype of 8 bits in which keys and values travel; `None` if it has more bits."""
    dtype = cast("torch.dtype | None", policy.kv_dtype)  # a name became a dtype
    return dtype if dtype in QUANTISED else None


def block_of_decoding(policy: TransferPolicy) -> int | None:
    """Return the tokens of a block of a fixed order for a sequence that grows; `None` without one.

    Raises:
        ValueError: if the policy leaves them to the length of the sequence.
    """
    if policy.order is not None and policy.block is None:
        raise ValueError(
            f'decoding with order="{policy.order}" needs blocks that do not change as the sequence '
            "grows; pass TransferPolicy(block=) for its axis, such as block=1024"
        )
    return policy.block


def for_rounded(policy: TransferPolicy) -> TransferPolicy:
    """Return the policy for keys and values that are rounded to eight bits already."""
    return policy if eight_bits_of(policy) is None else replace(policy, kv_dtype=None)


def _value_of(text: str) -> Any:
    """Return the number, dtype or name that this is the text of; other types need a line here."""
    if text.isdigit():
        return int(text)
    return getattr(torch, text.removeprefix("torch.")) if text.startswith("torch.") else text


def _dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a format.

    Raises:
        ValueError: if the format is unknown.
    """
    if name not in FORMATS:
        known = " or ".join(f'"{x}"' for x in FORMATS)
        raise ValueError(f"kv_dtype must be a torch.dtype, {known}, got {name!r}")
    return FORMATS[name].dtype


DEFAULT_POLICY = TransferPolicy()


class NullTransport(Transport):
    """A transport that sends nothing: results are wrong, and only kernels take time and memory."""

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        return ()
