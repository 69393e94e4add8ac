"""What `estimate` says of a model that chooses its keys, next to a real step on two ranks."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring.command.main import main
from parallel_plans.huggingface import context_parallel_plan
from parallel_plans.models import load
from tests.families import COMPRESSED, VOCABULARY, small_model
from tests.lab.test_chosen_keys import counted
from tests.pool import Pool

SEQ_LEN, TOPK = 48, 32
"""Few queries of a rank choose all keys that it sees, and no query chooses nearly all."""

LOSS = {"sent": 8, "received": 8, "messages": 2}
"""A float32 to the other rank, and its gradient, which no transport of keys counts."""


OTHERS: dict[str, dict[str, Any]] = {
    "MiniMax M3": {"index_topk_blocks": 8, "index_block_size": TOPK // 8},
    "DeepSeek-V4": {"index_topk": 10, "compress_rates": dict(zip(COMPRESSED, (4, 8), strict=True))},
    "Qwen4-Exp": {"indexer_budget": 30},
}
"""These choose blocks or pools, whose numbers are not in the config of the others."""


WITH_POOLS = "DeepSeek-V4", "Qwen4-Exp"


def _model(family: str) -> Any:
    return small_model(family, **OTHERS.get(family, {"index_topk": TOPK}))


def _step(family: str) -> dict[str, int]:
    """Messages of a rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = _model(family)
    model = parallelize_module(model, mesh, context_parallel_plan(model, "zigzag"))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (1, SEQ_LEN), generator=generator)

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    return asdict(counted(step)[1])


@pytest.mark.parametrize(
    ("family", "kinds", "chosen"),
    [
        ("DeepSeek-V3.2", {3}, {TOPK}),
        pytest.param("GLM-5", {3}, {TOPK}, marks=pytest.mark.repeats),
        ("MiniMax M3", {1, 2}, {TOPK, None}),
        ("DeepSeek-V4", {1, 3}, {10, None}),
        pytest.param("Qwen4-Exp", {1}, {TOPK}, marks=pytest.mark.repeats),
    ],
)
def test_messages_are_those_of_a_step(
    pool: Pool,
    family: str,
    kinds: set[int],
    chosen: set[int | None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of index keys, requests, latents and gradients; layers that share an index send it once.

    MiniMax M3 has keys and values in place of latents, and a layer without an index. DeepSeek-V4
    attends to a window in each layer, and beside it to pools: those that are chosen, or all.
    """
    path = tmp_path / "config.json"
    path.write_text(_model(family).config.to_json_string(use_diff=False))
    command = ["estimate", "--model", str(path), "--seq-len", str(SEQ_LEN), "--mesh", "cp=2"]
    command += ["--dtype", "float32"]
    assert main(load, [*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    *_, last = pool.run(2, _step, family)
    for name, of_loss in LOSS.items():
        assert found["messages"][name] == last[name] + of_loss, name
    assert {x["calls"] for x in found["attentions"]} == kinds
    assert {x["chosen"] for x in found["attentions"]} == chosen
    assert found["attention_working"] > 0
    assert main(load, [*command, "--json", "--checkpoint", "attention"]) == 0
    checkpointed = json.loads(capsys.readouterr().out)
    if family not in WITH_POOLS:  # tokens of pools that are cut travel again
        assert checkpointed["messages"] == found["messages"], "what attentions return is kept"
    assert 0 < checkpointed["attention_kept"] < found["attention_kept"]
    assert main(load, command) == 0
    assert f"{min(x for x in chosen if x)} keys" in capsys.readouterr().out
