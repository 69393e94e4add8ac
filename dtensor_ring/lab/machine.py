"""A machine in numbers: what its kernels, its memory and its links take, as files keep it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import log2
from typing import Annotated, Any

import numpy as np

from dtensor_ring.lab.fields import Range, check_ranges, checked, parsed_json
from dtensor_ring.planning.ranges import MAX_RANKS

# The shapes of tiles; a machine without one is asked for the next.
FORMS = ("window", "causal", "full")

# Types of 16 bits have the same speed, so either stands for the other.
SAME_SPEED = ({"bfloat16", "float16"},)


@dataclass(frozen=True)
class Curve:
    """Seconds by size: linear between known sizes.

    A size below the first takes as long as the first one. Beyond the last, the last slope goes on.

    Args:
        sizes: ascending sizes, such as bytes or FLOPs.
        seconds: the time of each; it never decreases.

    Raises:
        ValueError: if there are no sizes, they do not ascend, or a time is negative or decreases.

    >>> Curve((0, 100), (1.0, 2.0))(np.array([50, 300]))
    array([1.5, 4. ])
    """

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        sizes, seconds = np.array(self.sizes, float), np.array(self.seconds, float)
        if not sizes.size or sizes.shape != seconds.shape:
            raise ValueError(
                f"a curve has one time for each size, got {sizes.size} sizes and {seconds.size}"
            )
        known = np.isfinite(sizes).all() and np.isfinite(seconds).all()
        ascends = (np.diff(sizes) > 0).all() and (np.diff(seconds) >= 0).all()
        if not (known and ascends and sizes[0] >= 0 and seconds[0] >= 0):
            raise ValueError(
                "sizes of a curve must ascend and its seconds never decrease, none of them "
                f"negative, got sizes {self.sizes} and seconds {self.seconds}"
            )

    @classmethod
    def line(cls, latency: float, rate: float) -> Curve:
        """Return `latency + size / rate`.

        >>> Curve.line(1.0, 100.0)(50.0)
        1.5
        """
        # A far second point, so that the slope keeps its digits beside the latency.
        far = 2.0**40
        return cls((0.0, far), (latency, latency + far / rate))

    def __call__(self, size: Any) -> Any:
        """Return the seconds of a size, or of each in an array."""
        sizes, seconds = self._points
        found = np.interp(size, sizes, seconds) + self._slope * np.maximum(size - sizes[-1], 0.0)
        return found if isinstance(size, np.ndarray) else float(found)

    @cached_property
    def _points(self) -> tuple[np.ndarray, np.ndarray]:
        return np.array(self.sizes, float), np.array(self.seconds, float)

    @cached_property
    def _slope(self) -> float:
        """Seconds by size beyond the last one."""
        if len(self.sizes) == 1:
            return 0.0
        (x, u), (y, v) = self.sizes[-2:], self.seconds[-2:]
        return (v - y) / (u - x)


@dataclass(frozen=True)
class KernelSpeed:
    """What a launch of a kernel takes, by its FLOPs, beside the time of the host.

    A forward has `4 * pairs * heads * head_dim` FLOPs, a backward 10 in place of 4 (Dao, 2023,
    arXiv 2307.08691), where `pairs` are the visible pairs of a query and a key.

    Attributes:
        kernel: name of a registered kernel, or "any".
        dtype: of query, key and value, such as "bfloat16".
        head_dim: of queries and keys.
        form: the shape of the tile: "full", "causal" (one edge of a band cuts it) or "window" (both
            do).
        forward, backward: seconds by FLOPs.
        heads: query heads that were measured; 0 where only FLOPs count. Of two launches with the
            same FLOPs, the one with fewer heads has larger tiles, which some kernels are faster at.
    """

    kernel: str
    dtype: str
    head_dim: int
    form: str
    forward: Curve
    backward: Curve
    heads: int = 0


@dataclass(frozen=True)
class Links:
    """What messages take between ranks on one host, or between those on two.

    Attributes:
        p2p: one message, by its bytes; each rank sends and receives at the same time.
        all_to_all, all_gather, reduce_scatter: all messages of a rank, by the bytes that it sends.
    """

    p2p: Curve
    all_to_all: Curve
    all_gather: Curve
    reduce_scatter: Curve


# Numbers and their ranges, which are checked.
AtLeast0 = Annotated[float, Range(0)]
AtLeast1 = Annotated[float, Range(1)]
NumRanks = Annotated[int, Range(1, MAX_RANKS)]
NumBytes = Annotated[int, Range(1, 2**60)]

# The version of the fields below, which a file has as `schema`.
SCHEMA = 2


@dataclass(frozen=True)
class Machine:
    """A machine whose devices are alike: seconds of kernels, memory and links.

    Attributes:
        name: of the machine, such as "h100".
        device: name of the device, as PyTorch has it.
        source: "data sheet" or "measured".
        ranks_per_host: devices that `inside` connects.
        memory: bytes of a device.
        kernels: speeds of attention kernels; of equal rows the first counts.
        gemm: FLOPs per second that matrix products reach, by dtype.
        memory_rate: bytes per second that simple kernels read and write.
        element_rate: numbers per second that a kernel of PyTorch writes which looks them up one by
            one, as they are broadcast, strided, or of several dtypes; 0 where bytes alone count.
        merge: seconds of merging partial results, by bytes read and written.
        pack: seconds of packing columns, by bytes read and written.
        inside: links between devices of one host.
        between: links between hosts; each device has a port of its own.
        beside_kernel: how many times longer a transfer takes while a kernel runs.
        beside_transfer: how many times longer a kernel takes while a transfer runs.
        launch: seconds of the host for a launch of a kernel.
        hop: seconds of the host for a hop, besides those of its messages.
        host_waits: whether the host waits for each kernel, as on a CPU. A GPU's host runs ahead.
        date: of the measurement or data sheet, such as "2026-11-26".
        versions: of the packages that matter, by name.
        samples: raw measurements, in any form that JSON has.
        schema: version of these fields.

    Raises:
        ValueError: if a number is not finite or out of range.

    >>> from dtensor_ring.lab.presets import as_machine
    >>> machine = as_machine("h100")
    >>> machine.ranks_per_host, Machine.from_json(machine.to_json()) == machine
    (8, True)
    """

    name: str
    device: str
    source: str
    ranks_per_host: NumRanks
    memory: NumBytes
    kernels: tuple[KernelSpeed, ...]
    gemm: Mapping[str, AtLeast1]
    memory_rate: AtLeast1
    merge: Curve
    pack: Curve
    inside: Links
    between: Links
    beside_kernel: AtLeast1 = 1.0
    beside_transfer: AtLeast1 = 1.0
    element_rate: AtLeast0 = 0.0
    launch: AtLeast0 = 0.0
    hop: AtLeast0 = 0.0
    host_waits: bool = False
    date: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, Any] = field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        check_ranges(self, "a machine")

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that differ if any field does."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """Its name and digest, by which ranks and errors tell machines apart."""
        return f"{self.name} {self.digest}"

    def to_json(self) -> str:
        """Return all fields as JSON, which `from_json` reads."""
        return json.dumps(asdict(self), indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, where: str = "this machine") -> Machine:
        """Return the machine that `to_json` wrote.

        Args:
            text: the JSON.
            where: what errors call it, such as the name of a file.

        Raises:
            ValueError: if it is no JSON, of another schema, a field is missing or unknown, or of
                another type.
        """
        content = parsed_json(text, where)
        schema = content.get("schema") if isinstance(content, dict) else None
        if schema != SCHEMA:
            raise ValueError(
                f"{where} has schema {schema!r}, this version reads {SCHEMA}; write it again by "
                "python -m dtensor_ring calibrate"
            )
        return checked(cls, content, where)

    def check_device(self, device: str) -> None:
        """Refuse another device than that of this machine.

        Raises:
            ValueError: if the names differ.
        """
        if device != self.device:
            raise ValueError(f"machine {self.name} is of {self.device}, not of {device}")

    def speed(
        self,
        dtype: str,
        head_dim: int,
        form: str,
        kernel: str | None = None,
        heads: int | None = None,
    ) -> KernelSpeed:
        """Return the speed of a kernel for tiles of a form.

        Without a row for this head dim or these heads, the nearest one stands for it, as time goes
        by FLOPs; a "window" may be missing where "causal" is known, and that where "full" is.

        Args:
            dtype: of query, key and value, such as "bfloat16".
            head_dim: of queries and keys.
            form: one of `FORMS`.
            kernel: a registered kernel's name; by default the first one of the machine.
            heads: query heads of the launch; by default as many as the first row has.

        Raises:
            ValueError: if there is no such kernel or dtype.
        """
        known = self._of_dtype(dtype)
        if kernel is not None:
            known = [x for x in known if x.kernel in (kernel, "any")]
        forms = FORMS[FORMS.index(form) :]
        known = [x for x in known if x.kernel == known[0].kernel and x.form in forms]
        if not known:
            listed = sorted({f"{x.kernel} of {x.dtype}" for x in self.kernels})
            raise ValueError(
                f"machine {self.name} has no speed of kernel {kernel or 'any'} for {dtype} and "
                f"{form} tiles, only of {', '.join(listed) or 'none'}"
            )

        def distance(x: KernelSpeed) -> tuple[float, ...]:
            of_heads = abs(log2(x.heads / heads)) if x.heads and heads else 0.0
            return abs(x.head_dim - head_dim), forms.index(x.form), of_heads

        return min(known, key=distance)

    def kernel_for(self, dtype: str, is_banded: bool) -> str | None:
        """Return the first kernel that serves an attention, `None` if no speed is known.

        Windows and documents need a kernel with rows of "window" tiles, if any kernel has some:
        cuDNN, for one, takes neither.
        """
        known = self._of_dtype(dtype)
        banded = [x for x in known if x.form == FORMS[0]]
        return next((x.kernel for x in (banded if is_banded and banded else known)), None)

    def _of_dtype(self, dtype: str) -> list[KernelSpeed]:
        """Return the rows of a dtype, and of those that are as fast."""
        alike = next((types for types in SAME_SPEED if dtype in types), {dtype})
        return [x for x in self.kernels if x.dtype in alike]

    def dtype_like(self, dtype: str) -> str:
        """Return a dtype whose speed is known: this one, or that of the first kernel."""
        is_known = self._of_dtype(dtype) or not self.kernels
        return dtype if is_known else self.kernels[0].dtype
