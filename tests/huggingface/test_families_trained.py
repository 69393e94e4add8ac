"""Models under their plan, trained the way people train: FSDP2 and checkpointing."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_ring.ops.ring_op import ring_backward_op, ring_op
from parallel_plans.huggingface import ring_checkpoint_contexts
from tests.dense import largest
from tests.families import VOCABULARY, small_model
from tests.huggingface.planned import gradient_errors, relative, shard_weights, under_plan
from tests.pool import on_ranks
from tests.results import of_first_rank

STEPS, SEQ_LEN = 4, 24
CHECKPOINTING = {
    "none": None,
    "full": {"use_reentrant": False},
    "selective": {"use_reentrant": False, "context_fn": ring_checkpoint_contexts},
}


class RingCalls(TorchDispatchMode):
    """Counts the calls of both ops."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += func in (ring_op, ring_backward_op)
        return func(*args, **kwargs or {})


def batch_of(step: int) -> torch.Tensor:
    return torch.randint(2, VOCABULARY, (2, SEQ_LEN), generator=torch.Generator().manual_seed(step))


def train(model: Any, rows: slice, steps: range = range(STEPS)) -> tuple[list[float], Counter[Any]]:
    """Losses of the steps, and ring calls of the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, counts = [], Counter()
    for step in steps:
        tokens = batch_of(step)[rows]
        with RingCalls() as calls:
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        counts = calls.counts
    return losses, counts


def sharded(
    family: str,
    checkpointing: dict[str, Any] | None,
    layout: str = "zigzag",
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, int]:
    """A model, with changes of its config, on (dp, cp) ranks under FSDP2, and this rank's index of
    dp."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    model = small_model(family, **changes or {}).train()
    under_plan(model, layout, mesh=mesh["cp"])
    if checkpointing:
        model.activation_checkpointing_enable(checkpointing)
    every = mesh["dp", "cp"]._flatten("dp_cp")
    shard_weights(model, model.get_decoder().layers, every, **options)
    return model, mesh["dp"].get_local_rank()


