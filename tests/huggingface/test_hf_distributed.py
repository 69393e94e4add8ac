"""Models that one call loads over all ranks, or that ranks shard before they have weights."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import ParallelismConfig
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from parallel_plans.huggingface import context_parallel_model
from tests.dense import largest
from tests.families import HYBRIDS, VOCABULARY, small_model
from tests.huggingface.planned import (
    all_ranks,
    gradient_errors,
    relative,
    shard_weights,
    under_plan,
)
from tests.pool import Pool, on_ranks

# Of embeddings and experts, as transformers shards them by tensor parallelism.
HARMLESS = "FSDP2-wrapped module .* returned a view"


class Case(NamedTuple):
    """A model, the ranks of its sequence, and the rest of its degrees."""

    family: str
    cp_size: int
    degrees: dict[str, Any]
    changes: tuple[tuple[str, Any], ...] = ()

    def halves_experts(self) -> bool:
        """Whether each expert is sharded by tensor parallelism, and by FSDP2 beside it."""
        is_tensor_parallel = self.degrees.get("tp_size", 1) > 1 and "ep_size" not in self.degrees
        return is_tensor_parallel and self.family in (EXPERTS, "Mixtral, router loss", DEEPSEEK)

    def stock(self) -> Any:
        return small_model(self.family, **dict(self.changes))

    def __str__(self) -> str:
        listed = ", ".join(f"{name} {size}" for name, size in self.degrees.items())
        return f"{self.family}, cp {self.cp_size}, {listed}"


EXPERTS, DEEPSEEK = "Qwen3-MoE, router loss", "DeepSeek-V3"
# The halves of experts over ranks of tensor parallelism are multiples of 16 bytes.
WIDE = (("moe_intermediate_size", 16),)
CASES = [
    Case(EXPERTS, 2, {"fsdp_size": 2, "ep_size": 2}),
    Case(EXPERTS, 2, {"tp_size": 2, "ep_size": 2}),
]
REPEATED = [
    Case(EXPERTS, 4, {"ep_size": 4}),
    Case(EXPERTS, 2, {"tp_size": 2, "ep_size": 4, "ep_implementation": "all_to_all"}),
    Case(EXPERTS, 2, {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"}),
    Case(EXPERTS, 2, {"dp_replicate_size": 2, "ep_size": 2}),
    Case("Mixtral, router loss", 2, {"fsdp_size": 2, "ep_size": 2}),
    Case("gpt-oss", 2, {"fsdp_size": 2, "ep_size": 4}),
    Case(DEEPSEEK, 2, {"fsdp_size": 2, "ep_size": 2}),
    Case("Llama", 2, {"fsdp_size": 2}),
    Case("Llama", 2, {"fsdp_size": 2}, (("tie_word_embeddings", True),)),
    Case("Llama", 2, {"dp_replicate_size": 2}),
    Case("Llama", 2, {"tp_size": 2}),
    Case("gpt-oss", 2, {"tp_size": 2}),
    Case("gpt-oss", 2, {"tp_size": 2, "ep_size": 2}),
    Case(DEEPSEEK, 2, {"tp_size": 2}, WIDE),
    Case(DEEPSEEK, 2, {"tp_size": 2, "ep_size": 2}),
    Case("Mixtral, router loss", 2, {"tp_size": 2}),
    Case("Mixtral, router loss", 2, {"tp_size": 2, "ep_size": 2}),
    Case(EXPERTS, 2, {"tp_size": 2}, WIDE),
    Case(EXPERTS, 2, {"fsdp_size": 2}),
    Case("Gemma 3", 2, {"fsdp_size": 2}),
    Case("Gemma 3", 2, {"tp_size": 2}),
    Case("LFM2", 2, {"fsdp_size": 2}),
]


def errors(folder: str, case: Case) -> tuple[float, dict[str, float]]:
    """Of the loss of this rank's rows, and of the gradients of all, relative."""
    warnings.filterwarnings("ignore", HARMLESS)
    model = context_parallel_model(
        AutoModelForCausalLM, folder, cp_size=case.cp_size, distributed_config=case.degrees
    )
    stock = case.stock()
    seeded = torch.Generator().manual_seed(0)
    tokens = torch.randint(2, VOCABULARY, (4, 23), generator=seeded)  # two rows for a replica
    replica = model.context_parallel_replica
    batches = tokens.chunk(replica["num_replicas"])
    losses = [stock(input_ids=x, labels=x, use_cache=False).loss for x in batches]
    (sum(losses) / len(losses)).backward()
    own = batches[replica["rank"]]
    loss = model(input_ids=own, labels=own).loss
    loss.backward()
    pairs = zip(model.named_parameters(), stock.named_parameters(), strict=True)
    found = {name: _error(x, y) for (name, x), (_, y) in pairs if y.grad is not None}
    return (loss - losses[replica["rank"]]).abs().item(), found


