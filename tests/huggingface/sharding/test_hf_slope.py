"""What a rank allocates does not grow with the sequence, as long as its own part does not.

Ranks are those of a group that sends nothing, so that a world of any size takes one process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dtensor_ring.selected import moved_keys
from dtensor_ring.selected import run as selected_run
from dtensor_ring.transport import transport
from dtensor_ring.transport.transport import BufferPool
from parallel_plans import sequences
from parallel_plans.huggingface.core import documents
from tests.families import COMPRESSED, small_model
from tests.huggingface.planned import under_plan
from tests.pool import on_ranks
from tests.rings import fake_group
from tests.traced_bytes import Peak, Slope, peak_of, slope_of

SHARDS, WORLDS = (256, 512), (8, 16)
"""Tokens of a rank, and ranks: 2,048, 4,096 and 8,192 tokens."""
BEFORE = (1024, 2048)
"""Where inputs are prepared only: what ranks say of a call, 800 bytes each, is little beside it."""
LIMIT = Slope(tensors=2, objects=16)
"""Positions, labels or boundaries of all tokens would take 4 or 8 each. Runs of each rank, for a
cache, take 1 where a rank has 256 tokens; Python's objects vary by some thousand bytes in all."""
POOLS = {"DeepSeek-V4": {"compress_rates": dict(zip(COMPRESSED, (4, 32), strict=True))}}
"""Of as many tokens as in large models, in parts: ranges of pools are Python's objects."""
OF_ONE_KIND = ("Llama", "Qwen3-MoE, router loss", "DeepSeek-V3.2")
"""Families whose layers are all alike, so that one of them is enough."""


def batch_of(kind: str, seq_len: int) -> dict[str, Tensor]:
    """Tokens, and what says which of them see one another."""
    index = torch.arange(seq_len).unsqueeze(0)
    batch = {"input_ids": torch.ones_like(index)}
    if kind == "packed":
        batch["position_ids"] = index % (seq_len // 2)
    elif kind == "padded":
        batch["attention_mask"] = (index >= 5).long()
    return batch


def run(model: Any, kind: str, batch: dict[str, Tensor]) -> None:
    """Train on a batch, or prefill a cache with it."""
    if kind != "prefill":
        model(**batch, labels=batch["input_ids"]).loss.backward()
        return
    is_stateful = model.context_parallel_sharding.passing is not None
    with torch.no_grad():
        # States are in no sharded cache.
        model(**batch, use_cache=not is_stateful, logits_to_keep=1)


def prepare(model: Any, kind: str, batch: dict[str, Tensor]) -> None:
    """Do what is done before the first layer, whose memory would hide it."""
    labels = {} if kind == "prefill" else {"labels": batch["input_ids"]}
    model.context_parallel_sharding.inputs(model, batch | labels)


def check_slope(
    family: str,
    kind: str,
    is_local: bool,
    call: Callable[..., None],
    shards: tuple[int, int] = SHARDS,
) -> None:
    """Bytes for each token of all ranks, beside the batch, are few."""

    def peak(num_tokens: int, world_size: int) -> Peak:
        # Without messages of the batch before, whose memory would be used again.
        messages = patch.multiple(transport, BUFFERS=BufferPool())
        with messages, fake_group(world_size, rank=world_size // 2):
            changes = {"num_hidden_layers": 1} if family in OF_ONE_KIND else {}
            model = small_model(family, **changes | POOLS.get(family, {}))
            choose_first(model)
            under_plan(model, "zigzag", local_batch=is_local)
            batch = batch_of(kind, num_tokens * (1 if is_local else world_size))
            return peak_of(lambda: call(model, kind, batch))

    with ExitStack() as stack:
        stack.enter_context(patch.object(documents, "BLOCK", 64))
        # Of messages that nobody sends, no label may be read.
        same = {"relayout": lambda x, *_, **__: x.clone(), "gather_rows": _copies}
        stack.enter_context(patch.multiple(sequences, **same))
        # Scores of as many queries as fit: in all batches alike, also in short ones.
        stack.enter_context(patch.object(selected_run, "SCORES", 1 << 20))
        # Nor any request for keys.
        stack.enter_context(patch.object(moved_keys, "_from_bits", _none))
        slope = slope_of(peak, shards, WORLDS, LIMIT)
    assert slope.tensors <= LIMIT.tensors
    assert slope.objects <= LIMIT.objects


@torch.no_grad()
def choose_first(model: Any) -> None:
    """Make scores of an index equal: else, of more keys, queries choose more different ones."""
    indexed = [x for name, x in model.named_parameters() if "indexer" in name]
    for x in indexed:
        x.zero_()


def _none(bits: Tensor, length: int) -> Tensor:
    """As if no other rank asked for a key of this one."""
    return bits.new_zeros(length, dtype=torch.bool)


def _copies(part: Tensor, rows: list[int], mesh: object) -> Tensor:
    """As if all ranks had what this one has."""
    return part.repeat(len(rows), 1)


CASES = [
    ("Llama", "packed", False),
    ("Llama", "plain", True),
    ("Qwen3-MoE, router loss", "plain", False),
    ("Gemma 3", "prefill", False),
    ("Qwen3-Next", "padded", False),
    ("DeepSeek-V3.2", "plain", False),
    ("MiniMax M3", "plain", False),
    ("DeepSeek-V4", "plain", False),
    ("GLM-5-Next", "plain", False),
]
REPEATED = [
    ("Llama", "prefill", False),
    ("Qwen3-MoE, router loss", "prefill", False),
    ("Gemma 3", "padded", False),
    ("Gemma 3", "plain", True),
    ("Qwen3-Next", "prefill", False),
    ("Jamba", "padded", False),
    ("DeepSeek-V3.2", "prefill", False),
    ("MiniMax M3", "prefill", False),
    ("DeepSeek-V4", "prefill", False),
    ("GLM-5-Next", "prefill", False),
    ("Qwen4-Exp", "plain", False),
]


@pytest.mark.parametrize(
    ("family", "kind", "is_local"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.repeats) for case in REPEATED)],
)
@on_ranks(1)
def test_nothing_grows_with_the_sequence(family: str, kind: str, is_local: bool) -> None:
    check_slope(family, kind, is_local, run)


@pytest.mark.parametrize(
    ("family", "kind", "is_local"),
    [
        ("Gemma 3", "packed", False),
        ("Qwen3-Next", "padded", False),
        pytest.param("Llama", "plain", False, marks=pytest.mark.repeats),
        pytest.param("Llama", "plain", True, marks=pytest.mark.repeats),
    ],
)
@on_ranks(1)
def test_nothing_grows_before_the_first_layer(family: str, kind: str, is_local: bool) -> None:
    check_slope(family, kind, is_local, prepare, BEFORE)
