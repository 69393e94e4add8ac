"""The adapters of GPU kernels against dense attention, with stand-ins for what they adapt."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from dtensor_ring.compute.kernels import KERNELS, Kernel, Saved, flash_attn3, named_kernel
from dtensor_ring.compute.kernels.cuda_flash import CudaFlash
from dtensor_ring.compute.kernels.registry import able_kernel
from dtensor_ring.planning.tile import CAUSAL
from tests.package_sources import parsed
from tests.packages import CUTE_BACKWARD, CUTE_FORWARD, packages
from tests.rings import Case as RingCase
from tests.segments import PACKED, SegmentsCase, check_part_of_the_keys, check_segments
from tests.test_played import RINGS, Played, check_ring
from tests.tiles import CASES, GPU, HUB, TILES, Case, check_tile, sized

__all__ = ["packages"]  # a fixture

pytestmark = pytest.mark.usefixtures("packages")

OF_SEGMENTS = [name for name in GPU + HUB if named_kernel(name).has_segments]


def supporting(name: str, case: Case | SegmentsCase) -> Kernel:
    """The kernel that serves the case, apart from the dtype and the device; or skips."""
    problem = replace(case.problem("cuda"), dtype=torch.bfloat16)
    able, reason = able_kernel(named_kernel(name), problem)
    if reason:
        pytest.skip(f"{name}: {reason}")
    return able


def in_turn(cases: Iterable[str], every: int, always: Iterable[str] = ()) -> list[Any]:
    """Case by case, each kernel: every n-th of them in turn, and cudnn, which serves few cases."""
    turns = {name: turn for turn, name in enumerate(x for x in GPU if x != "cudnn")}
    return [
        pytest.param(
            *(case, name),
            id=f"{case}-{name}",
            marks=()
            if case in always or name not in turns or (number + turns[name]) % every == 0
            else pytest.mark.repeats,
        )
        for (number, case), name in product(enumerate(cases), GPU)
    ]


@pytest.mark.parametrize(("case", "name"), in_turn(CASES, 3, always=TILES))
def test_tile(name: str, case: str) -> None:
    """Each kernel has each tile, and each option in one of the shapes."""
    check_case(name, CASES[case])


def check_case(name: str, case: Case) -> None:
    if case.dtype == torch.float64:
        pytest.skip("lse is float32")
    case = sized(name, case)
    check_tile(supporting(name, case), case, "cpu")


@pytest.mark.parametrize("name", HUB)
@pytest.mark.parametrize(
    "case",
    [  # Their adapters are those of the packages: a sample shows that they are reached.
        pytest.param(case, id=name, marks=pytest.mark.repeats if number % 4 else ())
        for number, (name, case) in enumerate(CASES.items())
    ],
)
def test_tile_of_the_hub(name: str, case: Case) -> None:
    check_case(name, case)


@pytest.mark.parametrize("name", OF_SEGMENTS)
@pytest.mark.parametrize("case", PACKED.values(), ids=list(PACKED))
def test_segments(name: str, case: SegmentsCase) -> None:
    case = sized(name, case)
    check_segments(supporting(name, case), case, "cpu")


@pytest.mark.parametrize("name", OF_SEGMENTS)
def test_backward_of_segments_with_a_part_of_the_keys(name: str) -> None:
    check_part_of_the_keys(named_kernel(name), torch.float32, "cpu")


@pytest.mark.parametrize(
    "name", [name for name in GPU + HUB if "flash" in name and name != "cuda_flash"]
)
def test_deterministic_gradients_are_asked_for(name: str) -> None:
    """The stand-ins compare what they are told with PyTorch's setting."""
    torch.use_deterministic_algorithms(True)
    try:
        check_tile(named_kernel(name), TILES["causal"], "cpu")
        if named_kernel(name).has_segments:
            check_segments(named_kernel(name), next(iter(PACKED.values())), "cpu")
    finally:
        torch.use_deterministic_algorithms(False)


