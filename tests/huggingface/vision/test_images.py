"""Whole models that read images and text, also sharded images, equal the stock model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import Gemma3Config, Gemma3ForSequenceClassification

from dtensor_ring import RingError, unshard_sequence
from parallel_plans.huggingface import context_parallel_plan, stock_model
from parallel_plans.huggingface.vision.image_sharding import (
    EmbeddingSize,
    Images,
    ImageSharding,
    Share,
)
from tests.dense import largest
from tests.huggingface.planned import (
    Results,
    errors_of,
    gradient_errors,
    relative,
    shard_weights,
    under_plan,
)
from tests.multimodal import CASES, FAMILIES, SEQ_LEN, batch_of, small_model
from tests.pool import on_ranks
from tests.results import difference, of_first_rank, results_of, results_with_logits

SAMPLE = ("several images", "padded left", "packed")
"""Of the cases; `--all-images` runs the others, too, more ranks and another layout."""
PATCHES = ("pixel_values", "image_grid_thw")


@lru_cache(maxsize=1)
def stock_results(family: str, cases: tuple[str, ...]) -> dict[str, Results]:
    """By case, of one process; once for all layouts."""
    stock = small_model(family)
    return {case: results_with_logits(stock, batch_of(family, case)) for case in cases}


def planned(family: str, layout: str = "zigzag", **options: Any) -> Any:
    return under_plan(small_model(family), layout, **options)


def check(family: str, layout: str, cases: tuple[str, ...]) -> None:
    model = planned(family, layout, unshard_outputs=True)
    expected = of_first_rank(lambda: stock_results(family, cases))
    for case, of_stock in expected.items():
        # Without logits the head makes the losses of its tokens.
        batch = batch_of(family, case)
        without = model(**batch).loss.detach()
        assert relative(without, of_stock[0]) < 1e-5, case
        errors = errors_of(results_with_logits(model, batch), of_stock)
        assert largest(errors.values()) < 1e-5, (case, errors)


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2)
def test_images_equal_the_stock_model(family: str) -> None:
    check(family, "zigzag", SAMPLE)


@pytest.mark.needs("--all-images")
@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, "zigzag"), (2, "contiguous"), (2, "balanced"), (4, "zigzag"), (4, "contiguous")],
)
@pytest.mark.parametrize("family", FAMILIES)
@on_ranks()
def test_all_cases(family: str, layout: str) -> None:
    check(family, layout, CASES)


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
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model, stock = small_model(DEPLOYED), small_model(DEPLOYED)
    under_plan(model, mesh=mesh["cp"])
    layers = [*model.model.language_model.layers, *model.model.vision_tower.encoder.layers]
    shard_weights(model, layers, mesh["dp", "cp"]._flatten("dp_cp"))
    row = mesh["dp"].get_local_rank()
    losses = torch.tensor(train(model, slice(row, row + 1)))
    dist.all_reduce(losses)
    expected = torch.tensor(train(stock, slice(None)))
    ours = get_model_state_dict(model)
    found = {"loss": (losses / 4 - expected).abs().max().item()} | {
        name: relative(ours[name].full_tensor(), x)
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
    model, batch = planned("Gemma 3"), batch_of("Gemma 3", "several images")
    model(**batch).loss.backward()
    if dist.get_rank() == 1:
        images = batch.pop("pixel_values")
        batch |= {} if what == "none" else {"pixel_values": images[:2]}
    with pytest.raises(RingError, match=reason):
        model(**batch)


@pytest.mark.parametrize("family", ["Gemma 3", "Qwen2.5-VL"])
@on_ranks(2)
def test_refused_with_the_reason(family: str) -> None:
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


@on_ranks(2)
def test_boundaries() -> None:
    """Documents may be given by their boundaries, and not by positions."""
    model, batch = planned("Qwen2.5-VL"), batch_of("Qwen2.5-VL", "packed")
    row = {name: x[:1] for name, x in batch.items() if name not in ("position_ids", *PATCHES)}
    positions = batch["position_ids"][:, :1]
    row |= {name: batch[name][:n] for name, n in zip(PATCHES, (32, 2), strict=True)}
    expected = small_model("Qwen2.5-VL")(**row, position_ids=positions, use_cache=False).loss
    bounds = torch.tensor([0, 9, SEQ_LEN], dtype=torch.int32)
    found = model(**row, position_ids=positions[1:], cu_seq_lens_q=bounds).loss
    without = model(**row, position_ids=positions[1:]).loss
    assert (without - expected).abs() > 1e-4
    with pytest.raises(ValueError, match="give position_ids that start again"):
        planned("Gemma 3")(**batch_of("Gemma 3", "one image"), cu_seq_lens_q=bounds)
    assert (found - expected).abs() < 1e-5


@on_ranks(2)
def test_outputs_and_back() -> None:
    """Single outputs, and the model once it is stock again."""
    stock, model = small_model("Gemma 3"), planned("Gemma 3")
    batch = batch_of("Gemma 3", "one image")
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
    for found, expected in (
        (unshard_sequence(ours.logits, 1)[:, : theirs.logits.shape[1]], theirs.logits),
        (ours.image_hidden_states, theirs.image_hidden_states),
        (kept, theirs.logits[:, -5:]),
        (again, theirs.logits),
    ):
        assert relative(found, expected) < 1e-5


@pytest.mark.parametrize("family", ["Gemma 3", "Qwen3-VL"])
@on_ranks(2)
def test_plan_before_weights(family: str) -> None:
    stock, model = small_model(family), small_model(family).to("meta")
    under_plan(model)
    model.to_empty(device="cpu")
    model.load_state_dict(stock.state_dict())
    for (_, ours), (_, theirs) in zip(model.named_buffers(), stock.named_buffers(), strict=True):
        ours.copy_(theirs)
    batch = batch_of(family, "several images")
    assert (model(**batch).loss - stock(**batch).loss).abs() < 1e-5


@on_ranks(2)
def test_classes_of_images() -> None:
    models, losses = [], []
    family = FAMILIES["Gemma 3"]
    batch = batch_of("Gemma 3", "padded right") | {"labels": torch.tensor([1, 2])}
    for is_ring in (False, True):
        torch.manual_seed(0)
        config = Gemma3Config(
            text_config=family.text, vision_config=family.vision, **family.options, num_labels=3
        )
        models.append(Gemma3ForSequenceClassification(config).eval())
        if is_ring:
            under_plan(models[-1])
        losses.append(models[-1](**batch).loss)
        losses[-1].backward()
    assert (losses[0] - losses[1]).abs() < 1e-5
    assert largest(gradient_errors(models[1], models[0])) < 1e-5


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


COMPILED, CASE = "LLaVA", "several images"
"""Its language model makes its masks. Those of Gemma 3 differ with the batch."""


def shallow(model: Any) -> Any:
    """The model with one layer of text: a compiler takes its time for each."""
    del model.model.language_model.layers[1:]
    return model


@on_ranks(2, timeout=300)
def test_whole_model_in_one_graph() -> None:
    # Dynamo looks for a gradient of what it compiles, be it a leaf or not.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    model, counter = shallow(planned(COMPILED)), CompileCounterWithBackend("aot_eager")
    # Transformers puts its hooks in at the first call, which cannot be compiled.
    model(**batch_of(COMPILED, CASE))
    model.compile(backend=counter, fullgraph=True)
    errors = []
    for seed in (1, 2):  # other tokens, and no other graph
        batch = batch_of(COMPILED, CASE, seed)
        expected = results_of(shallow(small_model(COMPILED)), batch)
        errors.append(difference(results_of(model, batch), expected)[0])
    assert counter.frame_count == 1
    assert largest(errors) < 1e-5


WHOLE = ("SmolVLM",)
"""Rows of images, of which those of zeros are none, are not cut."""
SHARDED_CASES = {"several images": 3, "one image": 2, "packed": 3, "padded right": 3}
"""Images of a batch: of three one rank gets two, and one of four ranks none."""


def image_sharding_of(model: Any) -> ImageSharding:
    found = [vars(x).get("context_parallel_images") for x in model.modules()]
    return next(x for x in found if x is not None)


def num_run(model: Any, family: str, case: str) -> int:
    """How many images this rank ran; loss and gradients are those of the stock model."""
    batch = batch_of(family, case)
    expected = of_first_rank(lambda: results_of(small_model(family), batch))
    assert difference(results_of(model, batch), expected)[0] < 1e-5, case
    return image_sharding_of(model).num_run


def check_sharded(family: str, cases: Iterable[str]) -> None:
    # Contiguous: one rank runs an image whose tokens another has.
    model, counts = planned(family, "contiguous", deal_images=True), [0] * dist.get_world_size()
    for case in cases:
        dist.all_gather_object(counts, num_run(model, family, case))
        assert sum(counts) == (0 if family in WHOLE else SHARDED_CASES[case]), (case, counts)


@pytest.mark.parametrize(
    ("family", "world_size"), [*((x, 2) for x in FAMILIES), ("Gemma 3", 4), ("Qwen3-VL", 4)]
)
@on_ranks()
def test_equals_one_process(family: str) -> None:
    check_sharded(family, ["several images"])


@pytest.mark.needs("--all-images")
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
@on_ranks()
def test_all_sharded_cases(family: str) -> None:
    check_sharded(family, SHARDED_CASES)


@on_ranks(2)
def test_one_image_on_two_ranks() -> None:
    """The second row alone, which has one image: every rank runs it."""
    model, stock = planned("Gemma 3", deal_images=True), small_model("Gemma 3")
    batch = {name: x[-1:] for name, x in batch_of("Gemma 3", "several images").items()}
    error = difference(results_of(model, batch), results_of(stock, batch))[0]
    assert error < 1e-5
    assert image_sharding_of(model).num_run == 1


@on_ranks(2)
def test_images_that_mix_in_the_encoder() -> None:
    """An encoder that mixes images is found, and runs whole on every rank."""
    kind = type(small_model("Gemma 3").model)
    plain = kind.get_image_features

    def mixing(self: Any, pixel_values: Tensor, **kwargs: Any) -> Any:
        output = plain(self, pixel_values, **kwargs)
        output.pooler_output = output.pooler_output + output.pooler_output.mean(0)
        return output

    with mock.patch.object(kind, "get_image_features", mixing):
        model = planned("Gemma 3", "contiguous", deal_images=True)
        assert num_run(model, "Gemma 3", "several images") == 3


@on_ranks(4)
def test_a_rank_without_an_image_under_fsdp() -> None:
    model, stock = planned("Gemma 3", deal_images=True), small_model("Gemma 3")
    shard_weights(model, model.model.vision_tower.encoder.layers)
    batch = batch_of("Gemma 3", "several images")
    for x in (model, stock):
        x(**batch, use_cache=False).loss.backward()
    assert image_sharding_of(model).num_run == (1, 0, 1, 1)[dist.get_rank()]
    errors = gradient_errors(model, stock)
    assert len(errors) > 20
    assert largest(errors) < 1e-5, errors


MANY_PATCHES, WIDTH = 256, 4 * 1024
"""Of an image, and bytes of a token's embedding."""


