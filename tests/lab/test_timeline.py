"""Time lines of attentions: totals, spans with the labels of profiles, and Chrome traces."""

from __future__ import annotations

import json
import re
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dtensor_ring import Mask, compare_strategies
from dtensor_ring.compute.kernels import Saved, Scores
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.trace import Label
from dtensor_ring.lab.machine import FORMS, Curve, KernelSpeed
from dtensor_ring.lab.simulated_attention import STREAMS, Timeline, simulate_attention
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.ring import ring_backward, ring_forward
from tests.lab.machines import links, round_machine
from tests.played import PlayedTransport, play
from tests.rings import Ring

MACHINE = replace(round_machine(kernel=1e9), inside=links(1e-5, 1e9), host_waits=True)
LABEL = re.compile(r"ring (\w+), step (\d+), source (\d+): (.*)")


def simulated(strategy: str, mask: Mask, **options: Any) -> Timeline:
    asked = mask, 96, 4, (6, 2), 8
    return simulate_attention(*asked, strategy=strategy, machine=MACHINE, **options)


@pytest.mark.parametrize("strategy", ["around", "direct", "all_gather"])
@pytest.mark.parametrize("mask", [Mask.causal(), Mask.sliding(9)])
def test_tiles_and_packs_have_the_labels_of_rings(mask: Mask, strategy: str) -> None:
    plans = Ring(as_layout("zigzag"), 4, 96, mask, strategy=strategy).plans()
    seen: list[tuple[Any, ...]] = []

    def noted(label: Label, what: str) -> Any:
        seen.append((*label, what))
        return nullcontext()

    def attention(rank: int, transport: PlayedTransport) -> None:
        query, key, value, grad = (torch.ones(1, heads, 24, 8) for heads in (6, 2, 2, 6))
        plan, kernel, scores = plans[rank], Reference(), Scores(mask, 0.5)
        out, lse = ring_forward(query, (key, value), plan, kernel, scores, transport)
        saved = Saved(grad, out, lse)
        ring_backward(saved, query, (key, value), plan, kernel, scores, transport)

    with patch.object(Label, "__call__", noted):
        play(4, attention)
    found = simulated(strategy, mask, dtype=torch.float32)
    told = [LABEL.fullmatch(span.label).groups() for span in found.spans()]
    labels = Counter((ring, int(step), int(source), what) for ring, step, source, what in told)
    for what in ("tile", "pack"):
        expected = Counter(x for x in seen if x[3] == what)
        assert {x: n for x, n in labels.items() if x[3] == what} == expected
    assert {x[3] for x in labels} - {"message"} <= {x[3] for x in seen}


@pytest.mark.parametrize("strategy", ["ring", "ulysses:2", "ulysses"])
def test_spans_of_a_stream_follow_one_another_and_end_in_time(strategy: str) -> None:
    found = simulated(strategy, Mask.causal())
    spans = list(found.spans())
    for rank in range(4):
        for stream in STREAMS:
            mine = [x for x in spans if (x.rank, x.stream) == (rank, stream)]
            assert mine
            assert all(x.begin <= x.end for x in mine)
            # A port is free again before the last byte of a message has arrived.
            if stream in ("host", "compute"):
                assert all(one.end <= next.begin + 1e-12 for one, next in pairwise(mine))
    assert max(x.end for x in spans) == pytest.approx(sum(found.seconds))
    assert list(found.spans([1, 3])) == [x for x in spans if x.rank in (1, 3)]
    waits = [x.end - x.begin for x in spans if x.rank == 0 and "wait" in x.label]
    waited = [x.waited[0] for x in (found.forward, found.backward)]
    assert sum(waits) == pytest.approx(sum(waited))