def _error(ours: Any, theirs: Any) -> float:
    grad = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
    return ((grad - theirs.grad).norm() / theirs.grad.norm()).item()


@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.repeats) for case in REPEATED)],
    ids=str,
)
def test_equals_one_process(pool: Pool, tmp_path: Path, case: Case) -> None:
    if case.halves_experts() and TorchVersion(torch.__version__) < (2, 12):
        pytest.skip("DTensor of torch 2.11 makes no whole tensor of weights that are sharded twice")
    case.stock().save_pretrained(tmp_path)
    for of_loss, of_gradients in pool.run(4, errors, str(tmp_path), case):
        assert of_loss < 1e-6
        assert all(x < 5e-6 for x in of_gradients.values()), of_gradients


@pytest.mark.repeats  # the axes of two cases above
def test_all_axes(tmp_path: Path) -> None:
    """Tensor and expert parallelism, FSDP2 and the ring, on 8 ranks."""
    degrees = {"fsdp_size": 2, "tp_size": 2, "ep_size": 4}
    case = Case(EXPERTS, 2, degrees, (("num_experts", 8),))
    case.stock().save_pretrained(tmp_path)
    pool = Pool(8)
    try:
        for of_loss, of_gradients in pool.run(8, errors, str(tmp_path), case):
            assert of_loss < 1e-6
            assert all(x < 5e-6 for x in of_gradients.values()), of_gradients
    finally:
        pool.close()


def saved_and_loaded(folder: str, degrees: dict[str, Any]) -> list[float]:
    """Losses before a checkpoint that each rank writes its part of, and of what others read."""
    tokens = torch.arange(2, 30)[None]
    losses = []
    for name, cp_size, config in ((folder, 2, degrees), (f"{folder}/parts", 4, {})):
        model = context_parallel_model(
            AutoModelForCausalLM, name, cp_size=cp_size, distributed_config=config
        )
        losses.append(model(input_ids=tokens, labels=tokens).loss.item())
        if cp_size == 2:
            model.save_pretrained(f"{folder}/parts", distributed_checkpoint=True)
            dist.barrier()
    return losses


def test_checkpoint_of_other_degrees(pool: Pool, tmp_path: Path) -> None:
    model = small_model("Llama")
    model.save_pretrained(tmp_path)
    tokens = torch.arange(2, 30)[None]
    expected = model(input_ids=tokens, labels=tokens).loss.item()
    degrees = DistributedConfig(fsdp_size=2).to_dict()
    for losses in pool.run(4, saved_and_loaded, str(tmp_path), degrees):
        assert losses == pytest.approx([expected] * 2, rel=1e-6)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cp_size": 4}, r"has 4 ranks \(.* x cp 4 x .*started 2; .*as with cp_size=N beside Distrib"),
    ({"cp_size": 0}, "the degree of cp is a number of ranks, got 0"),
    ({"distributed_config": {"fsdp_size": 0}}, "the degree of fsdp is a number .* got 0"),
    ({"distributed_config": {"fsdp": 2}}, "DistributedConfig has no fsdp; it has .*'fsdp_size'"),
    ({"distributed_config": {"cp_size": 2}}, "has no cp_size; .* is an argument beside it"),
    ({"distributed_config": ParallelismConfig(cp_size=2)}, "ParallelismConfig; .* for TrainingArg"),
    ({"distributed_config": {"pp_size": 2}}, "pp_size=2 is not supported: .* torchtitan trains"),
    (
        {"distributed_config": {"enable_sequence_parallel": True}},
        "enable_sequence_parallel=True is not supported: transformers reserves it",
    ),
    ({"distributed_config": {"ep_size": 3}}, r"ep_size=3 is not a multiple of tp_size=1 that div"),
    ({"distributed_config": {"ep_size": 2}}, "LlamaForCausalLM` has no `ep_plan`"),
    ({"plan": {"layout": "spiral"}}, "unknown layout 'spiral'"),
]


