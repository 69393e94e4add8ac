"""Selective activation checkpointing that keeps what the rings returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan.distributed.activation_checkpoint import SelectiveAC

from dtensor_ring.op import ring_op


class RingSelectiveAC(SelectiveAC):
    """torchtitan's selective policy, by which a ring runs once forward and once backward."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """Config of `RingSelectiveAC`."""

    def get_save_ops(self) -> set[Any]:
        return super().get_save_ops() | {ring_op}
