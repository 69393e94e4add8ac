"""Keep the results of ring attention in selective activation checkpointing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.distributed.activation_checkpoint import SelectiveAC

import dtensor_ring  # noqa: F401 - registers the op

RING_ATTENTION = torch.ops.dtensor_ring.ring_attention.default


class RingSelectiveAC(SelectiveAC):
    """torchtitan's selective policy, but backward does not run the forward of a ring again."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """Config of `RingSelectiveAC`."""

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | {RING_ATTENTION}
