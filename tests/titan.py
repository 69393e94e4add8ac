"""Runs torchtitan's own trainer on the pool's processes, over the CPU.

torchtitan is imported by the functions that the pool runs: first it has to be set to the CPU.
"""

from __future__ import annotations

import gc
import os
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._inductor.utils import clear_caches
from torch.distributed.tensor import DTensor

from dtensor_ring.ops import ring_op
from examples.torchtitan_assets import write_assets
from examples.torchtitan_cpu import all_to_all_over_gloo, sum_over_gloo, use_cpu

RING = "parallel_plans.torchtitan"
NUM_LAYERS = 2
NUM_HEADS = 2
"""Of multi-token prediction: some documents are shorter."""
WINDOW = 8
WRAPPERS = re.compile(r"\b(_checkpoint_wrapped_module|_orig_mod)\.")
LENGTHS = (1, 2, 5, 11, 23, 47, 150)


def make_assets(folder: Path) -> None:
    """A tokenizer of bytes, and documents of very different lengths."""
    draw = random.Random(0)
    lengths = (draw.choice(LENGTHS) for _ in range(400))
    write_assets(folder, ("".join(draw.choices("abcdefgh ", k=length)) for length in lengths))


@dataclass(frozen=True)
class Run:
    """One run of a trainer, its flags as on the command line."""

    family: str
    world_size: int
    flags: tuple[str, ...] = ()
    stock: bool = False
    """With the config and the trainer of torchtitan."""
    dense: bool = False
    """With torchtitan's trainer, and attention that holds all scores."""
    num_replicas: int = 1
    """Of a dense run: data-parallel ranks whose batches it accumulates."""
    ignore_documents: bool = False


@dataclass
class Report:
    """What a run said of itself, by step."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)
    calls: list[Counter[str]] = field(default_factory=list)
    """Rings so far, forward and backward."""
    num_graphs: list[int] = field(default_factory=list)
    """Compiled so far."""
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """Of the first step, whole, of the parameters that this rank has a part of."""


def train(run: Run, folder: str) -> Report:
    """One rank of a run, from assets in that folder."""
    report, calls = Report(), Counter[str]()
    with _torchtitan(), _counted(calls), _undrawn():
        config = _config(run, folder)
        trainer = config.build()

        def log(step: int, loss: float, largest: float, grad_norm: float, **_: Any) -> None:
            report.losses.append(loss)
            report.grad_norms.append(grad_norm)
            report.calls.append(calls.copy())
            report.num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

        trainer.metrics_processor.log = log
        trainer.metrics_processor.log_validation = lambda loss, step: report.validation.append(loss)
        with _first_gradients(trainer, report):
            trainer.train()
        trainer.close()
    return report


@contextmanager
def _undrawn() -> Iterator[None]:
    """Draw no weights, whose place those of a checkpoint take: as DTensors that takes long."""
    names = "_no_grad_trunc_normal_", "_no_grad_normal_"
    with patch.multiple(torch.nn.init, **{name: lambda x, *_, **__: x for name in names}):
        yield


def save_seed(run: Run, folder: str) -> None:
    """The weights from which all runs of a model start; by one process."""
    with _torchtitan():
        trainer = _config(run, folder).build()
        trainer.checkpointer.save(curr_step=0, last_step=True)
        trainer.close()


def arguments(run: Run, folder: Path) -> list[str]:
    """The command line of a run, from assets in that folder."""
    name = f"{run.family}_debugmodel"
    module, name = (run.family, name) if run.stock else (RING, f"{name}_ring")
    return [
        *("--module", module, "--config", name, f"--hf_assets_path={folder}"),
        *("--dataloader.dataset=c4_test", f"--dataloader.dataset_path={folder}/data"),
        *("--training.seq_len=64", "--training.local_batch_size=2", "--training.steps=3"),
        *("--training.mixed_precision_param=float32", "--debug.seed=0", *run.flags),
    ]


def _config(run: Run, folder: str) -> Any:
    from torchtitan.config import ConfigManager

    from tests.titan_dense import ignore_documents, use_dense

    config = ConfigManager().parse_args(arguments(run, Path(folder)))
    config.validator.dataloader = replace(config.dataloader)
    _shrink(config.model_spec.model)
    config = use_dense(config, run.num_replicas) if run.dense else config
    config = ignore_documents(config) if run.ignore_documents else config
    return sum_over_gloo(config)


def _shrink(model: Any) -> None:
    """Two layers, small experts, and windows shorter than the sequence."""
    from torchtitan.models.common.attention import BaseAttention
    from torchtitan.models.common.moe import GroupedExperts

    del model.layers[NUM_LAYERS:]
    if getattr(model, "mtp_layers", None):
        del model.layers[1:]  # of experts, which the layers of its heads have, too
        model.mtp_layers = [deepcopy(model.mtp_layers[0]) for _ in range(NUM_HEADS)]
    for _, experts, _, _ in model.traverse(GroupedExperts.Config):
        experts.hidden_dim = min(64, experts.hidden_dim)
    for _, attention, _, _ in model.traverse(BaseAttention.Config):
        if getattr(attention, "sliding_window_size", None) is not None:
            attention.sliding_window_size = WINDOW
            attention.inner_attention.window_size = (WINDOW - 1, 0)


@contextmanager
def _torchtitan() -> Iterator[None]:
    """torchtitan where torchrun would have started it."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    places = {"LOCAL_RANK": "0", "RANK": rank, "WORLD_SIZE": world_size}
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}
    impatient = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda seconds: None)
    torch._dynamo.utils.counters.clear()
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, places | offline))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # those of torchtitan on a CPU
        clear_caches()
        use_cpu()
        import torchtitan.trainer
        from torchtitan.distributed import spmd_types
        from torchtitan.models.common.moe import GroupedExperts
        from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

        for experts in (GroupedExperts, GptOssGroupedExperts):
            stack.enter_context(patch.object(experts, "forward", _in_float32(experts.forward)))
        stack.enter_context(patch.object(dist, "all_to_all", all_to_all_over_gloo))
        stack.enter_context(patch.object(torchtitan.trainer, "time", impatient))
        stack.enter_context(patch.object(torch.nn.utils, "get_total_norm", _exact_norm))
        try:
            yield
        finally:
            gc.enable()  # torchtitan takes it over
            spmd_types._MESH_TLS.__dict__.clear()  # or it holds this run's groups


