"""The same bits at any degree: attentions whose sums have a fixed order, over rings of threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from dtensor_ring import Balanced, Contiguous, Mask
from dtensor_ring.all_to_all.ulysses import is_exchanged, ulysses_attention
from dtensor_ring.ops.options import flatten
from dtensor_ring.ops.ring_op import ring_op
from dtensor_ring.planning.mask import as_documents
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.transport.transport import TransferPolicy
from tests.drawn import TOLERANCES, different, documents_of
from tests.played_group import PlayedGroup, play_group
from tests.rings import Case, Ring, local

WORLDS = 1, 2, 3, 4, 8
LAYOUTS = "contiguous", "zigzag", "striped", Balanced.name
MASKS = {"causal": Mask.causal(), "window": Mask.sliding(9), "full": Mask.full()}
NAMES = "out", "lse", "dq", "dk", "dv", "dsinks"


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
    world_size, layout = draw(st.sampled_from(WORLDS)), draw(st.sampled_from(LAYOUTS))
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
        for name, x, wanted in zip(NAMES, results_of(case), alone, strict=False):
            assert torch.equal(bits_of(x), bits_of(wanted)), (name, case)


def test_they_are_those_of_dense_attention() -> None:
    for case in different(cases(), 12, seed=1):
        for name, x, wanted in zip(NAMES, results_of(case), case.expected(), strict=False):
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
    for parts in zip(*by_rank, strict=True):
        if parts[0].ndim == 1:  # of sinks, which a user sums over the ranks
            results.append(torch.stack(parts).sum(0))
            continue
        whole = parts[0].new_empty(*parts[0].shape[:2], ring.seq_len, *parts[0].shape[3:])
        for rank, part in enumerate(parts):
            whole[:, :, ring.positions(rank)] = part
        results.append(whole)
    return results
