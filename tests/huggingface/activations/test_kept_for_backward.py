"""Models with tiles and host memory train as without, and keep what is counted here."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring.lab.training.footprint import Storages
from parallel_plans.huggingface import context_parallel_plan, ring_checkpoint_contexts
from parallel_plans.huggingface.activations.kept_for_backward import HOST_MEMORY
from parallel_plans.huggingface.activations.token_tiles import tokenwise_modules
from tests.dense import largest
from tests.families import VOCABULARY, small_model
from tests.huggingface.activations.played_copies import PlayedCopies
from tests.pool import Pool

STEPS, SEQ_LEN = 3, 24
KEPT = {"mlp_tile": 5, "offload": True}
SELECTIVE = {"use_reentrant": False, "context_fn": ring_checkpoint_contexts}


class Case(NamedTuple):
    """A model, and how it is trained on (dp, cp) ranks."""

    family: str = "Llama"
    has_lora: bool = False
    is_compiled: bool = False
    layout: str | None = "zigzag"
    dtype: torch.dtype = torch.float64


def trained(case: Case, is_kept: bool) -> tuple[list[float], dict[str, Any], int]:
    """Losses, parameters, and how many tensors went to host memory."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = small_model(case.family).to(case.dtype).train()
    plan = context_parallel_plan(model, case.layout, **KEPT if is_kept else {})
    parallelize_module(model, mesh["cp"], plan)
    copies = played(model)
    trains = model
    if case.has_lora:
        targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
        adapters = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        torch.manual_seed(1)
        trains = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    model.activation_checkpointing_enable(SELECTIVE)
    layers, everyone = model.base_model.layers, mesh["dp", "cp"]._flatten("dp_cp")
    for layer in layers if case.is_compiled else ():
        layer.compile(backend="aot_eager", fullgraph=True)
    for module in (*layers, model):
        fully_shard(module, mesh=everyone)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    trainable = [x for x in trains.parameters() if x.requires_grad]
    # In float32 the sign of gradients near zero is a matter of rounding, see test_trainer_steps.
    eps = 1e-8 if case.dtype == torch.float64 else 1e-2
    optimizer = torch.optim.AdamW(trainable, lr=1e-2, eps=eps)
    losses, row = [], mesh["dp"].get_local_rank()
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(2, VOCABULARY, (2, SEQ_LEN), generator=generator)[row, None]
        loss = trains(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    whole = {name: x.full_tensor() for name, x in trains.named_parameters()}
    return losses, whole, len(copies.hosts)


def played(model: Any) -> PlayedCopies:
    """Let the CPU stand for a device, if the model has a plan that offloads."""
    copies = PlayedCopies()
    if memory := vars(model.base_model).get(HOST_MEMORY):
        memory.copies, memory.min_bytes = copies, 0
    return copies


def differences(case: Case) -> tuple[list[float], list[int]]:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    (losses, parameters, kept), (expected, whole, none) = (trained(case, x) for x in (True, False))
    found = [abs(x - y) for x, y in zip(losses, expected, strict=True)]
    assert len(set(losses)) == STEPS
    found += [((parameters[k] - x).norm() / x.norm()).item() for k, x in whole.items()]
    return found, [kept, none]


@pytest.mark.parametrize(
    "case",
    [
        *(Case(has_lora=True), Case("Qwen3-MoE, router loss", dtype=torch.float32)),
        *(
            pytest.param(case, marks=pytest.mark.repeats)
            for case in (
                *(Case(), Case("Gemma 3"), Case("gpt-oss", dtype=torch.float32)),
                # Not Qwen3-Next: a change of its weights by 1e-7 grows to 6e-4 in ten steps.
                *(Case("LFM2", layout=None), Case("OLMo hybrid", layout=None)),
                *(Case(is_compiled=True), Case(has_lora=True, is_compiled=True)),
            )
        ),
    ],
    ids=str,
)
def test_steps_equal_those_without(pool: Pool, case: Case) -> None:
    for found, (kept, none) in pool.run(4, differences, case):
        assert largest(found) < 1e-6, found
        assert kept > 0 == none


def compiled_differences(is_whole: bool) -> tuple[list[float], int]:
    """Differences of loss and gradients from those of a plain plan, and what was moved."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    mesh, found, copies = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",)), [], PlayedCopies()
    for options in ({}, KEPT):
        model = small_model("Llama", num_hidden_layers=1).double().train()
        parallelize_module(model, mesh, context_parallel_plan(model, **options))
        copies = played(model)
        if options:
            model.activation_checkpointing_enable(SELECTIVE)
            part = model if is_whole else model.model.layers[0]
            part.compile(backend="aot_eager", fullgraph=True)
        tokens = torch.arange(2, 11).unsqueeze(0)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        found.append([loss, *(x.grad for x in model.parameters())])
    errors = [(x - y).norm().item() for x, y in zip(*found, strict=True)]
    return errors, len(copies.hosts)


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.repeats)])
def test_compiled(pool: Pool, is_whole: bool) -> None:
    """A graph of the whole model moves nothing."""
    ((errors, num_moved),) = pool.run(1, compiled_differences, is_whole)
    assert largest(errors) < 1e-6, errors
    # A layer's input and results of its attention, and the input of the last norm.
    assert num_moved == 0 if is_whole else num_moved >= 4


HIDDEN, HEADS, HEAD_DIM = 32, 4, 8
WIDE = {"hidden_size": HIDDEN, "intermediate_size": 128, "max_position_embeddings": 512}


def bytes_of_step(num_layers: int, num_tokens: int, options: dict[str, Any]) -> tuple[int, int]:
    """Bytes that a forward keeps, and the most of the step, beside parameters and gradients."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    model = small_model("Llama", num_hidden_layers=num_layers, **WIDE).train()
    parallelize_module(model, mesh, context_parallel_plan(model, **options))
    played(model)
    model.activation_checkpointing_enable(SELECTIVE)
    tokens = torch.arange(num_tokens).unsqueeze(0) % VOCABULARY
    for x in model.parameters():
        x.grad = torch.zeros_like(x)
    with Storages() as storages:
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        kept = storages.alive
        loss.backward()
    return kept, storages.peak


def bytes_by_token(options: dict[str, Any]) -> list[tuple[float, float]]:
    """What a token more adds to both, with two layers and with four."""
    shorter, longer = ([bytes_of_step(n, length, options) for n in (2, 4)] for length in (256, 512))
    return [
        ((more[0] - less[0]) / 256, (more[1] - less[1]) / 256)
        for less, more in zip(shorter, longer, strict=True)
    ]


def test_bytes_of_a_token(pool: Pool) -> None:
    """A layer keeps its input and the results of its attention; moved, it keeps nothing."""
    by_layer = 4 * HIDDEN + 4 * HEADS * HEAD_DIM + 4 * HEADS
    ((plain, plain_peak), (deeper, deeper_peak)) = pool.run(1, bytes_by_token, {})[0]
    assert deeper - plain == deeper_peak - plain_peak == 2 * by_layer
    options = {"mlp_tile": 16, "offload": True}
    (few, more) = pool.run(1, bytes_by_token, options)[0]
    assert few == more
    # What attention, norms and the residual hold of one layer remains.
    assert few[1] < 13 * 4 * HIDDEN < plain_peak / 2.5


def on_meta() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
    for family in ("Llama", "Qwen3-MoE"):
        with torch.device("meta"):
            model = type(stock := small_model(family))(stock.config)
        parallelize_module(model, mesh, context_parallel_plan(model, mlp_tile=5))
        tiled = {name for name, x in model.named_modules() if "forward" in vars(x)}
        assert tiled == {"", *tokenwise_modules(stock)}


def test_modules_of_a_model_without_weights(pool: Pool) -> None:
    pool.run(1, on_meta)