@contextmanager
def _first_gradients(trainer: Any, report: Report) -> Iterator[None]:
    """Report the gradients of the first step, after backward and before they are clipped."""
    from torchtitan.distributed import utils

    clip = utils.clip_grad_norm_

    def noted(*args: Any, **kwargs: Any) -> Any:
        if not report.gradients:
            for part in trainer.model_parts:
                report.gradients |= _whole_gradients(part)
        return clip(*args, **kwargs)

    with patch.object(utils, "clip_grad_norm_", noted):
        yield


def _whole_gradients(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """By the name that a parameter has without wrappers; as arrays, which are sent by value."""
    whole = {}
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        if grad is not None:
            grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
            whole[WRAPPERS.sub("", name)] = grad.numpy().copy()  # clipping writes into it
    return whole


def _exact_norm(tensors: Any, *args: Any, norm: Any = torch.nn.utils.get_total_norm) -> Any:
    """In float64: in float32 its rounding, which depends on the shards, is 5e-5."""
    return norm([x.double() for x in tensors], *args)


def _in_float32(forward: Any) -> FunctionType:
    """Experts compute in bfloat16 whatever the rest is in, and those of gpt-oss fail by that."""
    code = forward.__code__
    names = tuple("float" if name == "bfloat16" else name for name in code.co_names)
    return FunctionType(code.replace(co_names=names), forward.__globals__)


@contextmanager
def _counted(calls: Counter[str]) -> Iterator[None]:
    """Count the rings that run, in compiled graphs too."""
    with ExitStack() as stack:
        for name in ("ring_forward", "ring_backward"):
            function = getattr(ring_op, name)

            def counted(
                *args: Any, _name: str = name, _function: Any = function, **kwargs: Any
            ) -> Any:
                calls[_name] += 1
                return _function(*args, **kwargs)

            stack.enter_context(patch.object(ring_op, name, counted))
        yield
