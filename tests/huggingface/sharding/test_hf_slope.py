"""What a rank allocates does not grow with the sequence, as long as its own part does not.

Ranks are those of a group that sends nothing, so that a world of any size takes one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from parallel_plans.huggingface import context_parallel_plan
from parallel_plans.huggingface.core import document_starts
from tests.families import small_model
from tests.pool import Pool
from tests.rings import fake_group
from tests.traced_bytes import peak_of, slope_of

SHARDS, WORLDS = (256, 512), (4, 12)
"""Tokens of a rank, and ranks: 1,024 to 6,144 tokens."""
LIMIT = 4.0
"""Bytes for each token of all ranks, beside the batch. A tensor of all tokens would take 8 for each
in int64; what stays is noise of Python's objects."""


POSITIONS = torch.arange(max(SHARDS) * max(WORLDS)).unsqueeze(0)
POSITIONS[:, 300:] -= 300  # two documents, whatever the length
MASK = torch.ones_like(POSITIONS)
MASK[:, :5] = 0


def training(model: Any, batch: dict[str, Tensor]) -> None:
    model(**batch, labels=batch["input_ids"]).loss.backward()


def packed(model: Any, batch: dict[str, Tensor]) -> None:
    training(model, batch | {"position_ids": POSITIONS[:, : batch["input_ids"].shape[1]]})


def padded(model: Any, batch: dict[str, Tensor]) -> None:
    training(model, batch | {"attention_mask": MASK[:, : batch["input_ids"].shape[1]]})


def prefill(model: Any, batch: dict[str, Tensor]) -> None:
    is_stateful = bool(getattr(model.context_parallel_sharding, "passing", None))
    with torch.no_grad():
        # States are in no sharded cache.
        model(**batch, use_cache=not is_stateful, logits_to_keep=1)


def measured(family: str, call: Callable[..., None], is_local: bool) -> float:
    """Bytes for each token of all ranks."""

    def peak(num_tokens: int, world_size: int) -> int:
        with fake_group(world_size, rank=1):
            mesh = init_device_mesh("cpu", (world_size,))
            model = small_model(family)
            plan = context_parallel_plan(model, "zigzag", local_batch=is_local)
            parallelize_module(model, mesh, plan)
            length = num_tokens * (1 if is_local else world_size)
            batch = {"input_ids": torch.ones(1, length, dtype=torch.long)}
            return peak_of(lambda: call(model, batch))

    with patch.object(document_starts, "BLOCK", 64):
        peak(min(SHARDS), min(WORLDS))  # imports what is imported late
        return slope_of(peak, SHARDS, WORLDS)


CASES = [
    ("Llama", packed, False),
    ("Llama", training, True),
    ("Qwen3-MoE, router loss", training, False),
    ("Gemma 3", padded, False),
    ("Gemma 3", prefill, False),
    ("Qwen3-Next", training, False),
    ("Qwen3-Next", prefill, False),
]


@pytest.mark.parametrize(("family", "call", "is_local"), CASES)
def test_nothing_grows_with_the_sequence(
    pool: Pool, family: str, call: Callable[..., None], is_local: bool
) -> None:
    (slope,) = pool.run(1, measured, family, call, is_local)
    assert abs(slope) <= LIMIT
