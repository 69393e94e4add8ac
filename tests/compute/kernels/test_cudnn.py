"""The adapters of cuDNN's attention, with stand-ins and their signatures."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_ring import Contiguous, Mask, ZigZag
from dtensor_ring.compute import capture
from dtensor_ring.compute.kernels import KERNELS, Problem, Saved, cudnn_flex, cudnn_sdpa
from dtensor_ring.compute.kernels.kernel import Intervals
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.planning.intervals import intervals_of
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.tile import CAUSAL as CAUSAL_TILE
from tests import flex_package, sdpa_package
from tests.flex_package import Plan
from tests.intervals import CASES, OPTIONS, IntervalsCase, check_intervals
from tests.package_sources import arguments_of, parsed, plain_arguments
from tests.packages import packages
from tests.rings import Case as RingCase
from tests.rings import Ring
from tests.segments import PACKED, SegmentsCase, check_segments
from tests.test_played import Played, check_ring
from tests.tiles import CAUSAL, TILES, Case, check_tile

__all__ = ["packages"]  # a fixture

pytestmark = pytest.mark.usefixtures("packages")

FLEX = KERNELS["cudnn_flex"]


@pytest.fixture
def made() -> Iterator[list[bool]]:
    """The plans that are made, none of which is there before."""
    cudnn_flex._PLANS.clear()
    Plan.made.clear()
    yield Plan.made
    cudnn_flex._PLANS.clear()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("option", [None, *OPTIONS])
def test_intervals(name: str, option: str | None) -> None:
    given = CASES[name]
    if option is not None:
        given = IntervalsCase(given.tiles, replace(given.case, **OPTIONS[option]))
    problem = replace(given.problem("cuda"), dtype=torch.bfloat16)
    if reason := FLEX.supports(problem):
        pytest.skip(reason)
    check_intervals(FLEX, given)


@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (128, 128)])
def test_large_head_dims(dims: tuple[int, int]) -> None:
    """Backward wants memory in multiples of 128 bytes where they are 256."""
    given = CASES["window"]
    case = replace(given.case, head_dims=dims, strided=True, scale=0.05, dtype=torch.bfloat16)
    check_intervals(FLEX, IntervalsCase(given.tiles, case))


@pytest.mark.parametrize("grad_lse", [False, True])
def test_gradient_of_lse_of_a_small_tile(grad_lse: bool) -> None:
    """Which flash attention would compute, if it had one."""
    check_tile(FLEX, replace(TILES["causal"], grad_lse=grad_lse, heads=(4, 2)), "cpu")


def test_few_queries_make_no_plan(made: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """As those to a cache, whose keys are others for each token."""
    called: list[object] = []

    def flash_or_reference(query: Tensor, value: Tensor) -> Reference:
        called.append(query)
        return Reference()

    monkeypatch.setattr(cudnn_flex, "flash_or_reference", flash_or_reference)
    check_tile(FLEX, Case(cudnn_flex.THIN, 300), "cpu")
    assert len(called) == 2, "forward and backward"
    assert not made
    check_tile(FLEX, Case(cudnn_flex.THIN + 1, 300), "cpu")
    assert made == [False, True]


def test_memory_that_is_not_aligned_is_copied() -> None:
    """The package refuses it."""

    class Odd(Case):
        def tensor(self, heads: int, length: int, head_dim: int, device: str) -> Tensor:
            flat = torch.randn(self.batch * heads * length * head_dim + 1)
            return flat[1:].view(self.batch, heads, length, head_dim)

    class Wide(Case):
        def tensor(self, heads: int, length: int, head_dim: int, device: str) -> Tensor:
            wide = torch.randn(self.batch, heads, length, head_dim + 8)
            return wide[..., :head_dim].to(self.dtype)

    check_tile(FLEX, Odd(200, 200, CAUSAL_TILE), "cpu")
    check_tile(FLEX, Wide(200, 200, CAUSAL_TILE, head_dims=(256, 256), scale=0.05), "cpu")


def test_a_plan_is_made_once(made: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """For all layers and calls; backward makes one that serves forward, too."""
    monkeypatch.setattr(FLEX.__class__, "missing", lambda self: None)
    ring = Ring(ZigZag(), 2, 512, Mask.sliding(40))
    steps = [step for plan in ring.plans() for step in plan.steps]
    num_steps = sum(len(x.tiles) > 1 or is_large(x) for x in steps)
    assert 0 < num_steps < len(steps)
    played = Played("cudnn_flex", "cpu", torch.float32)
    check_ring(RingCase(ring), played, monkeypatch)
    assert sorted(made) == [False] * num_steps + [True] * num_steps
    check_ring(RingCase(ring), played, monkeypatch)
    assert len(made) == 2 * num_steps
    check_ring(RingCase(ring, batch=3), played, monkeypatch)
    assert len(made) == 4 * num_steps, "plans fit one shape"


def is_large(step: Step) -> bool:
    """Whether it has one tile, of many queries."""
    return any(tile.rows[1] - tile.rows[0] > cudnn_flex.THIN for tile in step.tiles)


def test_plans_are_kept_by_what_they_fit(made: list[bool]) -> None:
    given = CASES["window"]
    launch = given.launch

    def run(dtype: torch.dtype = torch.float32, heads: tuple[int, int] = (2, 2)) -> int:
        case = replace(given.case, dtype=dtype, heads=heads)
        q = case.tensor(heads[0], case.rows, 8, "cpu")
        k = case.tensor(heads[1], case.cols, 8, "cpu")
        FLEX.forward(q, k, k, launch, case.scores)
        return len(made)

    assert [run(), run(), run(torch.bfloat16), run(heads=(4, 2)), run()] == [1, 1, 2, 3, 3]


def test_queries_that_record_gradients(made: list[bool]) -> None:
    """An op below autograd may still see them."""
    given = CASES["documents"]
    case = given.case
    q, k, v = (case.tensor(2, 140, 8, "cpu").requires_grad_() for _ in range(3))
    out, lse = FLEX.forward(q, k, v, given.launch, case.scores)
    assert not out.requires_grad
    FLEX.backward(Saved(out, out, lse), q, k, v, given.launch, case.scores)
    assert made == [False, True]


class Device:
    """A tensor's device and shape, and no more."""

    device, shape, dtype = torch.device("cuda"), torch.Size((1, 100, 2, 8)), torch.bfloat16


