"""`validate=True`: ranks that make different calls are told so, all of them, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_ring import Mask, RingError, SequenceAxis, TransferPolicy, ring_attention
from dtensor_ring.dtensor import call_check
from dtensor_ring.dtensor.call_check import check_agreement
from dtensor_ring.transport.transport import P2P, Transport, Work
from tests.dense import dense_attention
from tests.pool import on_ranks

SEQ_LEN = 12
BEGINNING = "the ranks of a ring must make the same call, they differ in "


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def unchanged(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Difference:
    """What rank 0 passes, where the others pass something else; and what all of them are told."""

    reported: str
    odd: dict[str, Any] = field(default_factory=dict)
    usual: dict[str, Any] = field(default_factory=dict)
    odd_tensors: Callable[[Tensor], Tensor] = unchanged

    def message(self, world_size: int) -> str:
        """With the ranks but 0."""
        return BEGINNING + self.reported.format(others=list(range(1, world_size)))


CROSS = {"cu_seqlens": ints(0, SEQ_LEN), "mask": Mask.full()}
DIFFERENCES = {
    "mask": Difference(
        f"mask: {Mask.sliding(3)} on [0], {Mask.causal()} on {{others}}", {"mask": Mask.sliding(3)}
    ),
    "no mask": Difference(
        "error: TypeError: mask must be a dtensor_ring.Mask, such as Mask.causal(), got 3 on [0], "
        "none on {others}",
        {"mask": 3},
    ),
    "slices": Difference(
        f"mask: {Mask.full()} on [0], {Mask.causal()} on {{others}}; "
        "slices: [0, 1, 0, 1, 0, 0] on [0], none on {others}",
        {"slices": ints([0, 1, 0, 1, 0, 0])},
    ),
    "cu_seqlens": Difference(
        "cu_seqlens: [0, 4, 12] on [0], [0, 5, 12] on {others}",
        {"cu_seqlens": ints(0, 4, SEQ_LEN)},
        {"cu_seqlens": ints(0, 5, SEQ_LEN)},
    ),
    "int64 cu_seqlens": Difference(
        "cu_seqlens: [0, 4, 12] on [0], [0, 5, 12] on {others}",
        {"cu_seqlens": ints(0, 4, SEQ_LEN).long()},
        {"cu_seqlens": ints(0, 5, SEQ_LEN).long()},
    ),
    "no cu_seqlens": Difference(
        "cu_seqlens: none on [0], [0, 12] on {others}", usual={"cu_seqlens": ints(0, SEQ_LEN)}
    ),
    "key_cu_seqlens": Difference(
        "key_cu_seqlens: [0, 9] on [0], [0, 12] on {others}",
        CROSS | {"key_cu_seqlens": ints(0, 9)},
        CROSS | {"key_cu_seqlens": ints(0, SEQ_LEN)},
    ),
    "runs": Difference(
        "error: ValueError: the axis was used unannotated, which makes it contiguous, so its "
        "tokens are in that order: leave runs out, or annotate the axis, before its first use, "
        "with the Balanced layout of a batch on [0], none on {others}",
        {"runs": ints([[0, 12]])},
    ),
    "sinks": Difference("sinks: torch.float32 on [0], None on {others}", {"sinks": torch.zeros(4)}),
    "softcap": Difference("softcap: 2.0 on [0], 0.0 on {others}", {"softcap": 2.0}),
    "kernel": Difference("kernel: reference on [0], None on {others}", {"kernel": "reference"}),
    "mask and scale": Difference(
        f"mask: {Mask.full()} on [0], {Mask.causal()} on {{others}}; "
        "scale: 0.5 on [0], 0.35355339059327373 on {others}",
        {"mask": Mask.full(), "scale": 0.5},
    ),
    "batch": Difference("batch: 1 on [0], 2 on {others}", odd_tensors=lambda x: x[:1]),
    "dtype": Difference(
        "dtype: torch.bfloat16 on [0], torch.float32 on {others}", odd_tensors=Tensor.bfloat16
    ),
    "requires_grad": Difference(
        "gradients: True on [0], False on {others}", odd_tensors=Tensor.requires_grad_
    ),
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("as_dtensors", [False, True], ids=["plain", "DTensors"])
@on_ranks(timeout=60)
def test_every_rank_raises_and_the_ring_still_works(as_dtensors: bool) -> None:
    """What each difference raises; and whether right calls work after all that."""
    mesh, is_odd = init_device_mesh("cpu", (dist.get_world_size(),)), dist.get_rank() == 0
    for name, difference in DIFFERENCES.items():
        x = torch.ones(2, 4, SEQ_LEN // mesh.size(), 8)
        x = difference.odd_tensors(x) if is_odd else x
        with pytest.raises(ValueError, match=BEGINNING) as caught:
            attend([x] * 3, mesh, as_dtensors, difference.odd if is_odd else difference.usual)
        assert str(caught.value) == difference.message(mesh.size()), name
    check_result(mesh, as_dtensors, {})
    check_result(mesh, as_dtensors, {"cu_seqlens": ints(0, 5, SEQ_LEN), "mask": Mask.sliding(3)})


def attend(
    shards: list[Tensor], mesh: DeviceMesh, as_dtensors: bool, options: dict[str, Any]
) -> Tensor:
    if not as_dtensors:
        return ring_attention(*shards, mesh=mesh, validate=True, **options)
    wrapped = (DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in shards)
    return ring_attention(*wrapped, validate=True, **options).to_local()


def check_result(mesh: DeviceMesh, as_dtensors: bool, options: dict[str, Any]) -> None:
    """Of ranks that agree, against dense attention; the layout is contiguous."""
    inputs = [torch.randn(2, 4, SEQ_LEN, 8) for _ in range(3)]
    dense = dense_attention(*inputs, **{"mask": Mask.causal(), **options})
    expected = dense.out, *dense.backward(torch.ones_like(dense.out))
    rank, size = mesh.get_local_rank(), mesh.size()
    shards = [x.chunk(size, 2)[rank].clone().requires_grad_() for x in inputs]
    out = attend(shards, mesh, as_dtensors, options)
    for actual, whole in zip((out, *torch.autograd.grad(out.sum(), shards)), expected, strict=True):
        torch.testing.assert_close(actual.double(), whole.chunk(size, 2)[rank], atol=1e-5, rtol=0)


@on_ranks(2)
def test_autocast_of_one_rank() -> None:
    mesh, x = init_device_mesh("cpu", (2,)), torch.ones(1, 2, 4, 8)
    reported = "dtype: torch.bfloat16 on .0., torch.float32 on .1.$"
    with (
        torch.autocast("cpu", torch.bfloat16, enabled=dist.get_rank() == 0),
        pytest.raises(ValueError, match=BEGINNING + reported),
    ):
        attend([x] * 3, mesh, False, {})


@pytest.mark.parametrize("as_dtensors", [False, True], ids=["plain", "DTensors"])
@on_ranks(4, timeout=60)
def test_rings_side_by_side_may_differ(as_dtensors: bool) -> None:
    """Each ring has documents of its own; then one of them goes wrong, the other does not care."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    ring, in_ring = mesh.get_local_rank("dp"), mesh.get_local_rank("cp")
    check_result(mesh["cp"], as_dtensors, {"cu_seqlens": ints(0, 4 + ring, SEQ_LEN)})
    if ring == 0:
        check_result(mesh["cp"], as_dtensors, {})
        return
    reported = "softcap: 0.0 on .2., 1.0 on .3.$"
    with pytest.raises(ValueError, match=BEGINNING + reported):
        attend([torch.ones(1, 2, 4, 8)] * 3, mesh["cp"], as_dtensors, {"softcap": float(in_ring)})


