"""Numerics: as exact as one process, at extremes and in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, product
from math import inf, nan

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.numerics import (
    DTYPES,
    KERNEL,
    LAYOUTS,
    PAGE,
    PROBLEMS,
    RESULTS,
    SUMMARY,
    SUMMARY_MARKERS,
    WORLD_SIZES,
    Problem,
    Row,
    measure,
    single_kernel,
)
from docs.marked import parts
from dtensor_ring import Balanced, Contiguous, Mask
from dtensor_ring.all_to_all.ulysses import is_exchanged, ulysses_attention
from dtensor_ring.compute.kernels import Launch, Scores
from dtensor_ring.compute.kernels.cpu_flash import CpuFlash
from dtensor_ring.compute.memory import WHOLE
from dtensor_ring.ops.options import flatten
from dtensor_ring.ops.ring_op import ring_op
from dtensor_ring.planning.mask import as_documents
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.transport.transport import TransferPolicy
from tests.drawn import TOLERANCES, different, documents_of
from tests.layouts import LAYOUTS as ALL_LAYOUTS
from tests.played_group import PlayedGroup, play_group
from tests.pool import Pool
from tests.rings import Case, Ring, local

CASES = {
    "causal": Problem(48),
    "all": Problem(48, window=9, cu_seqlens=(0, 7, 31, 48), sinks=(0.5, -1.0, 2.0, 0.0)),
}


def _tolerance(dtype: str) -> float:
    return 16 * torch.finfo(getattr(torch, dtype)).eps


def _measured(problem: Problem, layout: str, world_size: int) -> list[list[float]]:
    mesh = init_device_mesh("cpu", (world_size,))
    return [measure(problem, dtype, layout, mesh) for dtype in DTYPES]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_ring_is_as_exact_as_its_dtype(pool: Pool, case: str, layout: str) -> None:
    for found in pool.run(2, _measured, CASES[case], layout, 2):
        for dtype, errors in zip(DTYPES, found, strict=True):
            assert all(0 < error < _tolerance(dtype) for error in errors), (dtype, errors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_single_kernel_is_as_exact_as_its_dtype(case: str, dtype: str) -> None:
    errors = single_kernel(CASES[case], dtype)
    assert all(0 < error < _tolerance(dtype) for error in errors), errors


def _rows_of_page() -> list[Row]:
    """The rows of the large tables, read back from the page."""
    rows, title = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("### "):
            title = line.removeprefix("### ")
        cells = line.strip("|").replace(" ", "").split("|")
        if len(cells) == 3 + len(RESULTS) and cells[0] in DTYPES:
            dtype, ranks, layout, *errors = cells
            rows.append(Row(title, dtype, int(ranks), layout, [float(x) for x in errors]))
    return rows


def test_page_has_a_row_for_each_case() -> None:
    found = [(row.problem, row.dtype, row.ranks, row.layout) for row in _rows_of_page()]
    expected = {*product(PROBLEMS, DTYPES, WORLD_SIZES, LAYOUTS)}
    expected |= {*product(PROBLEMS, DTYPES, (1,), (KERNEL.replace(" ", ""),))}
    assert len(found) == len(expected)
    assert {*found} == expected


def test_float32_errors_in_the_page_are_those_of_the_kernel() -> None:
    rows = [row for row in _rows_of_page() if row.dtype == "float32"]
    of_kernel = {row.problem: row.errors for row in rows if row.layout.startswith("aten")}
    for row in rows:
        for name, error, kernel in zip(RESULTS, row.errors, of_kernel[row.problem], strict=True):
            assert error <= 4 * kernel, (row, name)


def test_the_summary_is_that_of_all_rows() -> None:
    causal = [row for row in _rows_of_page() if row.problem == next(iter(PROBLEMS))]
    _, written, _ = parts(SUMMARY.read_text(), *SUMMARY_MARKERS)
    found = [line.strip("| ").split(" | ") for line in written.splitlines()[2:]]
    assert [dtype for dtype, *_ in found] == list(DTYPES)
    for dtype, *ratios in found:
        here = [row for row in causal if row.dtype == dtype]
        (kernel,) = (row.errors for row in here if row.layout.startswith("aten"))
        rings = zip(*(row.errors for row in here if not row.layout.startswith("aten")), strict=True)
        expected = [max(errors) / error for errors, error in zip(rings, kernel, strict=True)]
        # The errors of the page have two digits.
        assert [float(x) for x in ratios] == pytest.approx(expected, rel=0.1)


def _rows_of(begin: str) -> list[list[str]]:
    """The rows of a table of the summary, without its heading."""
    _, part, _ = parts(SUMMARY.read_text(), f"<!-- {begin}", f"<!-- end of {begin.split(':')[0]}")
    rows = [line.strip("| ").split(" | ") for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def test_eight_bits_have_the_errors_that_are_said() -> None:
    """Rotation and means help where there are outliers, and int8 is better, also in training."""
    found = {tuple(row[:3]): float(row[5]) for row in _rows_of("eight bits: written")}
    for numbers in ("outliers", "normal", "trained"):
        int8, fp8 = (found[numbers, x, "`kv_dtype`, blocks of 64"] for x in ("int8", "fp8"))
        assert found[numbers, "bfloat16", ""] < int8 < fp8
        assert int8 < found[numbers, "int8", "blocks of 64, as they are"]
    assert found["outliers", "int8", "`kv_dtype`, blocks of 64"] <= 2.0e-3


def test_sums_of_gradients_are_not_in_eight_bits_for_a_reason() -> None:
    sums = {tuple(row[:2]): [float(x) for x in row[2:]] for row in _rows_of("sums of gradients: w")}
    for numbers in ("outliers", "normal"):
        for format in ("int8", "fp8"):
            rounded, narrow = sums[numbers, f"{format}, blocks of 64"], sums[numbers, "bfloat16"]
            assert all(x > 2 * y for x, y in zip(rounded, narrow, strict=True))


def test_training_in_eight_bits_ends_within_half_a_percent_of_bfloat16() -> None:
    """In each training, and by the mean of all."""
    rows = _rows_of("losses: written")
    losses = {title: [float(x) for x in cells[:-1]] for title, *cells in rows}
    narrow = losses["bfloat16"]
    assert len(narrow) == 3 + 1, "seeds, and the mean"
    for format in ("int8", "fp8"):
        apart = [abs(x / y - 1) for x, y in zip(losses[format], narrow, strict=True)]
        assert max(apart) <= 0.005


# Infinities and NaN come out where dense attention has them, and stay within their document.

CAUSAL, FULL = Mask.causal(), Mask.full()
EXTREME_DTYPES = torch.float32, torch.bfloat16, torch.float64
KERNELS = None, None, "reference"
NAMES = "out", "lse", "dq", "dk", "dv"
SHARDS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17)
"""Tokens of a rank: from fewer than a vector of aten's kernel holds to more."""


