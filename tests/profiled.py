"""Three calls that users make, whose Python frames a test and a benchmark follow."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import LlamaConfig, LlamaForCausalLM

from dtensor_ring import SequenceAxis, shard_sequence
from parallel_plans.huggingface import context_parallel_plan

ROOT = Path(__file__).parent.parent
OURS = tuple(f"{ROOT / package}/" for package in ("dtensor_ring", "parallel_plans"))


class Profile:
    """A context in which Python calls this object for each call and return of a function."""

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """Note an event of a frame, see `sys.setprofile`."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        sys.setprofile(self)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)


P = TypeVar("P", bound=Profile)


def attention(mesh: DeviceMesh) -> Callable[[], Tensor]:
    """Return an attention of DTensors that need gradients."""
    SequenceAxis(mesh, "zigzag")
    inputs = [shard_sequence(torch.randn(1, 4, 64, 8), mesh, 2) for _ in range(3)]
    query, key, value = (x.requires_grad_() for x in inputs)
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)


def training_step(mesh: DeviceMesh) -> Callable[[], Tensor]:
    """Return the loss of a Hugging Face model."""
    model, tokens = _llama(mesh), torch.arange(64)[None]
    return lambda: model(input_ids=tokens, labels=tokens).loss


def token(mesh: DeviceMesh, make: Callable[[], P]) -> P:
    """Return the profile of the third forward of `generate`: after the prompt and one token."""
    model, profiles = _llama(mesh).eval(), []

    def begin(*_: object) -> None:
        profiles.append(make().__enter__())

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(lambda *_: profiles[-1].__exit__())
    model.generate(torch.arange(64)[None], max_new_tokens=4, do_sample=False)
    return profiles[2]


def _llama(mesh: DeviceMesh) -> Any:
    """Return a small language model of one layer, under the plan."""
    torch.manual_seed(0)
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**small, **heads, num_hidden_layers=1))
    return parallelize_module(model, mesh, context_parallel_plan(model))
