"""Measure layers with a state over ranks, next to one process, and what a scan rounds.

Run ``python benchmarks/states.py``: it prints tables and writes them to ``benchmarks/results``.
With ``--quick`` it takes fewer tokens, and writes to ``out`` instead. A gated delta rule of
Qwen3-Next and a Mamba 2 layer of Granite 4, with a part of their heads, run on one thread: with all
tokens, and with those of a rank. This counts seconds of the processor, so other programs do not
matter much. Then ranks run stand-ins that wait as long, and send real messages in between. The
backward of the delta rule in PyTorch would take quadratic time, so that ranks would save more than
they do with kernels: its loop runs in linear time here, see `LoopOverChunks`.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from harness import is_quick, origin, publish, spawn, table_of
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from dtensor_ring import StateMap, exclusive_scan

# Plans and transformers are imported where layers run: processes that send messages need neither.
FAMILIES = "Qwen3-Next", "Granite 4"
HIDDEN = 256
REPEATS = 5


@dataclass(frozen=True)
class Case:
    """A layer over ranks, and seconds with a rank's tokens, forward and backward.

    `parts` are those of a rank between its scans, `same` those of the layer by itself.
    """

    family: str
    world_size: int
    seq_len: int
    parts: tuple[tuple[float, ...], tuple[float, ...]]
    same: tuple[float, float]
    shapes: tuple[dict[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Measurement:
    """Seconds of a step of the slowest rank, forward and both ways, and bytes that rank 0 sends."""

    case: Case
    seconds: list[tuple[float, float]]
    sent: int


def layer_of(family: str) -> nn.Module:
    """A layer of a family with an eighth of its heads, or a sixteenth."""
    import transformers
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    torch.manual_seed(0)
    if family == "Qwen3-Next":
        heads = {"linear_num_value_heads": 4, "linear_num_key_heads": 2}
        config = transformers.Qwen3NextConfig(hidden_size=HIDDEN, **heads)
        return qwen.Qwen3NextGatedDeltaNet(config, 0)
    heads = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
    how = {"hidden_size": HIDDEN, "layer_types": ["mamba"], "num_hidden_layers": 1}
    return granite.GraniteMoeHybridMambaLayer(
        transformers.GraniteMoeHybridConfig(**how, **heads), 0
    )


class LoopOverChunks(TorchFunctionMode):
    """Makes the backward of a loop over chunks linear in their number, as that of kernels is.

    `x[:, :, i]` has a gradient as large as `x`, and so has a chunk written into the outputs: for n
    chunks autograd fills and adds n times n of them. Here chunks are views of one `unbind`,
    and outputs are stacked once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._chunks: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._outs: dict[int, tuple[Tensor, list[Tensor]]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = args[0] if args else None
        is_chunk = len(args) > 1 and self._is_chunk(args[1])
        if func is Tensor.__getitem__ and is_chunk:
            if id(x) not in self._chunks:
                self._chunks[id(x)] = x, x.unbind(2)
            return self._chunks[id(x)][1][args[1][2]]
        if func is Tensor.__setitem__ and is_chunk:
            self._outs.setdefault(id(x), (x, []))[1].append(args[2])
            return None
        if func is Tensor.reshape and id(x) in self._outs:
            args = torch.stack(self._outs.pop(id(x))[1], 2), *args[1:]
        return func(*args, **kwargs or {})

    @staticmethod
    def _is_chunk(key: Any) -> bool:
        return isinstance(key, tuple) and len(key) == 3 and type(key[2]) is int


class Cut(torch.autograd.Function):
    """Stands in for a scan over ranks, and notes when it is reached, forward and backward."""

    @staticmethod
    def forward(ctx: Any, marks: list[float], state: Tensor, *others: Tensor) -> Tensor:
        ctx.marks, ctx.like = marks, (state, *others)
        marks.append(time.thread_time())
        return torch.randn_like(state)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.marks.append(time.thread_time())
        return None, *(torch.full_like(x, 1e-3) for x in ctx.like)


class MarkedSource:
    """Gives a layer states as a scan would, and notes when."""

    continues, steps = True, False

    def __init__(self, marks: list[float]) -> None:
        self.marks, self.maps = marks, list[StateMap]()

    def columns(self, key: Any, columns: Tensor, num_before: int) -> Tensor:
        from parallel_plans.huggingface.states.state_sources import last_columns

        last = last_columns(columns, num_before)
        self.maps.append(StateMap(last.mT))
        return Cut.apply(self.marks, last)

    def scanned(self, key: Any, own: StateMap) -> Tensor:
        self.maps.append(own)
        parts = (x for x in (own.state, own.decay, own.matrix) if x is not None)
        return Cut.apply(self.marks, *parts)

    given = ended = None


class Marked:
    """Runs a layer of a rank, whose states come from a `MarkedSource`."""

    def __init__(self) -> None:
        self.source = MarkedSource([])

    def call(self, call: Any, run: Callable[..., Any]) -> Any:
        return run(call.hidden, None, self.source)


def marked_parts(layer: nn.Module, num_tokens: int) -> tuple[list[float], list[float]]:
    """Seconds of the parts of a layer before, between and after its scans, both ways."""
    from parallel_plans.huggingface.states.stateful import passing_states

    x = torch.randn(1, num_tokens, HIDDEN, requires_grad=True)
    marked, found = Marked(), []
    with LoopOverChunks(), passing_states([layer], marked):
        run: Callable[[], Tensor] = partial(layer, x)
        marks = marked.source.marks
        for number in range(2):
            marks.append(time.thread_time())
            if number == 0:
                out = run()
                grad = torch.randn_like(out)
            else:
                out.backward(grad)
            marks.append(time.thread_time())
            found.append([end - begin for begin, end in pairwise(marks)])
            marks.clear()
    return found[0], found[1]


def whole_seconds(layer: nn.Module, num_tokens: int) -> tuple[float, float]:
    """Seconds of a layer on one process, forward and backward."""
    x = torch.randn(1, num_tokens, HIDDEN, requires_grad=True)
    marks = [time.thread_time()]
    with LoopOverChunks():
        out = layer(x)
    grad = torch.randn_like(out)
    marks.append(time.thread_time())
    out.backward(grad)
    marks.append(time.thread_time())
    return marks[1] - marks[0], marks[2] - marks[1]


def fastest(measure: Callable[[], tuple[Any, Any]], repeats: int) -> tuple[Any, Any]:
    """Of several runs the one that took least, forward and backward; the first warms up."""
    runs = [measure() for _ in range(repeats + 1)][1:]

    def seconds(x: Any) -> float:
        return sum(x) if isinstance(x, list) else x

    forward, backward = (min((run[i] for run in runs), key=seconds) for i in range(2))
    return forward, backward


class Wait(torch.autograd.Function):
    """The identity, after a wait forward and another one backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: tuple[float, float]) -> Tensor:
        ctx.seconds = seconds[1]
        time.sleep(seconds[0])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


def shapes_of(layer: nn.Module) -> tuple[dict[str, tuple[int, ...]], ...]:
    """The shapes of the maps of a layer: of its convolution, and of its state."""
    from parallel_plans.huggingface.states.stateful import passing_states

    marked = Marked()
    with passing_states([layer], marked), torch.no_grad():
        layer(torch.randn(1, 64, HIDDEN))
    return tuple(
        {name: tuple(x.shape) for name, x in vars(own).items() if x is not None}
        for own in marked.source.maps
    )


def measure(case: Case, mesh: DeviceMesh) -> Measurement:
    """Wait as long as the parts of a layer take, and send its maps in between."""
    group = mesh.get_group()
    maps = [StateMap(**{name: torch.zeros(x) for name, x in y.items()}) for y in case.shapes]
    forward, backward = case.parts
    waits = list(zip(forward, backward[::-1], strict=True))
    steps, size = [], case.world_size
    with torch.enable_grad():
        for _ in range(REPEATS + 1):
            x = torch.zeros((), requires_grad=True)
            dist.barrier(group)
            begin = time.perf_counter()
            out = Wait.apply(x, waits[0])
            for own, wait in zip(maps, waits[1:], strict=True):
                moved = StateMap(own.state + out, own.decay, own.matrix)
                [before] = exclusive_scan([moved], mesh)
                out = Wait.apply(before.flatten()[0], wait)
            dist.barrier(group)
            half = time.perf_counter()
            out.backward()
            dist.barrier(group)
            steps.append((half - begin, time.perf_counter() - begin))
    numbers = [(x.state, x.decay, x.matrix) for x in maps]
    of_maps = [sum(y.nbytes for y in x if y is not None) for x in numbers]
    # A convolution's columns go to the next rank, a state's map to all later ones.
    return Measurement(case, steps[1:], of_maps[0] + (size - 1) * of_maps[1])


@dataclass(frozen=True)
class Error:
    """Relative errors of outputs against float64: of one process, and of shards with a scan."""

    family: str
    seq_len: int
    whole: float
    sharded: float


def delta_rule(length: int) -> tuple[str, list[Tensor], dict[str, Tensor]]:
    """Inputs of a gated delta rule with slow decays: name, tensors by token, and others."""
    query, key, value = torch.randn(3, 1, length, 2, 32).unbind()
    query, key = (nn.functional.normalize(x, dim=-1) for x in (query, key))
    g, beta = -torch.rand(1, length, 2) * 1e-3, torch.rand(1, length, 2)
    return "torch_chunk_gated_delta_rule", [query, key, value, g, beta], {}


def exact_delta_rule(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token after another."""
    state, outs = query.new_zeros(2, 32, 32), []
    for q, k, v, decay, rate in zip(*(x[0] for x in (query, key, value, g, beta)), strict=True):
        state = state * decay.exp()[:, None, None]
        delta = (v - (k[:, None] @ state)[:, 0]) * rate[:, None]
        state = state + k[:, :, None] * delta[:, None]
        outs.append((q[:, None] @ state)[:, 0] * q.shape[-1] ** -0.5)
    return torch.stack(outs)[None]


def mamba2(length: int) -> tuple[str, list[Tensor], dict[str, Tensor]]:
    """Inputs of a scan of Mamba 2 with slow decays."""
    x, steps = torch.randn(1, length, 2, 16), torch.rand(1, length, 2) * 1e-2
    b, c = torch.randn(2, 1, length, 1, 32).unbind()
    return "mamba2_chunk_scan", [x, steps, b, c], {"A": -torch.tensor([0.1, 1.0])}


def exact_mamba2(x: Tensor, steps: Tensor, b: Tensor, c: Tensor, A: Tensor) -> Tensor:
    """One token after another."""
    state, outs = x.new_zeros(2, 16, 32), []
    for value, step, own, read in zip(*(y[0] for y in (x, steps, b, c)), strict=True):
        state = state * (A * step).exp()[:, None, None]
        state = state + (value * step[:, None])[:, :, None] * own[:, None]
        outs.append((state @ read[0][:, None])[:, :, 0])
    return torch.stack(outs)[None]


def called(name: str, scan: Callable[..., Any], given: list[Tensor], others: Any) -> Tensor:
    """What a scan makes of its inputs."""
    if name == "mamba2_chunk_scan":
        x, steps, b, c = given
        how = {"chunk_size": 256, "return_final_states": True}
        return scan(x, steps, others["A"], b, c, **how)[0]
    query, key, value, g, beta = given
    return scan(query, key, value, g=g, beta=beta, output_final_state=True)[0]


def error_of(family: str, seq_len: int, num_shards: int = 4) -> Error:
    """Shards from a state of zero, with what the states of a scan add."""
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    from parallel_plans.huggingface.states.scans import SCANS

    torch.manual_seed(0)
    is_delta = family == "Qwen3-Next"
    name, given, others = (delta_rule if is_delta else mamba2)(seq_len)
    plain = getattr(qwen if is_delta else granite, name)
    wide = {key: x.double() for key, x in others.items()}
    exact = (exact_delta_rule if is_delta else exact_mamba2)(*(x.double() for x in given), **wide)
    state: list[Tensor | None] = [None]

    def pass_on(own: StateMap) -> Tensor | None:
        before = state[0]
        state[0] = own.state if before is None else own.after(before)
        return before

    outs = []
    for parts in zip(*(x.chunk(num_shards, 1) for x in given), strict=True):
        outs.append(called(name, SCANS[name](plain, pass_on, bool(outs)), [*parts], others))
    found = called(name, plain, given, others), torch.cat(outs, 1)
    errors = [((x.double() - exact).norm() / exact.norm()).item() for x in found]
    return Error(family, seq_len, *errors)


def times(console: Console, measurements: list[Measurement], whole: dict[str, Any]) -> None:
    """Print a row for each layer, length and number of ranks."""
    numbers = ("one, s", "its tokens, s", "rank, s", "rank/its tokens")
    numbers += ("ranks, s", "ranks/one", "ranks/linear", "KiB sent")
    result: Table = table_of(("layer", "tokens", "ranks", "what"), numbers)
    for m in measurements:
        case, alone = m.case, whole[f"{m.case.family}, {m.case.seq_len}"]
        parts = [sum(x) for x in case.parts]
        for what in range(2):
            one, same, own = (sum(x[: what + 1]) for x in (alone, case.same, parts))
            taken = median(x[what] for x in m.seconds)
            name = "forward + backward" if what else "forward"
            texts = case.family, f"{case.seq_len:,}", str(case.world_size), name
            shown = f"{one:.3f}", f"{same:.3f}", f"{own:.3f}", f"{own / same:.2f}"
            linear = taken / same / case.world_size
            last = f"{taken:.3f}", f"{taken / one:.3f}", f"{linear:.3f}", f"{m.sent / 1024:,.0f}"
            result.add_row(*texts, *shown, *last)
    console.print(result)


def report(
    console: Console, measurements: list[Measurement], whole: dict[str, Any], errors: list[Error]
) -> None:
    """Print what was measured, in Markdown."""
    console.print(
        "\nFloat32, one thread a rank, contiguous, gloo. *One* is one process with all tokens, "
        "*its tokens* one with those of\na rank, and *rank* a rank without its messages: seconds "
        "of the processor, the least of several runs. *Ranks* wait for\nthe parts of a rank, and "
        "send real messages in between: the median step. *Linear* is W times *its tokens*, as if "
        "one\nprocess took no longer for a token of a long sequence. KiB are what the first rank "
        "sends forward, and the last one\nbackward: the busiest.\n"
    )
    times(console, measurements, whole)
    console.print("\nRelative error of outputs against float64, slow decays, 4 shards:\n")
    table = table_of(("scan", "tokens"), ("one process", "shards", "shards/one"))
    for x in errors:
        shown = f"{x.whole:.2e}", f"{x.sharded:.2e}", f"{x.sharded / x.whole:.2f}"
        table.add_row(x.family, f"{x.seq_len:,}", *shown)
    console.print(table)


def main() -> None:
    quick = is_quick(__doc__)
    about = origin()
    torch.set_num_threads(1)
    lengths, sizes = ((1024,), (2,)) if quick else ((16384, 65536), (4, 8))
    repeats = 1 if quick else 2
    whole: dict[str, Any] = {}
    cases: list[Case] = []
    for family in FAMILIES:
        layer = layer_of(family)
        for seq_len in lengths:
            whole[f"{family}, {seq_len}"] = fastest(partial(whole_seconds, layer, seq_len), repeats)
            for size in sizes:
                parts = fastest(partial(marked_parts, layer, seq_len // size), repeats)
                same = fastest(partial(whole_seconds, layer, seq_len // size), repeats)
                cases.append(Case(family, size, seq_len, parts, same, shapes_of(layer)))
    found: list[dict[str, Any]] = []
    for size in sizes:
        found += spawn(size, measure, [x for x in cases if x.world_size == size])
    measurements = [Measurement(Case(**x["case"]), x["seconds"], x["sent"]) for x in found]
    errors = [error_of(family, lengths[-1]) for family in FAMILIES]
    measured = {"measurements": found, "whole": whole, "errors": [asdict(x) for x in errors]}
    show = partial(report, measurements=measurements, whole=whole, errors=errors)
    publish("states", "Layers with a state over ranks", quick, about, measured, show)


if __name__ == "__main__":
    main()
