"""A scan over ranks equals one process that takes the maps one after another."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.library import opcheck

from dtensor_ring import RingError, SequenceAxis, StateMap, ZigZag, exclusive_scan
from dtensor_ring.states import run
from dtensor_ring.states.op import scan_op
from dtensor_ring.states.plan import owners_of, steps_of
from dtensor_ring.states.run import Maps, scan
from tests.played import PlayedTransport, play
from tests.pool import Pool, on_ranks

SHAPE = (2, 3, 4, 5)
"""Rows, heads and numbers of a state."""
KINDS = ("head", "number", "matrix", "none")


def drawn(kind: str, num_places: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The maps of all places, with one in the middle that forgets."""
    torch.manual_seed(num_places)
    shapes = {"head": SHAPE[:2], "number": SHAPE, "matrix": (*SHAPE[:3], SHAPE[2]), "none": None}
    found = {"state": torch.randn(num_places, *SHAPE, dtype=dtype)}
    if (shape := shapes[kind]) is None:
        return found
    factors = torch.randn(num_places, *shape, dtype=dtype)
    if kind == "matrix":
        factors[num_places // 2] = 0
        return found | {"matrix": factors}
    decay = -factors.abs()
    decay[num_places // 2] = -torch.inf
    return found | {"decay": decay}


def one_by_one(maps: dict[str, Tensor]) -> Tensor:
    """The state before each place."""
    before, found = torch.zeros_like(maps["state"][0]), []
    for place in range(len(maps["state"])):
        found.append(before)
        before = Maps(**{name: x[place] for name, x in maps.items()}).after(before)
    return torch.stack(found)


def errors(kind: str, owners: tuple[int, ...]) -> dict[str, float]:
    """Of this rank's states, their gradients and those of the gradients."""
    torch.manual_seed(0)
    whole, size = drawn(kind, len(owners)), dist.get_world_size()
    mine = [place for place, owner in enumerate(owners) if owner == dist.get_rank()]
    weights = torch.randn(len(owners), *SHAPE, dtype=torch.float64)
    for x in whole.values():
        x.requires_grad_()
    dense = one_by_one(whole)
    expected = torch.autograd.grad(
        (dense.sin() * weights).sum(), [*whole.values()], materialize_grads=True
    )
    own = {name: x[mine].detach().requires_grad_() for name, x in whole.items()}
    args = [own.get(name) for name in ("state", "decay", "matrix")]
    out = scan_op(*args, owners, False, dist.group.WORLD.group_name)
    found = torch.autograd.grad((out.sin() * weights[mine]).sum(), [*own.values()])
    assert size == len(set(owners))
    pairs = {"states": (out, dense[mine])}
    pairs |= {name: (x, y[mine]) for name, x, y in zip(own, found, expected, strict=True)}
    return {name: (x - y).abs().max().item() for name, (x, y) in pairs.items()}


@pytest.mark.parametrize("at_once", [8, 0], ids=["one round", "rounds"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
@on_ranks()
def test_equals_one_process(at_once: int) -> None:
    size, found = dist.get_world_size(), {}
    layouts = {"contiguous": tuple(range(size)), "zigzag": owners_of(ZigZag(), size, 2)}
    with patch.object(run, "MAX_AT_ONCE", at_once):
        for kind, (layout, owners) in product(KINDS, layouts.items()):
            of_case = errors(kind, owners)
            found |= {f"{kind}, {layout}, {name}": x for name, x in of_case.items()}
    assert len(found) == 22
    assert max(found.values()) < 1e-12, found


def of_rank(
    maps: dict[str, Tensor], owners: tuple[int, ...], rank: int, transport: PlayedTransport
) -> tuple[Tensor, Counter[str]]:
    """States, and the rounds and numbers of messages that this rank starts."""
    sent: Counter[str] = Counter()
    mine = [place for place, owner in enumerate(owners) if owner == rank]
    start = transport.start

    def counting(receives: Any, sends: Any) -> Any:
        sent["rounds"] += 1
        sent["numbers"] += sum(x.flat.numel() for x in sends)
        return start(receives, sends)

    with patch.object(transport, "start", counting):
        found = scan(
            transport, rank, owners, Maps(**{name: x[mine] for name, x in maps.items()}), False
        )
    return found, sent


@pytest.mark.parametrize(("world_size", "rounds"), [(8, 1), (9, 4), (16, 5), (17, 5)])
def test_many_ranks(world_size: int, rounds: int) -> None:
    """All of up to 8 ranks send at once, more of them in rounds whose steps double."""
    for kind, num_maps in (("head", 1), ("matrix", 2), ("none", 1)):
        owners = owners_of(ZigZag(), world_size, 2) if num_maps > 1 else tuple(range(world_size))
        maps = drawn(kind, len(owners))
        expected = one_by_one(maps)
        parts = play(world_size, partial(of_rank, maps, owners))
        for rank, (found, sent) in enumerate(parts):
            mine = [place for place, owner in enumerate(owners) if owner == rank]
            torch.testing.assert_close(found, expected[mine])
            steps = len(steps_of(len(owners))) if rounds > 1 else 1
            assert sent["rounds"] == {"head": rounds, "matrix": steps, "none": 1}[kind]


def test_bytes_of_one_round() -> None:
    """A rank sends its map to each of the ranks with later tokens, and nothing else."""
    numbers = 2 * 3 * (4 * 5 + 4 * 4)
    matrices, none = (partial(of_rank, drawn(x, 4), (0, 1, 2, 3)) for x in ("matrix", "none"))
    for rank, (_, sent) in enumerate(play(4, matrices)):
        assert sent["numbers"] == (3 - rank) * numbers
    for rank, (_, sent) in enumerate(play(4, none)):
        assert sent["numbers"] == (rank < 3) * 2 * 3 * 4 * 5


def test_rounds() -> None:
    for num_places in range(2, 200):
        assert sum(steps_of(num_places)) >= num_places - 1
        assert len(steps_of(num_places)) <= 1 + max(0, num_places - 2).bit_length()


def long_errors(seq_len: int) -> tuple[float, float]:
    """Of the last state of a long product of decays, by one process and by a scan, in float32."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank, size = dist.get_rank(), dist.get_world_size()
    decay = -torch.rand(seq_len, 64, dtype=torch.float64) * 1e-4
    inputs = torch.randn(seq_len, 64, dtype=torch.float64)

    def last(decay: Tensor, inputs: Tensor) -> Tensor:
        state = torch.zeros_like(inputs[0])
        for x, y in zip(decay.exp(), inputs, strict=True):
            state = x * state + y
        return state

    exact, plain = last(decay, inputs), last(decay.float(), inputs.float())
    shard = slice(rank * seq_len // size, (rank + 1) * seq_len // size)
    own = StateMap(last(decay[shard].float(), inputs[shard].float()), decay[shard].float().sum(0))
    [before] = exclusive_scan([own], mesh)
    found = own.after(before)
    errors = [(x.double() - exact).norm() / exact.norm() for x in (plain, found)]
    return errors[0].item(), errors[1].item()


@pytest.mark.parametrize("seq_len", [1 << 14, pytest.param(1 << 16, marks=pytest.mark.repeats)])
def test_error_of_long_products(pool: Pool, seq_len: int) -> None:
    """Against float64, the last rank's is no larger than that of one process."""
    plain, found = pool.run(4, long_errors, seq_len)[-1]
    assert found <= 1.5 * plain, (found, plain)


def layouts() -> None:
    mesh = init_device_mesh("cpu", (2,))
    one = StateMap(torch.ones(1, 2), decay=torch.zeros(1))
    zigzag = SequenceAxis(mesh, "zigzag")
    found = [x.unique().item() for x in exclusive_scan([one, one], zigzag)]
    assert found == [[0.0, 3.0], [1.0, 2.0]][mesh.get_local_rank()]
    assert [x.unique().item() for x in exclusive_scan([one], mesh)] == [mesh.get_local_rank()]
    assert exclusive_scan([StateMap(torch.ones(2).bfloat16())], mesh)[0].dtype == torch.float32
    with pytest.raises(ValueError, match=r"'zigzag' .* are not 1 runs .*; give one map for each"):
        exclusive_scan([one], zigzag)
    with pytest.raises(RingError, match=r"differ in state: \[1, 1, [23]\] on rank"):
        exclusive_scan([StateMap(torch.ones(1, 2 + mesh.get_local_rank()))], mesh)


def test_layouts_and_ranks_that_differ(pool: Pool) -> None:
    pool.run(2, layouts)


@pytest.mark.parametrize(
    ("error", "match", "made"),
    [
        (
            TypeError,
            "state of a map must be a plain floating",
            lambda: StateMap(torch.ones(2).int()),
        ),
        (ValueError, "got both", lambda: StateMap(*(torch.ones(1, 1) for _ in range(3)))),
        (ValueError, "leading dims", lambda: StateMap(torch.ones(2, 3), torch.ones(3))),
        (ValueError, "K, K", lambda: StateMap(torch.ones(2, 3), matrix=torch.ones(3, 3))),
        (TypeError, r"write \[map\]", lambda: exclusive_scan(StateMap(torch.ones(1)), None)),
        (ValueError, "got none", lambda: exclusive_scan([], None)),
        (
            ValueError,
            "one kind, shape and dtype",
            lambda: exclusive_scan([StateMap(torch.ones(x)) for x in (1, 2)], None),
        ),
    ],
)
def test_refused(error: type[Exception], match: str, made: Any) -> None:
    with pytest.raises(error, match=match):
        made()


@on_ranks(1)
def test_op() -> None:
    """Schema, fake kernel and gradients; three maps of one rank are joined without messages."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    name = dist.group.WORLD.group_name
    for kind in KINDS:
        maps = {x: y.requires_grad_() for x, y in drawn(kind, 3).items()}
        for x in maps.values():
            x.data[x.data == -torch.inf] = -3
        args = [maps.get(x) for x in ("state", "decay", "matrix")]
        opcheck(scan_op, (*args, [0, 0, 0], kind == "matrix", name))

        def scanned(*given: Tensor, names: tuple[str, ...] = tuple(maps)) -> Tensor:
            parts = dict(zip(names, given, strict=True))
            order = (parts.get(x) for x in ("state", "decay", "matrix"))
            return scan_op(*order, [0, 0, 0], False, name)

        few = [x[:, :1, :1].detach().requires_grad_() for x in maps.values()]
        assert torch.autograd.gradcheck(scanned, few)
        assert torch.autograd.gradgradcheck(scanned, few)


def compiled_error() -> float:
    """Of a function that scans, in one graph without breaks, forward and backward."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(dist.get_rank())

    def layer(state: Tensor, decay: Tensor) -> Tensor:
        [before] = exclusive_scan([StateMap(state, decay)], mesh)
        return before.sin() + state

    given = [torch.randn(2, 3, requires_grad=True), torch.randn(2, requires_grad=True)]
    found = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        out = function(*given)
        found.append([out.detach(), *torch.autograd.grad(out.square().sum(), given)])
    return max((x - y).abs().max().item() for x, y in zip(*found, strict=True))


def test_compiled(pool: Pool) -> None:
    assert max(pool.run(2, compiled_error)) < 1e-6
