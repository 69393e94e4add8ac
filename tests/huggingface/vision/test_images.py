"""Whole models that read images and text, under the plan, equal the stock model."""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers import Gemma3Config, Gemma3ForSequenceClassification

from dtensor_ring import RingError, unshard_sequence
from parallel_plans.huggingface import context_parallel_plan, stock_model
from tests.dense import largest
from tests.multimodal import CASES, FAMILIES, SEQ_LEN, batch_of, small_model
from tests.pool import Pool, on_ranks
from tests.results import of_first_rank, results_with_logits

SAMPLE = ("several images", "padded left", "packed")
"""Of the cases; `--all-images` runs the others, too, more ranks and another layout."""
PATCHES = ("pixel_values", "image_grid_thw")
Results = tuple[Tensor, Tensor, dict[str, Tensor]]


@lru_cache(maxsize=1)
def stock_results(family: str, cases: tuple[str, ...]) -> dict[str, Results]:
    """By case, of one process; once for all layouts."""
    stock = small_model(family)
    return {case: results_with_logits(stock, batch_of(family, case)) for case in cases}


def planned(family: str, layout: str = "zigzag", **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = small_model(family)
    return parallelize_module(model, mesh, context_parallel_plan(model, layout, **options))


def compare(family: str, layout: str, cases: tuple[str, ...]) -> dict[str, dict[str, float]]:
    """By case: errors of the loss, the logits and each gradient, relative to their norms."""
    model, errors = planned(family, layout, unshard_outputs=True), {}
    expected = of_first_rank(lambda: stock_results(family, cases))
    for case, (loss, logits, grads) in expected.items():
        # Without logits the head makes the losses of its tokens.
        batch = batch_of(family, case)
        without = model(**batch).loss.detach()
        our_loss, our_logits, our_grads = results_with_logits(model, batch)
        assert our_grads.keys() == grads.keys()
        for grad in our_grads.values():
            dist.all_reduce(grad)
            grad /= dist.get_world_size()
        scale = torch.stack([x.norm() for x in grads.values()]).max() * 1e-2
        errors[case] = {
            "loss": ((our_loss - loss) / loss).abs().item(),
            "loss without logits": ((without - loss) / loss).abs().item(),
            "logits": ((our_logits - logits).norm() / logits.norm()).item(),
        } | {
            name: ((our_grads[name] - x).norm() / x.norm().clamp(min=scale)).item()
            for name, x in grads.items()
        }
    return errors


def check(pool: Pool, world_size: int, family: str, layout: str, cases: tuple[str, ...]) -> None:
    for rank, errors in enumerate(pool.run(world_size, compare, family, layout, cases)):
        assert set(errors) == set(cases)
        for case, found in errors.items():
            worst = max(found, key=lambda name: found[name])
            assert largest(found.values()) < 1e-5, f"rank {rank}, {case}: {worst} {found[worst]}"


@pytest.mark.parametrize("family", FAMILIES)
def test_images_equal_the_stock_model(pool: Pool, family: str) -> None:
    check(pool, 2, family, "zigzag", SAMPLE)


@pytest.mark.needs("--all-images")
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, "zigzag"), (2, "contiguous"), (2, "balanced"), (4, "zigzag"), (4, "contiguous")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_cases(pool: Pool, family: str, world_size: int, layout: str) -> None:
    check(pool, world_size, family, layout, CASES)


STEPS, DEPLOYED = 4, "Gemma 3"


