"""Padded sequences: what an operation makes of them, and in which order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import SequenceAxis
from dtensor_ring.extension import Padded, from_local_tokens, output_mesh
from tests.pool import on_ranks

SEQ_LEN = 13


def padded(x: torch.Tensor, layout: str) -> Any:
    """A sequence, as a plan shards one whose length the ranks do not divide."""
    axis = SequenceAxis(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), layout)
    order = Padded(axis.layout)
    own = order.positions(axis.mesh.get_local_rank(), 2, SEQ_LEN)
    return from_local_tokens(x[:, own], output_mesh(axis, order), 1, SEQ_LEN)


@on_ranks(2)
def test_scatter() -> None:
    """Into zeros, as backward does, and never across two orders."""
    whole = torch.arange(2 * SEQ_LEN * 4.0).view(2, SEQ_LEN, 4).sin()
    index = whole.argmax(-1, keepdim=True)
    striped, contiguous = padded(whole, "striped"), padded(whole, "contiguous")
    scattered = striped.scatter(-1, striped.argmax(-1, keepdim=True), 2.0)
    torch.testing.assert_close(scattered.full_tensor(), whole.scatter(-1, index, 2.0))
    for given in (
        (striped, contiguous.argmax(-1, keepdim=True), 2.0),
        (striped, striped.argmax(-1, keepdim=True), contiguous),
    ):
        with pytest.raises(ValueError, match=r"two orders .* padded striped order"):
            torch.scatter(given[0], -1, *given[1:])