@dataclass(frozen=True)
class Poke:
    """An extreme number in one token of the query, key or value."""

    case: Case
    tensor: int
    number: float
    token: int

    def inputs(self) -> list[Tensor]:
        inputs = self.case.inputs()
        inputs[self.tensor][:, :, self.token, 1] = self.number
        return inputs

    def attend(self, group: PlayedGroup) -> list[Tensor]:
        """Out, lse and gradients of a rank."""
        positions = self.case.ring.positions(group.rank())
        shards = [local(x, positions).requires_grad_() for x in self.inputs()]
        outputs = self.case.attend(*shards, group_name=group.group_name)
        (grad_out,) = self.case.grads()
        return [*outputs, *torch.autograd.grad(outputs[0], shards, local(grad_out, positions))]

    def expected(self) -> list[Tensor]:
        """The same of the whole sequence, dense and in float64, of visible pairs alone.

        A product with a weight of 0 would be NaN where nothing is seen.
        """
        inputs = [x.double().requires_grad_() for x in self.inputs()]
        hidden = ~self.case.ring.visible()[:, None, :, :, None]
        query = inputs[0].unsqueeze(3)
        keys, values = (
            x.repeat_interleave(query.shape[1] // x.shape[1], 1).unsqueeze(2).masked_fill(hidden, 0)
            for x in inputs[1:]
        )
        scores = self.case.scale * (query * keys).sum(-1).masked_fill(hidden[..., 0], -inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -inf, 0).unsqueeze(-1)).exp()
        out = (weights.unsqueeze(-1) * values).sum(3)
        grads = torch.autograd.grad(out, inputs, self.case.grads()[0].double())
        return [x.detach() for x in (out, lse, *grads)]

    def elsewhere(self) -> Tensor:
        """Tokens of other documents `(S,)`."""
        (bounds,) = self.case.ring.documents or ((0, self.case.ring.seq_len),)
        ends = torch.tensor(bounds[1:])
        document = torch.bucketize(torch.arange(self.case.ring.seq_len), ends, right=True)
        return document != document[self.token]