def train(model: Any, rows: slice) -> list[float]:
    """Losses of some steps on some rows, each of which has one image."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        batch = {name: x[rows] for name, x in batch_of(DEPLOYED, "one image", step).items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.repeats  # as with text alone
@on_ranks(4)
def test_steps_of_fsdp_equal_one_process() -> None:
    """Differences of losses and parameters under FSDP2 from one process."""
    # The hidden states of a rank are a view, which FSDP2 says not to write to.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model, stock = small_model(DEPLOYED), small_model(DEPLOYED)
    parallelize_module(model, mesh["cp"], context_parallel_plan(model))
    shards = mesh["dp", "cp"]._flatten("dp_cp")
    layers = model.model.language_model.layers, model.model.vision_tower.encoder.layers
    for module in (*layers[0], *layers[1], model):
        fully_shard(module, mesh=shards)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no means
    row = mesh["dp"].get_local_rank()
    losses = torch.tensor(train(model, slice(row, row + 1)))
    dist.all_reduce(losses)
    expected = torch.tensor(train(stock, slice(None)))
    ours = get_model_state_dict(model)
    found = {"loss": (losses / 4 - expected).abs().max().item()} | {
        name: ((ours[name].full_tensor() - x).norm() / x.norm()).item()
        for name, x in get_model_state_dict(stock).items()
        if isinstance(ours[name], DTensor)
    }
    assert any("vision_tower" in name for name in found)
    assert largest(found.values()) < 1e-5, found


@pytest.mark.parametrize(
    ("what", "reason"),
    [("none", "pixel_values"), ("fewer", r"pixel_values.*\([23], 3, 16, 16\) on rank 1")],
)
@on_ranks(2)
def test_images_on_some_ranks(what: str, reason: str) -> None:
    """The error of ranks that get different batches, after one that was the same."""
    model, batch = planned("Gemma 3"), batch_of("Gemma 3", "several images")
    model(**batch).loss.backward()
    if dist.get_rank() == 1:
        images = batch.pop("pixel_values")
        batch |= {} if what == "none" else {"pixel_values": images[:2]}
    with pytest.raises(RingError) as error:
        model(**batch)
    error = str(error.value)
    assert re.search(reason, error), error


def refused(family: str) -> None:
    """What a model with images does not take over a sharded sequence, on every rank."""
    model, batch = planned(family), batch_of(family, "packed")
    before = model(**batch).loss.item()
    text = batch["position_ids"] if batch["position_ids"].ndim == 2 else batch["position_ids"][0]
    text[1] = torch.where(torch.arange(text.shape[1]) < 11, torch.arange(text.shape[1]), 0)
    with pytest.raises(ValueError, match="begins at token 11 of row 1, within an image"):
        model(**batch)
    batch = batch_of(family, "packed")
    with pytest.raises(ValueError, match="to be called as a whole"):
        model.model(**batch_of(family, "one image"))
    assert model(**batch).loss.item() == before


@pytest.mark.parametrize("family", ["Gemma 3", "Qwen2.5-VL"])
def test_refused_with_the_reason(pool: Pool, family: str) -> None:
    pool.run(2, refused, family)


def with_boundaries() -> list[float]:
    """Errors of documents that are given by their boundaries, and not by positions."""
    model, batch = planned("Qwen2.5-VL"), batch_of("Qwen2.5-VL", "packed")
    row = {name: x[:1] for name, x in batch.items() if name not in ("position_ids", *PATCHES)}
    positions = batch["position_ids"][:, :1]
    row |= {
        "pixel_values": batch["pixel_values"][:32],
        "image_grid_thw": batch["image_grid_thw"][:2],
    }
    expected = small_model("Qwen2.5-VL")(**row, position_ids=positions, use_cache=False).loss
    bounds = torch.tensor([0, 9, SEQ_LEN], dtype=torch.int32)
    found = model(**row, position_ids=positions[1:], cu_seq_lens_q=bounds).loss
    without = model(**row, position_ids=positions[1:]).loss
    assert (without - expected).abs() > 1e-4
    with pytest.raises(ValueError, match="give position_ids that start again"):
        planned("Gemma 3")(**batch_of("Gemma 3", "one image"), cu_seq_lens_q=bounds)
    return [(found - expected).abs().item()]


def test_boundaries(pool: Pool) -> None:
    assert largest(x for errors in pool.run(2, with_boundaries) for x in errors) < 1e-5


@on_ranks(2)
def test_outputs_and_back() -> None:
    """Errors of single outputs, and of the model once it is stock again."""
    family = "Gemma 3"
    stock, model = small_model(family), planned(family)
    batch = batch_of(family, "one image")
    del batch["labels"]
    with torch.no_grad():
        theirs, ours = stock(**batch, use_cache=False), model(**batch, output_hidden_states=True)
        kept = model(**batch, logits_to_keep=5).logits
        with stock_model(model):
            again = model(**batch, use_cache=False).logits
            tokens = [
                x.generate(**batch, max_new_tokens=3, do_sample=False) for x in (model, stock)
            ]
    assert torch.equal(*tokens)
    assert ours.image_hidden_states.shape == theirs.image_hidden_states.shape
    assert isinstance(ours.hidden_states[0], DTensor)
    pairs = [
        (unshard_sequence(ours.logits, 1)[:, : theirs.logits.shape[1]], theirs.logits),
        (ours.image_hidden_states, theirs.image_hidden_states),
        (kept, theirs.logits[:, -5:]),
        (again, theirs.logits),
    ]
    errors = [((x - y).norm() / y.norm()).item() for x, y in pairs]
    assert largest(errors) < 1e-5, errors


def from_meta(family: str) -> float:
    """The error of the loss of a model that got its weights after the plan."""
    stock, model = small_model(family), small_model(family).to("meta")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    parallelize_module(model, mesh, context_parallel_plan(model))
    model.to_empty(device="cpu")
    model.load_state_dict(stock.state_dict())
    for (_, ours), (_, theirs) in zip(model.named_buffers(), stock.named_buffers(), strict=True):
        ours.copy_(theirs)
    batch = batch_of(family, "several images")
    return (model(**batch).loss - stock(**batch).loss).abs().item()


@pytest.mark.parametrize("family", ["Gemma 3", "Qwen3-VL"])
def test_plan_before_weights(pool: Pool, family: str) -> None:
    assert largest(pool.run(2, from_meta, family)) < 1e-5


@on_ranks(2)
def test_classes_of_images() -> None:
    """Errors of loss and gradients of a model that makes classes of images and text."""
    models, losses = [], []
    family = FAMILIES["Gemma 3"]
    batch = batch_of("Gemma 3", "padded right") | {"labels": torch.tensor([1, 2])}
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    for is_ring in (False, True):
        torch.manual_seed(0)
        config = Gemma3Config(
            text_config=family.text, vision_config=family.vision, **family.options, num_labels=3
        )
        models.append(Gemma3ForSequenceClassification(config).eval())
        if is_ring:
            parallelize_module(models[-1], mesh, context_parallel_plan(models[-1]))
        losses.append(models[-1](**batch).loss)
        losses[-1].backward()
    errors = [(losses[0] - losses[1]).abs().item()]
    for stock, ours in zip(*(model.parameters() for model in models), strict=True):
        if stock.grad is not None:
            dist.all_reduce(ours.grad)
            difference = (ours.grad / dist.get_world_size() - stock.grad).norm()
            errors.append((difference / stock.grad.norm().clamp(min=1e-3)).item())
    assert largest(errors) < 1e-5
