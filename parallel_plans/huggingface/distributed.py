"""Loads a model whose sequence, batch and weights are sharded over all ranks, by one call."""

from __future__ import annotations

from dataclasses import asdict
from os import PathLike
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring.extension import check_agreement
from parallel_plans.huggingface.core.meshes import check_sizes, mesh_of_sizes
from parallel_plans.huggingface.plan import context_parallel_plan

if TYPE_CHECKING:
    from transformers.distributed import DistributedConfig


def context_parallel_model(
    model_class: Any,
    name: str | PathLike[str],
    *,
    cp_size: int,
    distributed_config: DistributedConfig | dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Load a model by `from_pretrained`, with its sequence sharded over `cp_size` ranks.

    Transformers shards the weights while it loads them, each rank its own: by FSDP2 over the ranks
    of `fsdp` and `cp` together, by tensor and by expert parallelism. Then the plan is applied. The
    ranks are a mesh (`dp_replicate`, `fsdp`, `cp`, `tp`), and those of `cp` and `tp` share a batch:
    `DistributedSampler(rows, **model.context_parallel_replica)` gives each rank its rows. Loss and
    gradients are those of `context_parallel_plan`, `save_pretrained` is that of transformers.

    Args:
        model_class: a class of transformers with `from_pretrained`, such as `AutoModelForCausalLM`.
        name: what `from_pretrained` loads.
        cp_size: number of ranks that share a sequence.
        distributed_config: the other degrees, as for `from_pretrained`. `cp_size` times
            `dp_replicate_size`, `fsdp_size` and `tp_size` is the number of all ranks. `ep_size`
            divides `fsdp_size * cp_size * tp_size`: as transformers does not know `cp_size`, give
            a dict where it would not divide the other two.
        plan: keywords of `context_parallel_plan`.
        options: further keywords of `from_pretrained`.

    Returns:
        The model, in evaluation mode as `from_pretrained` leaves it. Its attribute
        `context_parallel_replica` has `num_replicas` and `rank` for a sampler.

    Raises:
        TypeError: if `distributed_config` is something else.
        ValueError: on every rank, if degrees do not give the number of ranks, differ between ranks,
            or are not supported (`pp_size`, `enable_sequence_parallel`), or the plan cannot be
            applied.

    Example:
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> with TemporaryDirectory() as folder:
        ...     LlamaForCausalLM(config).save_pretrained(folder)
        ...     model = context_parallel_model(LlamaForCausalLM, folder, cp_size=1)
        >>> model.context_parallel_replica
        {'num_replicas': 1, 'rank': 0}
    """
    from transformers.distributed import DistributedConfig

    _start()
    given = distributed_config or {}
    check_agreement(
        dist.distributed_c10d._get_default_group(),
        {"cp_size": repr(cp_size), "distributed_config": repr(given), "plan": repr(plan)},
        "ask for the same degrees",
    )
    if not isinstance(given, (dict, DistributedConfig)):
        raise TypeError(
            "distributed_config is a DistributedConfig of transformers or a dict, got "
            f"{type(given).__name__}; a ParallelismConfig of accelerate is for TrainingArguments"
        )
    asked: dict[str, Any] = given if isinstance(given, dict) else asdict(given)
    sizes = _sizes(asked, cp_size, {*DistributedConfig.__dataclass_fields__})
    num_parts = asked.get("ep_size") or 1
    if num_parts > 1:
        _check_experts(name, options, num_parts, sizes)
    # To transformers, ranks of cp are some of those that share the weights, with other tokens.
    config = DistributedConfig.from_dict(asked | {"fsdp_size": sizes["fsdp"] * cp_size})
    model = model_class.from_pretrained(name, distributed_config=config, **options)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    mesh = mesh_of_sizes(accelerator.type if accelerator else "cpu", sizes)
    if mesh.size() == 1:  # there is nothing to shard, and it is on the CPU
        model.to(mesh.device_type)
    parallelize_module(model, mesh["cp"], context_parallel_plan(model, **plan or {}))
    if mesh.device_type == "cpu":
        reduce_by_sums(model)
    replica = mesh["dp_replicate"].get_local_rank(), mesh["fsdp"].get_local_rank()
    model.context_parallel_replica = {
        "num_replicas": sizes["dp_replicate"] * sizes["fsdp"],
        "rank": replica[0] * sizes["fsdp"] + replica[1],
    }
    return model


def _start() -> None:
    """Start the process group, if no one has."""
    if dist.is_initialized():
        return
    try:
        dist.init_process_group()
    except ValueError as error:
        raise ValueError(
            "a sharded model needs a process group; start the script by torchrun, with one process "
            "for each device"
        ) from error


# What a config says of experts, and what `from_pretrained` needs to find it.
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
OF_CONFIG = ("cache_dir", "local_files_only", "revision", "subfolder", "token", "trust_remote_code")
REFUSED = (
    (
        "pp_size",
        "its stages hand over hidden states beside the plan's forward; torchtitan trains pipeline "
        "stages over a ring, see docs/torchtitan.md",
    ),
    (
        "enable_sequence_parallel",
        "transformers reserves it and does nothing; cp_size shards the sequence",
    ),
)


def _sizes(asked: dict[str, Any], cp_size: int, known: set[str]) -> dict[str, int]:
    """Return the sizes of the axes, in the order of the mesh; refuse what is not supported."""
    if unknown := sorted(asked.keys() - known):
        raise ValueError(
            f"DistributedConfig has no {', '.join(unknown)}; it has {sorted(known)}, and cp_size "
            "is an argument beside it"
        )
    for name, why in REFUSED:
        if asked.get(name) not in (None, False, 1) or asked.get(name) is True:
            raise ValueError(f"{name}={asked[name]} is not supported: {why}")
    sizes = {"dp_replicate": 1, "fsdp": 1, "cp": cp_size, "tp": 1}
    for name in ("dp_replicate", "fsdp", "tp"):
        if asked.get(f"{name}_size") is not None:
            sizes[name] = asked[f"{name}_size"]
    for name, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ValueError(f"the degree of {name} is a number of ranks, got {size!r}")
    advice = "as with cp_size=N beside DistributedConfig(fsdp_size=M) on N * M ranks"
    check_sizes(sizes, "mesh of cp_size and distributed_config", advice)
    experts, of_batch = asked.get("ep_size") or 1, sizes["fsdp"] * cp_size * sizes["tp"]
    if experts > 1 and (experts % sizes["tp"] or of_batch % experts):
        raise ValueError(
            f"ep_size={experts} is not a multiple of tp_size={sizes['tp']} that divides "
            f"fsdp_size * cp_size * tp_size = {of_batch}"
        )
    return sizes


def _check_experts(
    name: str | PathLike[str], options: dict[str, Any], num_parts: int, sizes: dict[str, int]
) -> None:
    """Refuse ranks that would have no experts, which transformers meets while it loads."""
    from transformers import AutoConfig

    given = {key: options[key] for key in OF_CONFIG if key in options}
    config = AutoConfig.from_pretrained(name, **given).get_text_config()
    known = [
        getattr(config, key) for key in NUM_EXPERTS if isinstance(getattr(config, key, None), int)
    ]
    sharers = sizes["fsdp"] * sizes["cp"] * sizes["tp"] // num_parts
    if known and (known[0] % num_parts or known[0] // num_parts < sharers):
        raise ValueError(
            f"the {known[0]} experts of each layer cannot be shared by ep_size={num_parts} times "
            f"{sharers} ranks of FSDP2: ep_size must divide them, and each rank needs one; take "
            "fewer ranks, or more of dp_replicate_size"
        )


def reduce_by_sums(model: nn.Module) -> None:
    """Let FSDP2 sum gradients and divide them itself: gloo, the backend of CPUs, has no means."""
    for module in model.modules():
        # Transformers has chosen for experts, whose gradients it divides otherwise.
        if isinstance(module, FSDPModule) and not getattr(module, "_is_expert_parallel", False):
            module.set_force_sum_reduction_for_comms(True)