def all_refused(folder: str, experts: str, few_experts: str) -> None:
    for asked, message in REFUSED:
        with pytest.raises((TypeError, ValueError), match=message):
            context_parallel_model(AutoModelForCausalLM, folder, **{"cp_size": 2} | asked)
    with pytest.raises(ValueError, match=r"must ask for the same degrees, .* in cp_size: 1 on .0."):
        context_parallel_model(AutoModelForCausalLM, folder, cp_size=1 + dist.get_rank())
    asked = {"cp_size": 2, "distributed_config": {"ep_size": 2}}
    with pytest.raises(ValueError, match=r"the 1 experts of each layer .* ep_size=2 times 1 ranks"):
        context_parallel_model(AutoModelForCausalLM, few_experts, **asked)
    with pytest.raises(ValueError, match="mlp_tile=8: experts of expert parallelism send tokens"):
        context_parallel_model(AutoModelForCausalLM, experts, plan={"mlp_tile": 8}, **asked)


def test_needs_a_launcher() -> None:
    with pytest.raises(ValueError, match="needs a process group; start the script by torchrun"):
        context_parallel_model(AutoModelForCausalLM, "none", cp_size=1)


def test_refuses_on_every_rank(pool: Pool, tmp_path: Path) -> None:
    small_model("Llama").save_pretrained(tmp_path / "dense")
    few = small_model("Qwen3-MoE", num_experts=1, num_experts_per_tok=1)
    few.save_pretrained(tmp_path / "few")
    small_model("Qwen3-MoE").save_pretrained(tmp_path / "experts")
    pool.run(2, all_refused, *(str(tmp_path / name) for name in ("dense", "experts", "few")))


FAMILIES = ("Llama", "Gemma 3", "Qwen3-MoE", "gpt-oss", "DeepSeek-V3.2", "Granite 4", "LFM2")
FAMILIES += ("Inkling", "MiniMax M3", "Qwen4-Exp", "DeepSeek-V4")
WIDE_HYBRIDS: dict[str, dict[str, Any]] = {
    "LFM2": {
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
    },
    "Inkling": {"hidden_size": 24},
}
"""That of Inkling differs from what its keys are convolved in."""


def stock_model(family: str) -> Any:
    """A model with weights; some hybrids are wider or deeper than their proxy."""
    return small_model(family, **WIDE_HYBRIDS.get(family, {}))


def on_meta(family: str) -> Any:
    """Without weights, as torchtitan's users make models."""
    stock = stock_model(family)
    with torch.device("meta"):
        model = type(stock)(stock.config)
    return model


def sharded(family: str, folder: Path) -> Any:
    """From the meta device to the weights of a sharded checkpoint."""
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
    model = under_plan(on_meta(family))
    layers = model.get_decoder().layers
    if family == "Zamba":  # FSDP wants layers with the same weights in one group
        fully_shard([*layers], mesh=all_ranks())
    shard_weights(model, () if family == "Zamba" else layers)
    model.to_empty(device="cpu")
    for module in model.modules():  # buffers that no checkpoint has
        if module._non_persistent_buffers_set:
            is_made_around = type(module).__name__ == "FalconH1Mixer"
            model._init_weights(model.base_model if is_made_around else module)
    state = get_model_state_dict(model)
    dcp.load({"model": state}, checkpoint_id=folder)
    set_model_state_dict(model, state)
    return model


@pytest.mark.needs("--all-hybrids", but=lambda family: family in FAMILIES or family not in HYBRIDS)
@pytest.mark.parametrize(
    "family",
    [
        *FAMILIES,
        pytest.param("GLM-5-Next", marks=pytest.mark.repeats),
        *(x for x in HYBRIDS if x not in FAMILIES),
    ],
)
@on_ranks(2)
def test_sharded_and_loaded_equals_one_process(tmp_path: Path, family: str) -> None:
    stock = stock_model(family)
    dcp.save({"model": stock.state_dict()}, checkpoint_id=tmp_path)
    model = sharded(family, tmp_path).eval()
    assert all(isinstance(x, DTensor) for x in model.parameters())
    torch.manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (2, 23))
    losses = [x(input_ids=tokens, labels=tokens, use_cache=False).loss for x in (model, stock)]
    for loss in losses:
        loss.backward()
    found = [relative(*losses), *gradient_errors(model, stock)]
    assert len(found) > 5
    assert largest(found) < 1e-5, found


@on_ranks(1)
def test_no_proxy() -> None:
    model = on_meta("Llama")
    model.config.hidden_act = "unheard of"
    with pytest.raises(
        ValueError, match=r"on the meta device or sharded, and .* \(KeyError: .*weights first"
    ):
        under_plan(model)