def test_a_chrome_trace_has_all_spans_in_microseconds() -> None:
    found = simulated("ring", Mask.causal())
    events = json.loads(found.chrome_trace([2]))["traceEvents"]
    spans = list(found.spans([2]))
    drawn = [x for x in events if x["ph"] == "X"]
    assert [(x["name"], x["cat"], x["pid"]) for x in drawn] == [
        (x.label, x.stream, 2) for x in spans
    ]
    assert drawn[-1]["ts"] + drawn[-1]["dur"] == pytest.approx(1e6 * spans[-1].end)
    names = [x["args"]["name"] for x in events if x["ph"] == "M"]
    assert names == ["rank 2", *STREAMS]


def test_totals_written_out() -> None:
    """Two ranks, full mask, no kernel time: a hop forward; shards, sums and a wait backward."""
    still = round_machine(kernel=1e30)
    found = simulate_attention(Mask.full(), 8, 2, (1, 1), 4, machine=still, dtype=torch.float32)
    # 4 tokens of a key and a value of 4 numbers of 4 bytes: 128 bytes, 100 of them in a second.
    assert found.num_bytes == (128, 256)
    assert found.seconds == pytest.approx((2.28, 4.56))
    assert found.exposed == pytest.approx((2.28, 4.56))
    assert found.total == pytest.approx(6.84)
    assert str(found).splitlines()[1:] == [
        "forward    2280.000 ms,  2280.000 ms of it waiting for messages, 0.0 MB sent",
        "backward   4560.000 ms,  4560.000 ms of it waiting for messages, 0.0 MB sent",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"strategy": "ulysses"}, "the strategy 'ulysses:8' cannot run this attention: 4 query"),
        ({"machine": "none"}, "machine 'none' is neither a file"),
        ({"dtype": torch.float64}, "machine round has no speed of kernel any for float64"),
        ({"layout": "zag"}, "unknown layout 'zag'"),
    ],
)
def test_what_cannot_be_simulated(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        simulate_attention(Mask.causal(), 64, 8, (4, 2), **{"machine": MACHINE, **options})


def test_a_misspelt_option_names_the_public_function() -> None:
    for function, option, meant in (
        (simulate_attention, "lay", "layout"),
        (simulate_attention, "strategies", "strategy"),
        (compare_strategies, "strategy", "strategies"),
    ):
        said = f"{function.__name__}() got an unexpected keyword argument {option!r}; did you mean"
        with pytest.raises(TypeError, match=re.escape(f"{said} {meant!r}?")):
            function(Mask.causal(), 64, 8, **{option: "ring"})


def test_more_pairs_than_are_counted() -> None:
    """Half of the tokens take a fourth of the time; more than 64 bits count is refused."""
    asked: dict[str, Any] = {"world_size": 8, "heads": (32, 8), "machine": MACHINE}
    most, half = (simulate_attention(Mask.causal(), 2**x, **asked).seconds[0] for x in (30, 29))
    assert most == pytest.approx(4 * half, rel=1e-3)
    with pytest.raises(
        ValueError, match=r"seq_len 2,147,483,648 .* than 4,611,686,018,427,387,904"
    ):
        simulate_attention(Mask.causal(), 2**31, **asked)


@pytest.mark.parametrize(
    ("mask", "bounds", "is_plain"),
    [
        (Mask.causal(), None, True),
        (Mask.sliding(9), None, False),
        (Mask.causal(), [0, 40, 96], False),
    ],
)
def test_a_kernel_without_windows_has_all_tiles_or_none(
    mask: Mask, bounds: list[int] | None, is_plain: bool
) -> None:
    """With a window or documents even the full tiles are those of the kernel that has windows."""
    fast = Curve.line(0.0, 1e12)
    plain = [KernelSpeed("plain", "bfloat16", 128, form, fast, fast) for form in FORMS[1:]]
    alone = replace(MACHINE, kernels=tuple(plain))
    mixed = replace(MACHINE, kernels=(*plain, *MACHINE.kernels))
    both, first, windowed = (
        simulate_attention(mask, 96, 4, (6, 2), 8, bounds, machine=machine).seconds
        for machine in (mixed, alone, MACHINE)
    )
    assert both == (first if is_plain else windowed)
    assert both != (windowed if is_plain else first)