def trained_alone(
    family: str, changes: dict[str, Any] | None = None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of one process."""
    model = small_model(family, **changes or {}).train()
    return train(model, slice(None))[0], model.state_dict()


def check_steps(
    family: str,
    checkpointing: dict[str, Any] | None,
    layout: str = "zigzag",
    changes: dict[str, Any] | None = None,
) -> tuple[int, int]:
    """Losses and parameters are those of one process; returns the ring calls of a step."""
    model, row = sharded(family, checkpointing, layout, changes)
    losses, counts = train(model, slice(row, row + 1))
    expected, stock = of_first_rank(lambda: trained_alone(family, changes))
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    states = get_model_state_dict(model), stock
    whole = {k: x.full_tensor() if isinstance(x, DTensor) else x for k, x in states[0].items()}
    assert (mean / 4 - torch.tensor(expected)).abs().max() < 1e-5
    for name, x in states[1].items():
        if x.is_floating_point():  # some buffers are zero, and stay so
            assert relative(whole[name], x, 1e-30) < 1e-5, name
        else:
            assert torch.equal(whole[name], x), name
    return counts[ring_op], counts[ring_backward_op]


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        pytest.param("none", (2, 2), marks=pytest.mark.repeats),  # as in the demo
        *(("full", (4, 2)), ("selective", (2, 2))),
    ],
)
@on_ranks(4)
def test_steps_of_fsdp_equal_one_process(name: str, calls: tuple[int, int]) -> None:
    """Selective checkpointing makes one ring forward and one backward for each of two layers."""
    assert check_steps("Llama", CHECKPOINTING[name]) == calls


@on_ranks(4)
def test_mixed_precision() -> None:
    """In bfloat16 under FSDP2, beside one process in float32."""
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, row = sharded("Llama", None, mp_policy=precision)
    mean = torch.tensor(train(model, slice(row, row + 1))[0])
    dist.all_reduce(mean)
    losses, expected = (mean / 4).tolist(), of_first_rank(lambda: trained_alone("Llama"))[0]
    assert losses == pytest.approx(expected, rel=0.02)
    assert losses != pytest.approx(expected, rel=1e-6), "it was not bfloat16"


TENSOR_PARALLEL = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ColwiseParallel),
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ColwiseParallel),
    **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), RowwiseParallel),
}


@pytest.mark.parametrize(
    "family",
    # As in test_trainer_steps.
    [pytest.param("Llama", marks=pytest.mark.repeats), "Mistral, short window"],
)
@on_ranks(4)
def test_tensor_parallelism_beside_it(family: str) -> None:
    """On (cp, tp) ranks: heads and sequence sharded."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    stock, model = small_model(family), small_model(family)
    for layer in model.model.layers:
        styles = {name: style() for name, style in TENSOR_PARALLEL.items()}
        parallelize_module(layer, mesh["tp"], styles)
        layer.self_attn.num_key_value_groups = 2
    under_plan(model, mesh=mesh["cp"])
    tokens = batch_of(0)
    losses = [x(input_ids=tokens, labels=tokens).loss for x in (model, stock)]
    for loss in losses:
        loss.backward()
    assert (losses[0] - losses[1]).abs() < 1e-5
    assert largest(gradient_errors(model, stock, mesh["cp"].get_group(), floor=0)) < 1e-5


@pytest.mark.parametrize("is_plan_first", [True, False], ids=["plan first", "adapters first"])
@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("Llama", ["q_proj", "v_proj"]),
        ("Granite 4", ["in_proj", "q_proj"]),  # of a layer with a state, and of attention
        ("GLM-5-Next", ["q_proj", "q_b_proj", "wq_b"]),  # of a layer with a state, and of an index
        ("DeepSeek-V4", ["kv_proj", "q_b_proj"]),  # of pools, and of an index
        ("MiniMax M3", ["q_proj", "v_proj"]),  # those of its index, too, which get no gradient
        pytest.param("Qwen3-Next", ["in_proj_qkvz", "q_proj"], marks=pytest.mark.repeats),
        pytest.param(
            "Qwen4-Exp", ["in_proj_qkv", "index_qk_proj", "q_proj"], marks=pytest.mark.repeats
        ),
        pytest.param("MiniMax-01", ["qkv_proj", "q_proj"], marks=pytest.mark.repeats),
    ],
)
@on_ranks(2)
def test_lora(family: str, targets: list[str], is_plan_first: bool) -> None:
    """The loss, the gradients of adapters, and the loss after they were merged."""
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # asked by peft
    adapters = LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
    models, losses, tokens = [], [], batch_of(0)
    for is_ring in (True, False):
        model = small_model(family)
        if is_ring and is_plan_first:
            under_plan(model)
        torch.manual_seed(1)
        models.append(get_peft_model(model, adapters))
        if is_ring and not is_plan_first:
            assert under_plan(models[-1]) is models[-1]
        losses.append(models[-1](input_ids=tokens, labels=tokens).loss)
        losses[-1].backward()
    errors = [(losses[0] - losses[1]).abs().item(), *gradient_errors(*models, floor=0)]
    ours, theirs = (model.merge_and_unload()(input_ids=tokens, labels=tokens) for model in models)
    errors.append((ours.loss - theirs.loss).abs().item())
    assert len(errors) > 4
    assert largest(errors) < 1e-5, errors


@on_ranks(4)
def test_distributed_checkpoint_goes_on(tmp_path: Path) -> None:
    """Losses of all steps, those after the second when a checkpoint was loaded into a new model."""
    model, row = sharded("Llama", None)
    whole, _ = train(model, slice(row, row + 1))
    first, _ = sharded("Llama", None)
    losses, _ = train(first, slice(row, row + 1), range(2))
    dcp.save({"model": get_model_state_dict(first)}, checkpoint_id=tmp_path)
    second, _ = sharded("Llama", None)
    state = get_model_state_dict(second)
    dcp.load({"model": state}, checkpoint_id=tmp_path)
    set_model_state_dict(second, state)
    losses += train(second, slice(row, row + 1), range(2, STEPS))[0]
    differences = [abs(ours - theirs) for ours, theirs in zip(losses, whole, strict=True)]
    assert largest(differences) < 1e-6, differences