COMBINATIONS = list(product(range(3), (nan, inf, -inf)))


def pokes(mask: Mask, world_size: int, num_each: int) -> Iterator[Poke]:
    """In every layout and length, some of the combinations; all else comes in turns."""
    turns = count()
    for layout, length, _ in product(ALL_LAYOUTS, SHARDS, range(num_each)):
        turn = next(turns)
        seq_len = layout.padded_length(length * world_size, world_size)
        documents = ((0, seq_len // 3, seq_len),) if turn % 2 else None
        ring = Ring(layout, world_size, seq_len, mask, documents)
        dtype, kernel = (
            EXTREME_DTYPES[turn // 2 % len(EXTREME_DTYPES)],
            KERNELS[turn // 4 % len(KERNELS)],
        )
        token = 7 * turn % seq_len
        yield Poke(Case(ring, dtype, kernel=kernel), *COMBINATIONS[turn % 9], token)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("mask", [CAUSAL, FULL, Mask.sliding(4)], ids=["causal", "full", "window"])
def test_extremes(mask: Mask, world_size: int, request: pytest.FixtureRequest) -> None:
    """Ranks are threads: it is about numbers, not about what moves them."""
    num_each = 3 if request.config.getoption("--all-cases") else 1
    tried = list(pokes(mask, world_size, num_each))
    by_rank = play_group(world_size, lambda group: [poke.attend(group) for poke in tried])
    wrong = [
        f"{fault}: {poke}"
        for poke, *results in zip(tried, *by_rank, strict=True)
        for fault in _faults(poke, results)
    ]
    assert not wrong, "\n".join(wrong[:10])


def _faults(poke: Poke, by_rank: list[list[Tensor]]) -> Iterator[str]:
    """What is wrong on any rank."""
    wholes = poke.expected()
    for rank, results in enumerate(by_rank):
        positions = poke.case.ring.positions(rank)
        expected = [whole[:, :, positions] for whole in wholes]
        for fault in _faults_of_rank(poke, results, expected, poke.elsewhere()[positions]):
            yield f"rank {rank}: {fault}"


def _faults_of_rank(
    poke: Poke, results: list[Tensor], wanted: list[Tensor], elsewhere: Tensor
) -> Iterator[str]:
    eps = torch.finfo(poke.case.dtype).eps
    for name, x, expected in zip(NAMES, results, wanted, strict=True):
        # What is finite is right: nothing that is not finite in dense attention was lost.
        pair = (y[x.isfinite()].double() for y in (x, expected))
        if not torch.allclose(*pair, rtol=8 * eps, atol=32 * eps):
            yield f"{name} is finite and wrong"
        if not x[:, :, elsewhere].isfinite().all():
            yield f"{name} of another document is not finite"
        if name == "out" and not torch.equal(x[expected.isinf()], expected[expected.isinf()]):
            yield "an infinite output was lost"


def test_halves_of_a_long_square() -> None:
    """Which the kernel for CPUs merges itself."""
    query, key, value = torch.randn(3, 1, 1, 1000, 8)
    value[..., 5, 1] = inf
    square = Launch(WHOLE, WHOLE, CAUSAL), Scores(CAUSAL, 0.3)
    out, _ = CpuFlash().forward(query, key, value, *square)
    assert (out[..., 5:, 1] == inf).all()
    assert out[..., 2:].isfinite().all()


# The same bits at any degree: attentions whose sums have a fixed order, over rings of threads.

WORLDS = 1, 2, 3, 4, 8
FIXED_LAYOUTS = "contiguous", "zigzag", "striped", Balanced.name
MASKS = {"causal": Mask.causal(), "window": Mask.sliding(9), "full": Mask.full()}
FIXED_NAMES = "out", "lse", "dq", "dk", "dv", "dsinks"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """As many for each rank, which are threads themselves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """An attention over a ring, of which only results matter that other rings have, too."""
    world_size, layout = draw(st.sampled_from(WORLDS)), draw(st.sampled_from(FIXED_LAYOUTS))
    # Striped shards have one length, whatever the world.
    seq_len = draw(st.sampled_from([24, 48, 72, 96, 192])) - draw(st.integers(0, 23))
    seq_len = -(-seq_len // world_size) * world_size if layout == "striped" else seq_len
    batch, mask = draw(st.sampled_from([1, 2])), MASKS[draw(st.sampled_from([*MASKS]))]
    documents = draw(st.none() | documents_of(seq_len, batch, draw(st.integers(1, 5))))
    strategies = [
        "ring",
        "all_gather",
        "direct",
        "ulysses",
        *(["ulysses:2"] * (not world_size % 2)),
    ]
    sharded = as_layout("zigzag")
    if layout == Balanced.name:
        rows = None if documents is None else as_documents(documents)
        sharded = Balanced(mask, seq_len, world_size, rows, block=draw(st.integers(1, 16)))
    elif layout != sharded.name:
        sharded = as_layout(layout)
    strategy = draw(st.sampled_from(strategies))
    ring = Ring(sharded, world_size, seq_len, mask, documents, strategy=strategy)
    heads = draw(st.sampled_from([(8, 8), (16, 8)] if "ulysses" in strategy else [(2, 2), (4, 2)]))
    head_dim = draw(st.sampled_from([8, 32]))
    return Case(
        ring,
        draw(st.sampled_from([torch.float32, torch.bfloat16])),
        heads,
        (head_dim, head_dim),
        batch,
        kernel=draw(st.sampled_from([None, None, "reference"])),
        policy=TransferPolicy(order="fixed", block=draw(st.sampled_from([None, None, 8, 32]))),
        sinks=draw(st.just(()) | st.just(tuple(0.25 * x for x in range(heads[0])))),
        grad_lse=draw(st.sampled_from([False, False, True])),
    )


@pytest.mark.parametrize("wanted", [20, pytest.param(300, marks=pytest.mark.repeats)])
def test_bits_do_not_depend_on_the_number_of_ranks(wanted: int) -> None:
    for case in different(cases(), wanted):
        alone = results_of(replace(case, ring=alone_of(case.ring)))
        for name, x, wanted in zip(FIXED_NAMES, results_of(case), alone, strict=False):
            assert torch.equal(bits_of(x), bits_of(wanted)), (name, case)


def test_they_are_those_of_dense_attention() -> None:
    for case in different(cases(), 12, seed=1):
        for name, x, wanted in zip(FIXED_NAMES, results_of(case), case.expected(), strict=False):
            error = (x.double() - wanted).abs().masked_fill(x == wanted, 0.0).max()
            assert error <= TOLERANCES[case.dtype] * (
                1 + wanted.abs().nan_to_num(posinf=0).max()
            ), (name, case)


def alone_of(ring: Ring) -> Ring:
    return replace(ring, layout=Contiguous(), world_size=1, strategy="ring")


def bits_of(x: Tensor) -> Tensor:
    """Also of zeros and NaN."""
    return x.contiguous().view({2: torch.int16, 4: torch.int32}[x.itemsize])


def results_of(case: Case) -> list[Tensor]:
    """Out, lse and gradients of all tokens, from the shards of threads."""
    ring = replace(case.ring, strategy="ring")  # tokens as they are before an exchange
    inputs, grads = case.inputs(), case.grads()

    def run(group: PlayedGroup) -> list[Tensor]:
        own = ring.positions(group.rank())
        shards = [local(x, own).detach().requires_grad_() for x in inputs]
        sinks = shards[3] if case.sinks else None
        call = case.call(sinks, group.group_name)
        if is_exchanged(call):
            outputs = ulysses_attention(*shards[:3], call)
        else:
            outputs = ring_op(*shards[:3], *flatten(call))
        used = outputs if case.grad_lse else outputs[:1]
        found = torch.autograd.grad(used, shards, [local(x, own) for x in grads])
        return [x.detach() for x in (*outputs, *found)]

    by_rank = play_group(ring.world_size, run)
    results = []
    for shards in zip(*by_rank, strict=True):
        if shards[0].ndim == 1:  # of sinks, which a user sums over the ranks
            results.append(torch.stack(shards).sum(0))
            continue
        whole = shards[0].new_empty(*shards[0].shape[:2], ring.seq_len, *shards[0].shape[3:])
        for rank, part in enumerate(shards):
            whole[:, :, ring.positions(rank)] = part
        results.append(whole)
    return results
