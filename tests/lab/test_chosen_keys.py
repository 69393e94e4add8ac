"""What it costs to choose keys is what a transport counts, to the byte."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import Mask, SequenceAxis, compare_strategies, select_keys, selected_attention
from dtensor_ring.command.main import main
from dtensor_ring.lab.recorded import Cost, by_field
from dtensor_ring.planning.route import ROUTES
from dtensor_ring.selected.plan import MAX_SELECTED
from parallel_plans.models import load
from tests.lab.counted import counted
from tests.pool import Pool
from tests.selected.test_selected_ops import inputs, sequence_dim

SEQ_LEN, NUM_INDEX, NUM_LATENT, BATCH = 64, 4, 6, 2
ASKED: Any = Mask.causal(), SEQ_LEN
SHAPE: Any = {"heads": (4, 1), "head_dim": NUM_LATENT, "batch": BATCH, "dtype": torch.float32}


def _of_rank(layout: str, route: str, k: int) -> tuple[Cost, Cost]:
    """Forward and backward, where a rank's queries choose all keys that they see."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    mine = SequenceAxis(mesh, layout).positions(SEQ_LEN)
    x = {n: y.index_select(sequence_dim(n), mine) for n, y in inputs(SEQ_LEN).items()}
    latents, index = x["latents"].requires_grad_(), (x["index_query"], x["index_key"], x["weights"])

    def forward() -> Any:
        chosen = select_keys(*index, k, mesh=mesh, route=route)
        seen = set(range(int(mine.max()) + 1))
        assert set(chosen[chosen >= 0].flatten().tolist()) == seen, "the most that there is"
        return selected_attention(x["query"], latents, 5, chosen, mesh=mesh).sum()

    loss, there = counted(forward)
    return there, counted(loss.backward)[1]


CASES = [(2, "zigzag", "ring", 40), (4, "contiguous", "all_gather", 40)]
CASES += [(4, "zigzag", "direct", 60), (4, "striped", "around", 60)]


@pytest.mark.parametrize(("world_size", "layout", "route", "k"), CASES)
def test_costs_are_those_counted(
    pool: Pool, world_size: int, layout: str, route: str, k: int
) -> None:
    """Up to 7/8 of the keys of a sequence are asked for; above that all of them travel."""
    choice: Any = {"layout": layout, "strategies": [route], "chosen": (k, NUM_INDEX, NUM_LATENT)}
    (row,) = compare_strategies(*ASKED, world_size, **SHAPE, **choice).rows
    ranks = pool.run(world_size, _of_rank, layout, route, k)
    for found, costs in zip((row.forward, row.backward), zip(*ranks, strict=True), strict=True):
        assert replace(found, held=0) == replace(by_field(max, costs), held=0)
        assert found.held
    assert row.launches == row.tiles


def test_what_is_held() -> None:
    """Two ranks with halves: all keys travel, so none is copied; gradients come beside them."""
    choice: Any = {"layout": "contiguous", "strategies": ["ring"]}
    choice["chosen"] = (60, NUM_INDEX, NUM_LATENT)
    (row,) = compare_strategies(*ASKED, 2, **SHAPE, **choice).rows
    index, keys = (SEQ_LEN // 2 * BATCH * x * 4 for x in (NUM_INDEX, NUM_LATENT))
    assert row.forward == Cost(index + keys, index + keys, 2, max(index, keys))
    assert row.backward == Cost(2 * keys, 2 * keys, 2, 3 * keys)


@pytest.mark.parametrize("given", ["16,4,6", "config.json"])
def test_command(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers, or those of a config, whose text model is one of its parts."""
    names = "index_topk", "index_head_dim", "kv_lora_rank", "qk_rope_head_dim"
    config = {"text_config": dict(zip(names, (16, 4, 4, 2), strict=True))}
    (tmp_path / "config.json").write_text(json.dumps(config))
    chosen = given if "," in given else str(tmp_path / given)
    asked = ["--seq-len", "64", "--world-size", "4", "--json", "--chosen", chosen]
    assert main(load, ["compare", *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = compare_strategies(*ASKED, 4, chosen=(16, 4, 6)).rows
    assert [x["backward"] for x in found] == [asdict(x.backward) for x in expected]


def test_wrong_numbers_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for chosen, text in (("16,4", "such as"), ("nowhere.json", "cannot be read")):
        asked = ["--seq-len", "64", "--world-size", "4", "--chosen", chosen]
        assert main(load, ["compare", *asked]) == 2
        assert text in capsys.readouterr().err


def test_what_is_compared() -> None:
    """Routes of the index keys; heads are no strategy, and seconds are not simulated."""
    rows = compare_strategies(*ASKED, 4, chosen=(16, 4, 6)).rows
    assert [x.strategy for x in rows if x.why_not is None] == list(ROUTES)
    refused = [x.why_not for x in rows if x.strategy.startswith("ulysses")]
    assert refused
    assert all(x is not None and "index keys have one head" in x for x in refused)
    with pytest.raises(ValueError, match="not simulated; leave machine out"):
        compare_strategies(*ASKED, 4, chosen=(16, 4, 6), machine="h100")
    wrong: list[Any] = [(16, 4), 7]
    for given in wrong:
        with pytest.raises(TypeError, match=r"such as|must be a mapping"):
            compare_strategies(*ASKED, 4, chosen=given)
    with pytest.raises(ValueError, match="of llama lacks index_topk, index_head_dim, kv_lora_rank"):
        compare_strategies(*ASKED, 4, chosen={"model_type": "llama"})
    with pytest.raises(ValueError, match="keys of a query"):
        compare_strategies(*ASKED, 4, chosen=(MAX_SELECTED + 1, 4, 6))
