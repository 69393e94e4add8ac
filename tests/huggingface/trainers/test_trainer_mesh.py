"""The mesh of `ContextParallelTrainer`: given, from a config, from accelerate; what it refuses."""

from __future__ import annotations

import os
import warnings
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate import ParallelismConfig
from accelerate.utils import TorchContextParallelConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from parallel_plans.huggingface.core import meshes
from parallel_plans.huggingface.trainers import trainer_options
from tests.families import small_model
from tests.huggingface.planned import under_plan
from tests.huggingface.trainers.test_trainer import BATCH, arguments, packed_rows, under_torchrun
from tests.huggingface.trainers.test_trainer_steps import HARMLESS, losses
from tests.pool import Pool, on_ranks

RING_CONFIG = {"dp_shard_size": 2, "cp_size": 2}
LAUNCHED = {f"PARALLELISM_CONFIG_{name.upper()}": str(x) for name, x in RING_CONFIG.items()}
LAUNCHED |= {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}


@pytest.fixture(scope="module")
def stock_losses(tmp_path_factory: Any) -> list[float]:
    from transformers import Trainer

    model = small_model("Llama", use_cache=False)
    options = arguments(str(tmp_path_factory.mktemp("stock")), BATCH)
    return losses(Trainer(model, options, train_dataset=packed_rows()))


@pytest.mark.parametrize("how", ["arguments", "launcher", "mesh"])
@on_ranks(4, around=under_torchrun)
def test_mesh_of_a_config(tmp_path: Path, stock_losses: list[float], how: str) -> None:
    from parallel_plans.huggingface.trainer import ContextParallelTrainer

    for message in HARMLESS:
        warnings.filterwarnings("ignore", message)
    with mock.patch.dict(os.environ, LAUNCHED if how == "launcher" else {}):
        config = ParallelismConfig(**RING_CONFIG) if how == "arguments" else None
        # Sharded on the meta device, and filled with the weights of one rank.
        lazy = {"cpu_ram_efficient_loading": how == "arguments"}
        options = arguments(
            str(tmp_path), BATCH // 2, fsdp=True, fsdp_config=lazy, parallelism_config=config
        )
        mesh = None
        if how == "mesh":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "cp"))
        trainer = ContextParallelTrainer(
            small_model("Llama"),
            options,
            mesh=mesh,
            plan={"layout": "striped"} if how == "arguments" else None,
            train_dataset=packed_rows(),
        )
    found = losses(trainer)
    model: Any = trainer.model
    assert isinstance(model, FSDPModule)
    assert model.lm_head.weight.device_mesh.size() == 4
    axes = trainer.accelerator.torch_device_mesh
    assert (axes.mesh_dim_names, tuple(axes.shape)) == (("dp_shard", "cp"), (2, 2))
    assert trainer.get_total_train_batch_size(options) == 2 * BATCH
    assert found == pytest.approx(stock_losses, rel=1e-5)


def in_bfloat16(folder: str) -> list[float]:
    from parallel_plans.huggingface.trainer import ContextParallelTrainer

    for message in HARMLESS:
        warnings.filterwarnings("ignore", message)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "cp"))
    options = arguments(folder, BATCH, fsdp=True, bf16=True)
    model, dtypes = small_model("Llama"), set()
    trainer = ContextParallelTrainer(model, options, mesh=mesh, train_dataset=packed_rows())
    model.model.norm.register_forward_hook(lambda *x: dtypes.add(x[-1].dtype))
    found = losses(trainer)
    assert dtypes == {torch.bfloat16}
    assert {x.dtype for x in trainer.model.parameters()} == {torch.float32}
    trainer.save_model(f"{folder}/final")
    return found


def test_mixed_precision_and_saving(pool: Pool, tmp_path: Path, stock_losses: list[float]) -> None:
    """A saved model is one of transformers, which knows no ring."""
    from transformers import AutoModelForCausalLM

    for found in pool.run(2, under_torchrun, in_bfloat16, str(tmp_path)):
        assert found == pytest.approx(stock_losses, rel=0.02)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config._attn_implementation == "sdpa"
    trained, before = model.lm_head.weight, small_model("Llama").lm_head.weight
    assert 0 < (trained - before).norm() / before.norm() < 0.1


