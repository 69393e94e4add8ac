"""The calls of a rank, as data; how a rank makes them, and how far its results are from dense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring import Balanced, Mask, SequenceAxis, TransferPolicy, ring_attention, sequence_runs
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.run_table import RunTable, as_layout
from dtensor_ring.planning.slices import Slices
from tests.dense import dense_attention, largest
from tests.faults.nccl_alone import await_agreement
from tests.faults.worlds import Failure, Log, failure_of
from tests.forced import machine_for
from tests.rings import runs_of
from tests.slices import shown

CAUSAL = Mask.causal()
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}
Attend = Callable[..., Tensor]


@dataclass(frozen=True)
class Call:
    """What one rank does in each step of its training, or of its inference.

    Attributes:
        layout: of the axis.
        seq_len: S, of the whole sequence.
        runs_of: boundaries of the documents that a balanced layout is made for.
        num_keys_of_rank_0: the first keys are on rank 0, all others on rank 1, by runs of queries
            and of keys; by default keys are where queries are.
        machine: date of the machine of the axis.
        block: begin and end of tokens that see one another both ways, by slices.
        autocast: to bfloat16.
        lines: of the code that makes a call, in the order in which they are made.
        second_head_dim: of the call of the second line.
        records: whether gradients are enabled.
        frozen: whether no input needs a gradient.
        backward: which outputs have a backward, in this order, where any is recorded; together,
            by default.
    """

    layout: str = "contiguous"
    seq_len: int = 48
    batch: int = 2
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 8
    dtype: torch.dtype = torch.float32
    mask: Mask = CAUSAL
    cu_seqlens: tuple[int, ...] | None = None
    runs_of: tuple[int, ...] | None = None
    num_keys_of_rank_0: int | None = None
    block: tuple[int, int] | None = None
    scale: float | None = None
    softcap: float = 0.0
    kernel: str | None = None
    sinks: tuple[float, ...] = ()
    strategy: str = "ring"
    machine: str | None = None
    kv_dtype: torch.dtype | str | None = None
    grad_dtype: torch.dtype = torch.float32
    num_parts: int | None = None
    transport: str | None = None
    autocast: bool = False
    lines: tuple[str, ...] = ("first",)
    second_head_dim: int = 8
    records: bool = True
    frozen: bool = False
    backward: tuple[int, ...] | None = None

    def at(self, line: str) -> Call:
        """The call that this line makes."""
        return replace(self, head_dim=self.second_head_dim) if line == "second" else self

    def layout_on(self, world_size: int) -> Layout:
        if self.runs_of is None:
            return as_layout(self.layout)
        return Balanced(self.mask, self.seq_len, world_size, self.runs_of)

    def keys_on(self, world_size: int) -> Layout:
        if self.num_keys_of_rank_0 is None:
            return self.layout_on(world_size)
        end = self.num_keys_of_rank_0
        others = [[] for _ in range(2, world_size)]
        return RunTable([[(0, end)], [(end, self.seq_len - end)], *others])

    def inputs(self, seed: int) -> list[Tensor]:
        """Query, key, value, and the gradient of the output, of the whole sequence."""
        generator = torch.Generator().manual_seed(seed)
        (heads, kv_heads), rest = self.heads, (self.seq_len, self.head_dim)
        shapes = [(self.batch, n, *rest) for n in (heads, kv_heads, kv_heads, heads)]
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]

    def options(self, world_size: int) -> dict[str, Any]:
        """Of `ring_attention`."""
        bounds = None if self.cu_seqlens is None else torch.tensor(self.cu_seqlens).int()
        options = {"mask": self.mask, "cu_seqlens": bounds, "scale": self.scale}
        options |= {"softcap": self.softcap, "kernel": self.kernel}
        options["sinks"] = torch.tensor(self.sinks) if self.sinks else None
        if self.runs_of is not None:
            layout = self.layout_on(world_size)
            assert isinstance(layout, Balanced)
            options["runs"] = sequence_runs(layout)
        if self.num_keys_of_rank_0 is not None and world_size > 1:
            sharded = self.layout_on(world_size), self.keys_on(world_size)
            tables = [table_of(layout, world_size, self.seq_len) for layout in sharded]
            options |= {"runs": runs_of(tables[0]), "key_runs": runs_of(tables[1])}
        if self.block is not None:
            options |= {"mask": None, "slices": self._slices()}
        return options

    def _slices(self) -> Slices:
        assert self.block is not None
        query = torch.arange(self.seq_len)
        in_block = (query >= self.block[0]) & (query < self.block[1])
        return Slices.per_query(0 * query, torch.where(in_block, self.block[1], query + 1))

    def expected(self, seed: int) -> list[Tensor]:
        """Output and gradients of the whole sequence, float64."""
        *inputs, grad = self.inputs(seed)
        if self.autocast:
            inputs = [x.bfloat16() for x in inputs]
        options = self.options(1)
        names = "cu_seqlens", "scale", "softcap", "sinks"
        seen = None
        if self.block is not None:
            seen = torch.tensor(shown(self._slices().tables[0], (self.seq_len,) * 2)) > 0
            seen = seen.expand(self.batch, -1, -1)
        dense = dense_attention(
            *(*inputs, self.mask), seen=seen, **{name: options[name] for name in names}
        )
        return [dense.out.detach(), *dense.backward(grad)]

    @property
    def tolerance(self) -> float:
        """The error that rounding may cause."""
        return TOLERANCES[torch.bfloat16 if self.autocast else self.dtype]


def table_of(layout: Layout, world_size: int, seq_len: int) -> RunTable:
    """The layout, written out."""
    sharded = [layout.runs(rank, world_size, seq_len) for rank in range(world_size)]
    return RunTable([[(run.start, run.length) for run in runs] for runs in sharded])


@dataclass
class Ending:
    """How the calls of a rank ended.

    Attributes:
        failure: what a call raised, if one did.
        error: the largest of a result, by the largest of the exact one; 0 if there is no result.
    """

    failure: Failure | None = None
    error: float = 0.0

    def is_right(self, call: Any) -> bool:
        """Whether nothing failed, and nothing is NaN or farther from exact than its `tolerance`."""
        return self.failure is None and self.error <= call.tolerance


# Each way has its two calls on two lines: ranks whose rings differ in nothing else are told by it.


def plain(line: str, tensors: list[Tensor], mesh: DeviceMesh, options: dict[str, Any]) -> Tensor:
    if line == "first":
        return ring_attention(*tensors, mesh=mesh, **options)
    return ring_attention(*tensors, mesh=mesh, **options)


def on_dtensors(
    line: str, tensors: list[Tensor], mesh: DeviceMesh, options: dict[str, Any]
) -> Tensor:
    wrapped = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in tensors]
    if line == "first":
        return ring_attention(*wrapped, **options).to_local()
    return ring_attention(*wrapped, **options).to_local()


def sdpa(line: str, tensors: list[Tensor], mesh: DeviceMesh, options: dict[str, Any]) -> Tensor:
    wrapped = [DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in tensors]
    how = {"is_causal": options["mask"] == CAUSAL, "scale": options["scale"]}
    if line == "first":
        return F.scaled_dot_product_attention(*wrapped, enable_gqa=True, **how).to_local()
    return F.scaled_dot_product_attention(*wrapped, enable_gqa=True, **how).to_local()


def compiled(line: str, tensors: list[Tensor], mesh: DeviceMesh, options: dict[str, Any]) -> Tensor:
    return torch.compile(plain, fullgraph=True, backend="aot_eager")(line, tensors, mesh, options)


WAYS: dict[str, Attend] = {
    "plain": plain,
    "DTensors": on_dtensors,
    "SDPA": sdpa,
    "compiled": compiled,
}


def make(
    log: Log, calls: tuple[Call, ...], ways: tuple[str, ...], training: bool, num_steps: int = 2
) -> Ending:
    """Make the calls of this rank; `calls` and `ways` have those of all ranks, by rank."""
    call, way = calls[dist.get_rank()], ways[dist.get_rank()]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    configure(call, mesh)
    return ending_of(log, lambda: step(call, WAYS[way], mesh, training), num_steps)


def ending_of(log: Log, one_step: Callable[[], float], num_steps: int = 1) -> Ending:
    """How so many steps of this rank end; each returns its largest error."""
    ending = Ending()
    log("begins")
    try:
        for _ in range(num_steps):
            ending.error = largest([ending.error, one_step()])
        await_agreement()
    except (RuntimeError, ValueError) as error:
        log("told")
        ending.failure = failure_of(error)
    return ending


def configure(call: Call, mesh: DeviceMesh) -> None:
    """Annotate the axis as this rank has it."""
    policy = TransferPolicy(call.kv_dtype, call.grad_dtype, call.num_parts, call.transport)
    layout = call.layout_on(mesh.size())
    machine = call.machine and replace(machine_for("ring"), date=call.machine)
    SequenceAxis(mesh, layout, strategy=call.strategy, policy=policy, machine=machine)


def step(call: Call, attend: Attend, mesh: DeviceMesh, training: bool) -> float:
    """Run one step on this rank; returns the largest error, 0 without results."""
    rank, size = mesh.get_local_rank(), mesh.size()
    sharded = call.layout_on(size), call.keys_on(size)
    positions, of_keys = (
        torch.tensor(layout.positions(rank, size, call.seq_len)).long() for layout in sharded
    )
    results, losses = [], []
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=call.autocast)
    with torch.set_grad_enabled(training and call.records), autocast:
        for line in call.lines:
            here, seed = call.at(line), len(line)
            query, *keys, grad = here.inputs(seed)
            query, grad = (x[:, :, positions] for x in (query, grad))
            inputs = [query, *(x[:, :, of_keys] for x in keys)]
            inputs = [x.requires_grad_(training and not call.frozen) for x in inputs]
            out = attend(line, inputs, mesh, here.options(size))
            losses.append((out * grad).sum())
            results.append((here, seed, out, inputs))
    go_back(losses, call.backward)
    return largest([0.0] + [error_of(*result, positions, of_keys) for result in results])


def go_back(losses: list[Tensor], order: tuple[int, ...] | None) -> None:
    """The backward of all losses at once, or of these one by one."""
    if order is not None:
        losses = [losses[i] for i in order]
    elif losses:
        losses = [torch.stack(losses).sum()]
    for loss in losses:
        if loss.requires_grad:
            loss.backward()


def error_of(
    call: Call,
    seed: int,
    out: Tensor,
    inputs: list[Tensor],
    positions: Tensor,
    of_keys: Tensor,
) -> float:
    """The largest error of a call's output and, where there are any, gradients."""
    grads = [x.grad for x in inputs if x.grad is not None]
    actual = zip([out, *grads], call.expected(seed), [positions] * 2 + [of_keys] * 2, strict=False)
    return largest(
        (x.detach().double() - y[:, :, where]).abs().max().item() / y.abs().max().item()
        for x, y, where in actual
        if x.numel()
    )