@on_ranks(2)
def test_long_descriptions_are_cut() -> None:
    """A long one from its begin, unless they differ only far behind it."""
    group, rank = init_device_mesh("cpu", (2,)).get_group(), dist.get_rank()
    many, late = (str([0] * 100 + ends) for ends in ([12], [11, 12]))
    cases = [(many, "none", f"{many[:200]}... on [0], none on [1]")]
    cases += [(late, many, f"...{late[252:]} on [0], ...{many[252:]} on [1]")]
    for odd, usual, reported in cases:
        with pytest.raises(ValueError, match=BEGINNING) as caught:
            check_agreement(group, {"ends": usual if rank else odd}, call_check.SAME_CALL)
        assert str(caught.value) == f"{BEGINNING}ends: {reported}"


@on_ranks(4)
def test_placements_on_other_axes() -> None:
    """Shards of one shape, of which one rank takes its batch for all of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    is_odd = mesh.get_local_rank("cp") == 0
    places = Replicate() if is_odd else Shard(0), Shard(2)
    x = DTensor.from_local(torch.ones(1, 2, 4, 8), mesh, places, run_check=False)
    first, second = dist.get_process_group_ranks(mesh.get_group("cp"))
    with pytest.raises(ValueError, match=rf"placements: R, .* on .{first}., S.0., .* on .{second}"):
        ring_attention(x, x, x, validate=True)
    with pytest.raises(RingError, match=r"differ in placements: (R|S\(0\)), S\(2\) on rank"):
        ring_attention(x, x, x)


@on_ranks(1)
def test_compiled_calls_are_not_compared() -> None:
    mesh, x = init_device_mesh("cpu", (1,)), torch.ones(1, 2, 4, 8)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    reported = "validate=True compares ranks in eager calls only; compile without it"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=reported):
        compiled([x] * 3, mesh, False, {})


@on_ranks(3)
def test_barriers_need_no_message() -> None:
    """Whatever moves the messages of a ring, all ranks are told, and not the next one only."""
    mesh = init_device_mesh("cpu", (3,))
    group = mesh.get_group()
    SequenceAxis(mesh, "zigzag", transport=Refuses())
    with call_check.checked_barrier(group, "a meal", {"tokens": "1"}):
        pass
    with (
        pytest.raises(RingError) as caught,
        call_check.checked_barrier(group, "a meal", {"tokens": str(dist.get_rank() == 2)}),
    ):
        pass
    assert "they differ in tokens: " in str(caught.value)


class Refuses(Transport):
    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        raise AssertionError("nothing was allocated, nor prepared")


@on_ranks(4)
def test_shards_of_another_length() -> None:
    """9 tokens on 4 ranks are 3, 3, 3 and none."""
    mesh, rank = init_device_mesh("cpu", (4,)), dist.get_rank()
    local, shape = torch.randn(1, 2, 2 if rank else 3, 8), torch.Size((1, 2, 9, 8))
    x = DTensor.from_local(
        local, mesh, [Shard(2)], run_check=False, shape=shape, stride=(144, 72, 8, 1)
    )
    odd = (
        "error: none on .0., ValueError: rank 1 of 4 holds 2 tokens, but .* has 3 on .1.,.* on .3.$"
    )
    with pytest.raises(ValueError, match=odd):
        ring_attention(x, x, x, validate=True)


@on_ranks(2)
def test_kernels_of_other_ranks() -> None:
    """A package that is installed on some ranks only."""
    mesh, x = init_device_mesh("cpu", (2,)), torch.randn(1, 2, 4, 8)
    here = {"reference": None} | ({} if dist.get_rank() else {"cpu_flash": None})
    reported = r"kernels: \['reference', 'cpu_flash'\] on \[0\], \['reference'\] on \[1\]"
    with (
        patch.object(call_check, "available_kernels", lambda: here),
        pytest.raises(ValueError, match=reported),
    ):
        ring_attention(x, x, x, mesh=mesh, validate=True)


@on_ranks(2)
def test_axes_that_are_configured_differently() -> None:
    mesh, x = init_device_mesh("cpu", (2,)), torch.randn(1, 2, 4, 8)
    policy = TransferPolicy(grad_dtype=torch.bfloat16) if dist.get_rank() == 0 else None
    SequenceAxis(mesh, "zigzag", policy=policy)
    reported = (
        r"policy: .*grad_dtype=torch.bfloat16, .*\) on \[0\], .*=torch.float32, .*\) on \[1\]$"
    )
    with pytest.raises(ValueError, match=BEGINNING + reported):
        ring_attention(x, x, x, mesh=mesh, validate=True)