def other_collator(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Random, and seeded by the rank."""
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    rank = dist.get_rank()
    return batch | {"labels": batch["labels"].masked_fill(batch["labels"] % 2 == rank, -100)}


def wrapped(model: Any) -> Any:
    """Under a forward of another library."""
    plain = model.forward
    model.forward = lambda *args, **kwargs: plain(*args, **kwargs)
    return model


def over_last(model: Any, ranks: int) -> Any:
    mesh = init_device_mesh("cpu", (2 // ranks, ranks), mesh_dim_names=("dp", "cp"))
    return under_plan(model, mesh=mesh["cp"])


def other_weights(model: Any) -> Any:
    """As of a model that is made without a seed."""
    nn.init.normal_(model.lm_head.weight, generator=torch.Generator().manual_seed(dist.get_rank()))
    return model


def loaded_in_shards(model: Any) -> Any:
    model._is_distributed_loading_by_transformers = True
    return model


FSDP1 = {"fsdp": True, "fsdp_config": {"version": 1, "sync_module_states": False}}
OTHER_STRATEGY = {"cp_handler": TorchContextParallelConfig(cp_comm_strategy="alltoall")}
# How the trainer is asked for, and what it says on every rank.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "axes": ({"mesh": ("dp", "cp")}, r"has the axis 'cp', and others of .*, got \('dp', 'cp'\)"),
    "order": ({"mesh": ("cp", "dp_shard")}, "in this order"),
    "no mesh": ({"mesh": 2}, "is a DeviceMesh, got int"),
    "part of the ranks": ({"mesh": (2, 1)}, r"the mesh has 1 ranks \(cp 1\), and .* started 2"),
    "config of others": ({"config": {"cp_size": 4}}, "the parallelism config has 4 ranks"),
    "nothing said": ({}, r"has 1 ranks \(dp_replicate 1 x .*=ParallelismConfig\(cp_size=N"),
    "both": ({"mesh": ("dp_shard", "cp"), "config": {"cp_size": 2}}, "leave one of them out"),
    "sequence parallelism": ({"config": {"sp_size": 2}}, "say cp_size=2"),
    "other strategy": ({"config": {"cp_size": 2, **OTHER_STRATEGY}}, "give plan={'strategy'"),
    "shards without FSDP": ({"config": {"dp_shard_size": 2}}, "for DDP give a mesh"),
    "FSDP1": ({"mesh": ("cp",), **FSDP1}, r"say fsdp_config=\{'version': 2\}"),
    "unknown layout": ({"mesh": ("cp",), "plan": {"layout": "diagonal"}}, "diagonal"),
    "weights that differ": (
        {"mesh": ("cp",), "fsdp": True, "model": (other_weights,)},
        "start from the same weights",
    ),
    "plan twice": ({"mesh": ("cp",), "model": (over_last, 2), "plan": {}}, "plan= would have no"),
    "plan elsewhere": ({"mesh": ("cp",), "model": (over_last, 1)}, r"over the ranks \[.\], and"),
    "forward in the way": ({"mesh": ("cp",), "model": (wrapped,)}, "test_trainer_mesh.wrapped"),
    "loaded in shards": ({"mesh": ("cp",), "model": (loaded_in_shards,)}, "distributed_config"),
    "batches that differ": (
        {"mesh": ("cp",), "data_collator": other_collator},
        "labels: torch.int",
    ),
}


def trained(folder: str, mesh: Any = None, config: Any = None, **asked: Any) -> None:
    """With a mesh of these axes, of this part of the ranks, or as it is."""
    from parallel_plans.huggingface.trainer import ContextParallelTrainer

    change, *how = asked.pop("model", (lambda model: model,))
    ours = {name: asked.pop(name) for name in ("plan", "data_collator") if name in asked}
    if isinstance(mesh, tuple) and isinstance(mesh[0], str):
        mesh = init_device_mesh("cpu", (1, 2)[-len(mesh) :], mesh_dim_names=mesh)
    elif isinstance(mesh, tuple):
        mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("dp", "cp"))["cp"]
    config = ParallelismConfig(**config) if config else None
    options = arguments(folder, BATCH, parallelism_config=config, **asked)
    model = change(small_model("Llama"), *how)
    ContextParallelTrainer(model, options, mesh=mesh, train_dataset=packed_rows(), **ours).train()


def refused(folder: str, asked: dict[str, Any], message: str) -> None:
    for harmless in ("FSDP1 .* is deprecated", *HARMLESS):
        warnings.filterwarnings("ignore", harmless)
    with pytest.raises((TypeError, ValueError), match=message):
        trained(folder, **asked)


@on_ranks(2)
def test_refuses_on_every_rank(tmp_path: Path) -> None:
    folder = str(tmp_path)
    for name, (asked, message) in REFUSED.items():
        try:
            under_torchrun(refused, folder, asked, message)
        except BaseException as error:
            raise AssertionError(name) from error


@on_ranks(1, around=under_torchrun)
def test_refuses_what_ranks_cannot_share(tmp_path: Path) -> None:
    folder = str(tmp_path)
    from parallel_plans.huggingface.trainer import ContextParallelTrainer

    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "cp"))
    loss = "leave label_smoothing_factor and compute_loss_func"
    for options, function, message in (
        ({"label_smoothing_factor": 0.1}, None, loss),
        ({}, torch.add, loss),
        ({"eval_use_gather_object": True}, None, "eval_use_gather_object=True would"),
        ({"accelerator_config": {"dispatch_batches": True}}, None, "leave them out"),
        ({"train_sampling_strategy": "batch_rebalance"}, None, "leave them out"),
        ({"neftune_noise_alpha": 5.0}, None, "^neftune_noise_alpha scales .* holds; leave it out$"),
        ({"use_liger_kernel": True}, None, "^use_liger_kernel replaces the forward"),
        ({"average_tokens_across_devices": False}, None, "weight tokens by the batch they are in"),
    ):
        with pytest.raises(ValueError, match=message):
            ContextParallelTrainer(
                small_model("Llama"),
                arguments(folder, BATCH, **options),
                mesh=mesh,
                compute_loss_func=function,
            )
    asked_by_environment = mock.patch.dict(os.environ, {"ACCELERATE_USE_FSDP": "true"})
    with asked_by_environment, pytest.raises(ValueError, match=r"do not ask .* the environment do"):
        ContextParallelTrainer(small_model("Llama"), arguments(folder, BATCH), mesh=mesh)
    options = arguments(folder, BATCH)
    options.deepspeed = "deepspeed.json"
    with pytest.raises(ValueError, match="shard with FSDP2"):
        ContextParallelTrainer(small_model("Llama"), options, mesh=mesh)
    model: Any = small_model("Llama")
    model.peft_config = {"default": SimpleNamespace(alora_invocation_tokens=[3, 4])}
    with pytest.raises(ValueError, match="adapters that begin at a token"):
        ContextParallelTrainer(model, arguments(folder, BATCH), mesh=mesh)
    plan = {"local_batch": True}
    with pytest.raises(ValueError, match="local_batch=True, and the data loader of a trainer"):
        ContextParallelTrainer(small_model("Llama"), arguments(folder, BATCH), mesh=mesh, plan=plan)


@pytest.mark.parametrize("options", [None, object()])
def test_meshes_that_are_made_here_take_them(
    options: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`init_device_mesh` gives them to the axis of the ring only."""
    made: list[Any] = []
    config = ParallelismConfig(**RING_CONFIG)
    monkeypatch.setattr(meshes, "axis_group_options", lambda device_type: options)
    monkeypatch.setattr(trainer_options, "_check_ranks", lambda sizes, what: None)
    takes = signature(meshes.init_device_mesh)
    monkeypatch.setattr(
        meshes,
        "init_device_mesh",
        lambda *args, **more: made.append(takes.bind(*args, **more)),
    )
    trainer_options._mesh_of(config, "cuda")
    (call,) = made
    assert call.arguments["mesh_dim_names"] == ("dp_shard", "cp")
    expected = None if options is None else {"cp": options}
    assert call.arguments["backend_override"] == expected