def test_cudnn_sees_one_order_of_the_gradient_of_out() -> None:
    """A graph that it keeps holds the strides of both, but is not found by them."""
    torch.manual_seed(0)
    query, key, value, grad_out = (torch.randn(2, 2, 5, 8) for _ in range(4))
    options = Case().launch, Case().scores
    out, lse = KERNELS["cudnn"].forward(query, key, value, *options)
    wide = torch.zeros(2, 2, 9, 8)[:, :, :5]
    found = [
        KERNELS["cudnn"].backward(Saved(slope, saved, lse), query, key, value, *options)
        for slope in (grad_out, wide.clone().copy_(grad_out), wide.copy_(grad_out))
        for saved in (out, out.clone(memory_format=torch.contiguous_format))
    ]
    for grads in found[1:]:
        torch.testing.assert_close(grads, found[0], rtol=0, atol=0)


@pytest.mark.parametrize("case", [Case(1, 5), Case(5, 1), Case(1, 1, CAUSAL)])
@pytest.mark.parametrize("dims", [(8, 8), (8, 16)])
def test_cudnn_leaves_a_single_query_or_key_to_others(
    case: Case, dims: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To flash attention, or to the reference if head dims differ."""
    attend, called = CudaFlash.attend, []

    def spied(self: CudaFlash, *arguments: Any) -> Any:
        called.append(arguments)
        return attend(self, *arguments)

    monkeypatch.setattr(CudaFlash, "attend", spied)
    monkeypatch.setattr(CudaFlash, "missing", lambda self: None)
    check_tile(KERNELS["cudnn"], replace(case, head_dims=dims), "cpu")
    assert bool(called) == (dims[0] == dims[1])


OF_RINGS = [*in_turn(RINGS, 6), *(pytest.param("zigzag", x, id=f"zigzag-{x}") for x in HUB)]


@pytest.mark.parametrize(("ring", "name"), OF_RINGS)
def test_ring(name: str, ring: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_kernel(name).__class__, "missing", lambda self: None)
    check_ring(RingCase(RINGS[ring]), Played(name, "cpu", torch.float32), monkeypatch)


def test_which_kernels_have_segments() -> None:
    flash = ["flash_attn3", "flash_attn4", "flash_attn2", "cuda_flash"]
    assert [*flash, "cudnn_sdpa", *HUB] == OF_SEGMENTS


@pytest.mark.parametrize("has_argument", [True, False])
def test_flash_attn3_leaves_multiprocessors_to_messages(
    has_argument: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward, in steps whose hops move anything; older builds have no such argument."""
    margins: list[int] = []
    known = flash_attn3._arguments(flash_attn3.flash.fwd)
    assert "sm_margin" in known
    arguments = known if has_argument else known - {"sm_margin"}
    monkeypatch.setattr(flash_attn3, "_arguments", lambda op: arguments)
    forward, real = KERNELS["flash_attn3"], flash_attn3.flash

    class Noting:
        bwd = real.bwd

        @staticmethod
        def fwd(*args: Any, **kwargs: Any) -> Any:
            margins.append(kwargs.get("sm_margin", 0))
            return real.fwd(*args, **kwargs)

    monkeypatch.setattr(flash_attn3, "flash", Noting)
    monkeypatch.setattr(forward.__class__, "missing", lambda self: None)
    check_ring(RingCase(RINGS["zigzag"]), Played(forward.name, "cpu", torch.float32), monkeypatch)
    ranks, steps = 4, 4
    expected = ranks * (steps - 1) if has_argument else 0  # nothing is sent in the last step
    assert margins.count(flash_attn3.SM_MARGIN) == expected
    assert margins.count(0) == len(margins) - expected


@pytest.mark.parametrize(
    ("name", "text"), [("_flash_attn_fwd", CUTE_FORWARD), ("_flash_attn_bwd", CUTE_BACKWARD)]
)
def test_signatures_of_flash_attn4(name: str, text: str) -> None:
    """Those of the stand-in are the first of the package's, which has the same defaults."""
    tree = parsed("flash_attn", "cute/interface.py", "flash-attn-4")
    (found,) = (x.args for x in ast.walk(tree) if isinstance(x, ast.FunctionDef) and x.name == name)
    assert spelled(found)[: len(text.split(", "))] == text.split(", ")


def spelled(arguments: ast.arguments) -> list[str]:
    """Each argument as `"x"` or `"x=None"`."""
    names = [x.arg for x in arguments.args]
    plain = len(names) - len(arguments.defaults)
    defaults = [f"={ast.unparse(x)}" for x in arguments.defaults]
    return [x + y for x, y in zip(names, [""] * plain + defaults, strict=True)]
