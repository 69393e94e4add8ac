"""Data-parallel replicas that share the weights of an encoder of images, as FSDP2 shards them.

FSDP2 gathers the weights of an encoder when it runs, and reduces the gradients of what has run. So
replicas must run it equally often: one with images and one without would send different messages,
which kills processes under gloo.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from dtensor_ring import SequenceAxis
from dtensor_ring.extension import check_agreement
from parallel_plans.huggingface.core.modules import language_model_of

SAME_FORWARD = "run the same forward, as they share weights by FSDP2"


def told_by_replicas(model: Any, axis: SequenceAxis, own: Any) -> dict[int, Any]:
    """Return what each rank tells with which this one shares encoders, by global rank.

    Ranks of the axis alone share a batch, and have nothing to tell one another: then it is empty.

    Args:
        model: the outer model.
        axis: the axis of the plan.
        own: what this rank tells; it is pickled.
    """
    mesh = _mesh_of_encoders(model)
    if mesh is None or {*mesh.mesh.flatten().tolist()} <= {*axis.mesh.mesh.flatten().tolist()}:
        return {}
    told = {mesh.get_rank(): own}
    for dim in range(mesh.ndim):  # along one dim after the other, all ranks are reached
        every = check_agreement(mesh.get_group(dim), {}, SAME_FORWARD, told=told)
        told = {rank: x for part in every for rank, x in part.items()}
    return told


def _mesh_of_encoders(model: Any) -> DeviceMesh | None:
    """Return the mesh over which FSDP2 sends weights or gradients beside the language model's."""
    # FSDP2 gathers the weights of each module that it wraps, and reduces the gradients of weights
    # that took part in the forward.
    sharded: list[Any] = [x for x in model.modules() if isinstance(x, FSDPModule)]
    if not sharded:
        return None
    decoder, head = language_model_of(model), model.get_output_embeddings()
    of_text = {*decoder.modules(), head}
    for module in sharded:
        is_around = decoder in {*module.modules()}
        for weight in _weights_of(module):
            is_sent = not is_around or (torch.is_grad_enabled() and weight.param.requires_grad)
            if is_sent and weight.owner not in of_text:
                return weight.param.device_mesh
    return None


class ShardedWeight(NamedTuple):
    """A weight in the group of a module of FSDP2.

    Attributes:
        param: its shard. In the forward of the group, the module has the whole weight in its place.
        owner: the module that has it.
    """

    param: Any
    owner: torch.nn.Module


def _weights_of(module: Any) -> list[ShardedWeight]:
    """Return the weights of the groups of a module of FSDP2, which has no public list of them."""
    state = module._get_fsdp_state()
    # One group before torch 2.12.
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    every = [x for group in groups if group is not None for x in group.fsdp_params]
    return [ShardedWeight(x.sharded_param, x._module_info.module) for x in every]


def check_same_inputs(model: Any, axis: SequenceAxis, names: list[str]) -> None:
    """Refuse replicas of which some have images and others have none, before anything is sent.

    Args:
        model: the outer model.
        axis: the axis of the plan.
        names: the arguments of this rank that have images or other features.

    Raises:
        ValueError: on every rank, naming the ranks.
    """
    ranks: dict[str, list[int]] = {}
    for rank, found in sorted(told_by_replicas(model, axis, ", ".join(names)).items()):
        ranks.setdefault(found or "none", []).append(rank)
    if len(ranks) > 1:
        sides = "; ".join(f"{found} on ranks {those}" for found, those in ranks.items())
        raise ValueError(
            "FSDP2 shards the encoder of images over replicas, which must all run it or none, and "
            f"their batches have different inputs for it: {sides}. Give each batch an image (a "
            "blank one will do, whose tokens have no labels), or freeze the encoder, and call "
            "fully_shard on the whole model and on layers of the language model only"
        )