def test_no_plan_while_a_graph_is_captured(
    made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for the GPU."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(Intervals, "on", lambda self, device: torch.zeros(1, 1, 1))
    x: Any = Device()
    with pytest.raises(RuntimeError, match="run the same attention, with its backward, once"):
        cudnn_flex._plan_of(CASES["window"].launch, x, x, x)
    assert not made


def test_streams_that_read_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is told to the memory once; a graph keeps the plan for ever."""
    stream, recorded = SimpleNamespace(cuda_stream=7), []
    plan = cudnn_flex._Plan.__new__(cudnn_flex._Plan)
    tensor = SimpleNamespace(record_stream=lambda x: recorded.append(x.cuda_stream))
    plan.made, plan._tensors, plan._streams = "made", (tensor, tensor), set()  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    capturing = [False, False, False, True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing.pop(0))
    monkeypatch.setattr(capture, "_CAPTURED", set())
    device = torch.device("cuda")
    assert [plan.read(device), plan.read(device)] == ["made", "made"]
    assert recorded == [7, 7]
    stream.cuda_stream = 8
    plan.read(device)
    assert recorded == [7, 7, 8, 8]
    assert not capture._CAPTURED
    plan.read(device)
    assert {plan} == capture._CAPTURED


SIGNATURES = {
    "plan/builder.py": {"create_mask_plan": flex_package.CREATE},
    "execution.py": {
        "_flex_attention_forward": flex_package.FORWARD,
        "_flex_attention_backward": flex_package.BACKWARD,
        "_plan_tensors": flex_package.TENSORS,
    },
}


@pytest.mark.parametrize("file", SIGNATURES)
def test_signatures_are_those_of_the_package(file: str) -> None:
    """Its sources are read, as importing them takes CUDA's libraries."""
    functions = {x.name: x.args for x in ast.walk(of_flex(file)) if isinstance(x, ast.FunctionDef)}
    for name, text in SIGNATURES[file].items():
        assert plain_arguments(functions[name]) == arguments_of(text), name


def test_head_dims_are_those_of_the_package() -> None:
    body = [x for x in of_flex("plan/validation.py").body if isinstance(x, ast.Assign)]
    known: dict[str, Any] = {}
    for assign in body:
        if ast.unparse(assign.targets[0]).endswith("HEAD_DIMS"):
            exec(ast.unparse(assign), known)
    assert set(known["SUPPORTED_HEAD_DIMS"]) == set(flex_package.HEAD_DIMS)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_the_package_accepts_what_it_gets(
    name: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own checks, of tensors without content."""
    known: dict[str, Any] = {"__name__": "validation"}
    arch = ModuleType("arch")
    arch.get_device_arch = lambda index: 90  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cudnn.flex_attention.runtime.arch", arch)
    monkeypatch.setitem(sys.modules, "validation", ModuleType("validation"))
    exec(compile(of_flex("plan/validation.py"), "validation.py", "exec"), known)
    lengths = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"))
    found: list[Any] = []

    def create(*tensors: Tensor, build_backward: bool) -> None:
        found.append(known["validate_create_mask_plan_inputs"](*tensors, **lengths))

    monkeypatch.setattr(sys.modules[flex_package.BUILDER], "create_mask_plan", create)
    monkeypatch.setattr(sys.modules[flex_package.EXECUTION], "_plan_tensors", lambda *x, **y: ())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    case, tiles = CASES[name].case, CASES[name].tiles
    intervals = Intervals(intervals_of(tiles, 2).ends[:batch])
    with FakeTensorMode():
        ends = torch.empty(intervals.ends.shape, dtype=torch.int32, device="cuda")
        monkeypatch.setattr(Intervals, "on", lambda self, device: ends)
        q, k = (
            torch.empty(batch, heads, size, 64, dtype=torch.bfloat16, device="cuda").transpose(1, 2)
            for heads, size in ((4, case.rows), (2, case.cols))
        )
        cudnn_flex._made(intervals, q, k, k, True)
    (geometry,) = found
    assert (geometry.total_q, geometry.total_k) == (batch * case.rows, batch * case.cols)
    assert (geometry.hmask, geometry.nfunc) == (1, intervals.ends.shape[1])


def of_flex(file: str) -> ast.Module:
    return parsed("cudnn", f"flex_attention/{file}", "nvidia-cudnn-frontend")


@pytest.mark.pairs
@pytest.mark.parametrize("head_dim", [8, 64, 128, 192, 256])
@pytest.mark.parametrize("value_head_dim", [8, 64, 128, 256])
@pytest.mark.parametrize("grouped", [False, True])
def test_what_is_served_has_gradients(head_dim: int, value_head_dim: int, grouped: bool) -> None:
    dims = head_dim, value_head_dim
    if FLEX.supports(Problem("cuda", torch.bfloat16, *dims, grouped=grouped)) is None:
        assert dims in flex_package.HEAD_DIMS
        assert dims not in flex_package.NO_GRADIENTS
        assert not grouped or head_dim == value_head_dim
    else:
        assert dims not in flex_package.EQUAL


# cuDNN's ops with windows and packed sequences: what the tests of all adapters leave open.

SDPA = KERNELS["cudnn_sdpa"]


@pytest.mark.parametrize(
    ("case", "is_served"),
    [
        (Case(9, 8, Mask(2, 1)), False),
        (Case(9, 8, Mask(None, 1)), True),
        (Case(8, 8, Mask(2, 1)), True),
        (Case(8, 9, Mask(2, 1)), True),
        (Case(1, 9), False),
        (Case(9, 1), False),
    ],
)
def test_tiles_that_cudnn_does_not_take(
    case: Case, is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a single query or key, and windows of more queries than keys."""
    called: list[object] = []

    def others(query: Any, value: Any) -> Reference:
        called.append(query)
        return Reference()

    monkeypatch.setattr(cudnn_sdpa, "flash_or_reference", others)
    check_tile(SDPA, case, "cpu")
    assert len(called) == (0 if is_served else 2)


@pytest.fixture
def graphs() -> Iterator[set[tuple[Any, ...]]]:
    """Those that packed sequences would need."""
    sdpa_package.GRAPHS.clear()
    yield sdpa_package.GRAPHS
    sdpa_package.GRAPHS.clear()


def test_other_documents_need_few_other_graphs(graphs: set[tuple[Any, ...]]) -> None:
    """Forward and backward have one each; one takes cuDNN a tenth of a second or more."""
    generator = Random(0)
    for _ in range(40):
        cuts = (0, *sorted(generator.sample(range(1, 512), generator.randint(9, 15))), 512)
        check_segments(SDPA, SegmentsCase(cuts, cuts, CAUSAL), "cpu")
    assert len(graphs) <= 2 * 10


def test_segments_are_rounded_once() -> None:
    segments = PACKED["gaps"].launch.segments
    assert segments is not None
    assert cudnn_sdpa._rounded(segments) is cudnn_sdpa._rounded(segments)
    assert cudnn_sdpa._rounded(segments).rows == (0, 4, 4, 9, 15, 15, 15, 15, 15)


@pytest.mark.parametrize("layout", [Contiguous(), ZigZag()])
def test_rings_of_windows(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SDPA.__class__, "missing", lambda self: None)
    ring = Ring(layout, 2, 256, Mask.sliding(40))
    for case in (RingCase(ring), RingCase(replace(ring, documents=((0, 50, 51, 180, 256),)))):
        check_ring(case, Played("cudnn_sdpa", "cpu", torch.float32), monkeypatch)


def test_schemas_are_those_of_the_package() -> None:
    tree = parsed("cudnn", "sdpa/fwd/torch_op.py", "nvidia-cudnn-frontend")
    calls = [x for x in ast.walk(tree) if isinstance(x, ast.Call)]
    defined = [x.args[0] for x in calls if ast.unparse(x.func) == "_lib.define"]
    found = [ast.literal_eval(x) for x in defined]
    assert found == [f"{name}{schema}" for name, schema in sdpa_package.SCHEMAS.items()]
    (function,) = [
        x.args
        for x in ast.walk(tree)
        if isinstance(x, ast.FunctionDef) and x.name == cudnn_sdpa.PADDED
    ]
    assert plain_arguments(function) == arguments_of(sdpa_package.PADDED)
