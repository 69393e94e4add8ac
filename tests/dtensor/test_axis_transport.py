"""An axis whose transport the user brings."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dtensor_ring import Mask, SequenceAxis, Transport, ring_attention
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport, Work
from tests.dtensor.test_axis import SEQ_LEN
from tests.meshes import random_inputs
from tests.pool import on_ranks


class Loud(ProcessGroupTransport):
    """Counts hops."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.num_hops = 0

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        self.num_hops += bool(receives or sends)
        return super().start(receives, sends)


@on_ranks(3)
def test_a_transport_of_the_users() -> None:
    mesh = init_device_mesh("cpu", (3,))
    transport: Transport = Loud(mesh.get_group())
    axis = SequenceAxis(mesh, "contiguous", transport=transport)
    inputs = [axis.shard(x, 2) for x in random_inputs(seq_len=SEQ_LEN)[:3]]
    axis.attention(*inputs, mask=Mask.full())
    assert transport.num_hops == 2
    F.scaled_dot_product_attention(inputs[0], *(x.repeat_interleave(2, 1) for x in inputs[1:]))
    assert transport.num_hops == 4
    assert SequenceAxis(mesh, "contiguous", transport=transport).layout == axis.layout
    with pytest.raises(ValueError, match=r"has the transport .*, it cannot get .*configured once"):
        SequenceAxis(mesh, "contiguous", transport=Loud(mesh.get_group()))


@on_ranks(3)
def test_strategies_of_calls() -> None:
    """A call may have another strategy than its axis."""
    mesh = init_device_mesh("cpu", (3,))
    transport = Loud(mesh.get_group())
    axis = SequenceAxis(mesh, "zigzag", strategy="around", transport=transport)
    sharded = [axis.shard(x, 2) for x in random_inputs(seq_len=SEQ_LEN)[:3]]
    shards = [x.to_local() for x in sharded]
    expected = axis.attention(*shards)
    for attend, given in (
        (axis.attention, shards),
        (axis.attention, sharded),
        (partial(ring_attention, mesh=mesh), shards),
        (ring_attention, sharded),
    ):
        # All at once is one hop with messages, and a ring of three has two.
        for strategy, num_hops in ((None, 2), ("all_gather", 1)):
            before = transport.num_hops
            out = attend(*given, strategy=strategy)
            assert transport.num_hops == before + num_hops
            out = out.to_local() if isinstance(out, DTensor) else out
            torch.testing.assert_close(out, expected)
        for wrong, match in (("tree", "unknown strategy 'tree'"), ("ulysses:2", "do not divide")):
            with pytest.raises(ValueError, match=match):
                attend(*given, strategy=wrong)
