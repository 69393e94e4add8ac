"""Replicas that share an encoder by FSDP2 run it alike, or are told that they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.huggingface.planned import shard_weights, under_plan
from tests.multimodal import batch_of, small_model
from tests.pool import on_ranks

FAMILY = "Qwen2.5-VL"
ALIKE, UNLIKE = ("several images", "one image"), ("one image", "text only")


def sharded(has_own_group: bool, is_frozen: bool = False) -> Any:
    """Over (dp 2, cp 2), the encoder in groups of its own, or in that of the whole model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = small_model(FAMILY)
    under_plan(model, mesh=mesh["cp"])
    model.model.visual.requires_grad_(not is_frozen)
    blocks = model.model.visual.blocks if has_own_group else ()
    parts = [*model.model.language_model.layers, *blocks]
    shard_weights(model, parts, mesh["dp", "cp"]._flatten("dp_cp"))
    return model


def check_loss(model: Any, cases: tuple[str, str]) -> None:
    batch = batch_of(FAMILY, cases[dist.get_rank() // 2])
    loss = model(**batch).loss
    loss.backward()
    stock = small_model(FAMILY)
    torch.testing.assert_close(loss, stock(**batch).loss, rtol=0, atol=1e-5)


@on_ranks(4)
def test_replicas_run_the_encoder_alike() -> None:
    number = dist.get_rank() // 2
    refused = r"pixel_values on ranks \[0, 1\]; none on ranks \[2, 3\]\. Give each batch an image"
    for has_own_group in (True, False):
        model = sharded(has_own_group)
        for _ in range(2):  # what is refused has sent nothing: the model goes on
            with pytest.raises(ValueError, match=refused):
                model(**batch_of(FAMILY, UNLIKE[number]))
            check_loss(model, ALIKE)
    with torch.no_grad(), pytest.raises(ValueError, match=refused):
        sharded(True)(**batch_of(FAMILY, UNLIKE[number]))
    check_loss(sharded(False, is_frozen=True), UNLIKE)
