"""What kernels and tensor parallelism's collectives of a layer take, without its attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dtensor_ring.lab.machine import SAME_SPEED, Machine
from dtensor_ring.lab.training.collectives import Kind, collective_seconds, rank_group
from dtensor_ring.lab.training.launches import ATTENTION, STATE, OpLaunch, fused

# Matrix products in FP8 leave everything else, attention too, in 16 bits.
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")

# Bytes of a number, by the names of dtypes that training has.
ITEMSIZES = (
    ("float8_e4m3fn", 1),
    ("float8_e5m2", 1),
    ("bfloat16", 2),
    ("float16", 2),
    ("float32", 4),
    ("float64", 8),
)


def itemsize(dtype: str) -> int:
    """Return the bytes of a number.

    Raises:
        ValueError: if training has no such dtype.

    >>> itemsize("bfloat16")
    2
    """
    found = dict(ITEMSIZES).get(dtype) if isinstance(dtype, str) else None
    if found is None:
        known = ", ".join(name for name, _ in ITEMSIZES)
        raise ValueError(f"dtype must be one of {known}, got {dtype!r}")
    return found


def gemm_rate(machine: Machine, dtype: str) -> float:
    """Return the FLOPs per second of matrix products.

    Raises:
        ValueError: if the machine has none for the dtype.
    """
    alike = next((sorted(types) for types in SAME_SPEED if dtype in types), [dtype])
    found = next((machine.gemm[x] for x in (dtype, *alike) if x in machine.gemm), None)
    if found is None:
        known = ", ".join(sorted(machine.gemm)) or "none"
        raise ValueError(
            f"machine {machine.name} has no speed of matrix products for dtype {dtype}, only "
            f"of {known}"
        )
    return found


class PartSeconds(NamedTuple):
    """Seconds of one direction of a layer by part.

    Attributes:
        gemm: matrix products with weights.
        others: norms, activation functions and whatever else reads and writes memory.
        tp: collectives of tensor parallelism, which nothing overlaps.
        loss: the output projection and the cross-entropy.
        attention: kernels of the attention, and merges of their results.
        ring: what the attention waits for messages.
        states: kernels of layers with a state.
        scan: what these layers wait for messages, and the copies of tokens that they bring.
    """

    gemm: float = 0.0
    others: float = 0.0
    tp: float = 0.0
    loss: float = 0.0
    attention: float = 0.0
    ring: float = 0.0
    states: float = 0.0
    scan: float = 0.0

    def __add__(self, other: object) -> PartSeconds:
        if not isinstance(other, PartSeconds):
            return NotImplemented
        return PartSeconds._make(map(sum, zip(self, other, strict=True)))

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return sum(self)


class Shard(NamedTuple):
    """What one rank has of a step.

    Attributes:
        tokens: tokens of the rank before tensor parallelism divides the work on them.
        tp: ranks of tensor parallelism.
        itemsize: bytes of a number between layers.
        gemm_dtype: dtype of the inputs of matrix products.
        is_sharded: whether other ranks have other tokens of the sequence.
    """

    tokens: int
    tp: int
    itemsize: int
    gemm_dtype: str
    is_sharded: bool = False

    @property
    def dtype(self) -> str:
        """The dtype between layers: products in FP8 leave everything else in 16 bits."""
        return "bfloat16" if self.gemm_dtype in FLOAT8 else self.gemm_dtype


class LayerClock(NamedTuple):
    """Tells what launches and collectives take for the tokens of a rank.

    Note [Roofline]: a launch takes as long as its FLOPs, its bytes or its numbers, whichever is
    most (Williams et al., 2009, doi 10.1145/1498765.1498785), and what the smallest one takes.

    Attributes:
        machine: the machine.
        shard: what one rank has.
        hidden: numbers of a token between layers.
        is_compiled: whether launches are fused, see Note [Fused launches].
    """

    machine: Machine
    shard: Shard
    hidden: int
    is_compiled: bool = False

    def parts(self, forward: Sequence[OpLaunch], backward: Sequence[OpLaunch]) -> list[PartSeconds]:
        """Return the seconds of the launches of a forward and of its backward."""
        sides = [forward, backward]
        if self.is_compiled:
            sides = [fused(forward, backward), fused(backward)]
        return [sum(map(self._part, side), PartSeconds()) for side in sides]

    def _part(self, launch: OpLaunch) -> PartSeconds:
        if launch.op == ATTENTION:
            return PartSeconds()
        is_state, is_product = launch.op == STATE, launch.flops > 0
        name = "states" if is_state else "gemm" if is_product else "others"
        return PartSeconds(**{name: self._seconds(launch, is_product and not is_state)})

    def _seconds(self, launch: OpLaunch, is_product: bool) -> float:
        """Return the seconds of a launch; products of a state are in 16 bits or wider."""
        machine, dtype, size = self.machine, self.shard.dtype, float(launch.num_bytes)
        if is_product:
            dtype = self.shard.gemm_dtype
            size *= itemsize(dtype) / self.shard.itemsize
        seconds = self.memory(size)
        if launch.flops:
            seconds = max(seconds, launch.flops / gemm_rate(machine, dtype))
        if launch.elements and machine.element_rate:
            seconds = max(seconds, launch.elements / machine.element_rate)
        return launch.times * (seconds + machine.pack(0.0))

    def memory(self, size: float) -> float:
        """Return the seconds of reading and writing so many bytes."""
        return size / self.machine.memory_rate

    def tp_collectives(self) -> float:
        """Return the seconds of a gather before a part of a layer and a reduction after it.

        Tokens are sharded over the ranks of tensor parallelism between them (Korthikanti et al.,
        2022, arXiv 2205.05198).
        """
        return self.tp_gather() + self._tp("reduce_scatter")

    def tp_gather(self) -> float:
        """Return the seconds of one gather; the reduction of its gradient takes the same links."""
        return self._tp("all_gather")

    def _tp(self, kind: Kind) -> float:
        group = rank_group(self.machine, self.shard.tp)
        size = self.shard.tokens * self.hidden * self.shard.itemsize
        return collective_seconds(self.machine, group, kind, size)

    def embedding(self) -> float:
        """Return the seconds of reading the embeddings of tokens; backward adds as many."""
        size = 2 * self.hidden * self.shard.itemsize * self.shard.tokens / self.shard.tp
        return self.memory(size)


TERA = 1e12

# Dense matrix products in bfloat16 and in FP8, of the data sheets of NVIDIA A100, H100, H200 and
# B200 (DGX B200: 36 and 72 PFLOP/s of 8, with sparsity or FP8) and of AMD MI300X; FP8 of A100 is
# none. H800 is H100 with fewer links.
DENSE = (
    ("A100", 312 * TERA, 0.0),
    ("H100", 989 * TERA, 1979 * TERA),
    ("H800", 989 * TERA, 1979 * TERA),
    ("H200", 989 * TERA, 1979 * TERA),
    ("B200", 2250 * TERA, 4500 * TERA),
    ("MI300X", 1307 * TERA, 2615 * TERA),
)


def peak_flops(machine: Machine, dtype: str) -> float:
    """Return the FLOPs per second that MFU is a part of.

    Args:
        machine: the machine. Of a device without a row here, and for other dtypes, it is what
            matrix products reach.
        dtype: of matrix products.

    Raises:
        ValueError: if the machine has no speed for the dtype.

    >>> from dtensor_ring.lab.presets import as_machine
    >>> peak_flops(as_machine("h100"), "bfloat16") / 1e12
    989.0
    """
    half, eight = next((x for name, *x in DENSE if name in machine.device), (0.0, 0.0))
    found = {"bfloat16": half, "float16": half, "float8_e4m3fn": eight}
    return found.get(dtype) or gemm_rate(machine, dtype)
