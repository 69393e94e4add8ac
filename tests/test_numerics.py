"""The page on numerics: how it measures, and what it says."""

from __future__ import annotations

from itertools import product

import pytest
import torch
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
from tests.pool import Pool

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
