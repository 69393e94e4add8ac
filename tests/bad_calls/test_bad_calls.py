"""Calls with arguments of every kind: valid and right, or an error that names the argument.

`pytest tests/bad_calls --bad-calls 10000` tries as many instead of 300.
"""

from __future__ import annotations

import re
import signal
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import dtensor_ring
from tests.bad_calls.arguments import STRANGE
from tests.bad_calls.calls import reset
from tests.bad_calls.functions import FUNCTIONS
from tests.drawn import different
from tests.pool import Pool

CLEAR = (TypeError, ValueError, IndexError, NotImplementedError)
SECONDS = 10
"""A call that takes longer hangs."""
ARGUMENTS = [(name, argument) for name, found in FUNCTIONS.items() for argument in found.right]
IN_WORDS = {"seq_len": "(seq_len|sequence length)"}
WITHOUT_ARGUMENTS = {"Contiguous", "Striped", "ZigZag", "Transport", "available_kernels"}
WITHOUT_ARGUMENTS |= {"OutOfBlocks", "RingError"}  # the package raises them, users do not
WITHOUT_ARGUMENTS |= {"InBlocks"}  # it takes an axis: tests/dtensor/test_in_blocks.py
WITHOUT_ARGUMENTS |= {"prefer_measured"}  # it takes files: tests/lab/test_machine.py
WITHOUT_ARGUMENTS |= {"Machine"}  # files have its fields: tests/lab/test_machine.py


class Call(NamedTuple):
    """A function, which of its right values the arguments get, and who gets a strange one."""

    function: str
    right: tuple[int, ...]
    strange: tuple[tuple[str, str], ...]
    """Arguments, and the names of what they get instead."""


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """None, one or two strange arguments; all others are right."""
    function, first = draw(st.sampled_from(ARGUMENTS))
    values = FUNCTIONS[function].right
    second = draw(st.sampled_from([first, *values]))
    names = draw(st.sampled_from([(), (first,), (first, second)]))
    strange = {name: draw(st.sampled_from(sorted(STRANGE))) for name in names}
    right = tuple(draw(st.integers(0, len(makes) - 1)) for makes in values.values())
    return Call(function, right, tuple(sorted(strange.items())))


def test_all_functions_are_called() -> None:
    called = {name.partition(".")[0].partition(" ")[0].rstrip(",") for name in FUNCTIONS}
    assert set(dtensor_ring.__all__) <= called | WITHOUT_ARGUMENTS


def test_bad_calls(pool: Pool, request: pytest.FixtureRequest) -> None:
    wanted = request.config.getoption("--bad-calls")
    tried = different(calls(), wanted)
    counts, wrong = pool.run(1, _outcomes, tried, timeout=60 + wanted)[0]
    request.node.user_properties.extend(counts.items())
    assert not wrong, "\n".join(wrong[:50])


def _outcomes(tried: list[Call]) -> tuple[Counter[str], list[str]]:
    """How many were valid or refused, and what is wrong with the others."""
    warnings.simplefilter("ignore")  # torch warns of sparse and nested tensors
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    counts: Counter[str] = Counter()
    wrong = []
    for call in tried:
        reset(mesh)
        fault = _fault(call, mesh, counts)
        if fault:
            wrong.append(f"{call}: {fault}")
    return counts, wrong


def _fault(call: Call, mesh: Any, counts: Counter[str]) -> str | None:
    function, strange = FUNCTIONS[call.function], dict(call.strange)
    chosen = zip(function.right.items(), call.right, strict=True)
    makes = {name: right[i] for (name, right), i in chosen}
    makes |= {name: STRANGE[label] for name, label in strange.items()}
    arguments = {name: make(mesh) for name, make in makes.items()}
    try:
        with _deadline():
            result = function.call(mesh, **arguments)
    except CLEAR as error:
        counts["calls refused in words"] += 1
        return None if _names(error, strange) else f"no argument named in {error!r}"
    except BaseException as error:
        return f"raw {error!r}"
    try:
        function.check(arguments, result)
    except Exception as error:
        return f"accepted, and wrong: {error!r}"
    counts["calls valid and right"] += 1
    return None


def _names(error: Exception, strange: dict[str, str]) -> bool:
    """Whether the message names one of the strange arguments."""
    return any(re.search(rf"\b{IN_WORDS.get(name, name)}\b", str(error)) for name in strange)


@contextmanager
def _deadline() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
