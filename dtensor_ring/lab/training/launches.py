"""Record what a run on the meta device launches: FLOPs, bytes, and kernels that could be one.

Note [Launches]: a mode of the dispatcher sees each op that PyTorch launches a kernel for, forward
and backward, after composite ops have become others. Views and allocations launch none. A product
has the FLOPs of `torch.utils.flop_counter`. Each op reads its inputs and writes its results once;
what is broadcast is read once, too. Some kernels look their numbers up one by one, as they are
broadcast, strided, or of several dtypes: PyTorch has no vectorised kernel for these, and they take
as long for a number of 2 bytes as for one of 4. See `Machine.element_rate`.

Note [Fused launches]: a compiler makes one kernel of neighbours that are neither products nor
attentions. It reads what others made, and writes what others read; all between stays inside.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dtensor_ring.lab.training.footprint import Storages

ATTENTION, STATE = "attention", "state"

# Tensors that a launch reads or writes: a number of the storage, and bytes.
Touched = tuple[tuple[int, int], ...]


class OpLaunch(NamedTuple):
    """One kernel.

    Attributes:
        op: name of the op, without its namespace.
        flops: of a matrix product; 0 for all else.
        reads: what it reads.
        writes: what it writes.
        elements: numbers that it looks up one by one; 0 if its kernel is vectorised.
        fuses: whether a compiler makes one kernel of it and its neighbours.
        times: number of such launches.
    """

    op: str
    flops: int
    reads: Touched
    writes: Touched
    elements: int = 0
    fuses: bool = False
    times: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes that it reads and writes."""
        return sum(size for _, size in self.reads + self.writes)


ALLOCATIONS = (
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("detach", "lift_fresh", "_unsafe_view", "set_data"),
)
REDUCTIONS = "sum", "mean", "amax"
SELECTIONS = "gather", "index", "index_select", "embedding"  # they read what they return
SCATTERS = ("scatter_add_",)  # they change as much as they are given
COPIES = "copy_", "_to_copy", "clone", "cat", "slice_backward"
POINTWISE = torch.Tag.pointwise
GROUPED = "_grouped_mm"  # products of experts, each of its tokens; PyTorch does not count its FLOPs


class LaunchRecorder(Storages):
    """A context that records launches, and counts storages.

    Attributes:
        launches: so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[OpLaunch] = []
        self._times, self._is_paused = 1, False
        self._seen: list[ref[UntypedStorage]] = []  # keeps the `id` of each its own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._is_paused:
            return func(*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket.__name__
        if not func.is_view and name not in ALLOCATIONS:
            given = [args[1:] if name == "copy_" else args, _inputs(kwargs)]
            self._record(func, name, args, kwargs or {}, result, given)
        return result

    def _record(
        self, func: Any, name: str, args: Any, kwargs: Any, result: Any, given: Any
    ) -> None:
        inputs, results = _tensors(given), _tensors(result)
        flops = 0
        if func.overloadpacket in flop_registry:
            flops = flop_registry[func.overloadpacket](*args, **kwargs, out_val=result)
        elif name == GROUPED:
            flops = 2 * inputs[0].numel() * inputs[1].shape[-1]
        reads, writes = self.touched(inputs), self.touched(results)
        if name in SELECTIONS:
            reads = _at_most(reads, writes[0][1])
        elif name in SCATTERS:
            reads, writes = (_at_most(x, reads[-1][1]) for x in (reads, writes))
        is_simple = POINTWISE in func.tags or name in COPIES
        elements = 0 if flops or not is_simple else _looked_up(name, inputs, results)
        self.add(OpLaunch(name, flops, reads, writes, elements, is_simple or name in REDUCTIONS))

    def add(self, launch: OpLaunch) -> None:
        """Add what no op of PyTorch launches."""
        self.launches.append(launch._replace(times=launch.times * self._times))

    def touched(self, tensors: Sequence[Tensor]) -> Touched:
        """Return the bytes of tensors, by numbers that tell their storages apart."""
        return tuple((self._number(x), _size(x)) for x in tensors)

    def _number(self, x: Tensor) -> int:
        found = self.held(x)
        if not found:
            return x.untyped_storage()._cdata  # an input, which lives as long as the run
        self._seen += found.values()
        return next(iter(found))

    def need(self, num_bytes: int) -> None:
        """Count bytes that are needed now and free afterwards."""
        self.peak = max(self.peak, self.alive + num_bytes)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Make tensors that are there before, such as weights, and count none of them."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextmanager
    def times(self, number: int) -> Iterator[None]:
        """Count each launch inside this many times."""
        self._times *= number
        try:
            yield
        finally:
            self._times //= number


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _inputs(kwargs: Any) -> list[Any]:
    """Return what is read of the keyword arguments: `out` is written only."""
    return [value for name, value in (kwargs or {}).items() if name != "out"]


def _at_most(touched: Touched, size: int) -> Touched:
    return tuple((number, min(x, size)) for number, x in touched)


def _numel(x: Tensor) -> int:
    """Return the numbers of a tensor that are in different places."""
    found = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        found *= size if stride else 1
    return found


def _size(x: Tensor) -> int:
    return _numel(x) * x.element_size()


def _looked_up(name: str, inputs: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """Return the numbers that a kernel looks up one by one; 0 if they lie alike in all tensors."""
    first = results[0]
    if name == "slice_backward":  # zeros, and then a copy
        return first.numel() + inputs[0].numel()
    is_alike = all(_form(x) == _form(first) for x in (*inputs, *results) if x.dim())
    is_dense = first.untyped_storage().nbytes() == _size(first) or first.is_contiguous()
    return 0 if is_alike and is_dense and name != "cat" else first.numel()


def _form(x: Tensor) -> tuple[Any, ...]:
    """Return what equal forms have in common; a dim of one has no stride that matters."""
    strides = [y for size, y in zip(x.shape, x.stride(), strict=True) if size > 1]
    return x.shape, strides, x.dtype


def fused(launches: Sequence[OpLaunch], later: Sequence[OpLaunch] = ()) -> list[OpLaunch]:
    """Return launches as a compiler makes them, see Note [Fused launches].

    Args:
        launches: of one graph, such as a forward.
        later: of the next graph, which reads what the first one keeps.

    >>> double = OpLaunch("mul", 0, ((1, 8),), ((2, 8),), fuses=True)
    >>> (found,) = fused([double, OpLaunch("add", 0, ((2, 8),), ((3, 8),), fuses=True)])
    >>> found.reads, found.writes
    (((1, 8),), ((3, 8),))
    """
    every = enumerate((*launches, *later))
    last = {number: i for i, launch in every for number, _ in launch.reads}
    found: list[OpLaunch] = []
    numbered = enumerate(launches)
    for (fuses, _), group in groupby(numbered, lambda x: (x[1].fuses, x[1].times)):
        members = list(group)
        if not fuses:
            found += [launch for _, launch in members]
            continue
        end = members[-1][0]
        reads: dict[int, int] = {}
        writes: dict[int, int] = {}
        for _, launch in members:
            reads |= {x: size for x, size in launch.reads if x not in writes | reads}
            writes |= dict(launch.writes)
        kept = {x: size for x, size in writes.items() if last.get(x, end + 1) > end}
        times = members[0][1].times
        found.append(OpLaunch("fused", 0, (*reads.items(),), (*kept.items(),), times=times))
    return found