@pytest.mark.parametrize(
    ("sizes", "num_weights", "trains", "is_sharded"),
    [
        # Half of 512 patches saves 2 * 256 flops for each weight, and 2 * 512 * 4096 bytes travel,
        # worth 8,000 flops each.
        ((1, 1), 65_500_000, False, False),
        ((1, 1), 65_600_000, False, True),
        ((1, 1), 21_800_000, True, False),  # with its backward, it saves three times as much
        ((1, 1), 21_900_000, True, True),
        ((1, 1, 1), 98_200_000, False, False),  # a third is saved only
        ((1, 1, 1), 98_400_000, False, True),
    ],
)
def test_images_are_sharded_where_it_pays(
    sizes: tuple[int, ...], num_weights: int, trains: bool, is_sharded: bool
) -> None:
    image_sharding: Any = ImageSharding(None, num_weights, 1, None)  # type: ignore[arg-type]
    image_sharding._embeddings = EmbeddingSize(MANY_PATCHES, WIDTH)  # type: ignore[arg-type]
    images: Any = Images.of({"pixel_values": torch.empty(len(sizes), 3, 16, 16)})
    assert images.sizes == sizes
    with torch.set_grad_enabled(trains):
        assert image_sharding._pays(images, Share.of(sizes, 0, 2)) == is_sharded


@pytest.mark.parametrize(
    ("deals", "reason"),
    [(True, "Gemma3TextModel has none; leave deal_images out"), (1.5, "True, False or None, got")],
)
def test_refused_without_images(deals: Any, reason: str) -> None:
    text = small_model("Gemma 3").model.language_model
    assert context_parallel_plan(text, deal_images=False)
    with pytest.raises(ValueError, match=reason):
        context_parallel_plan(text, deal_images=deals)
