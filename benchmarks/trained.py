"""Train the model of the demo with keys and values in eight bits, for `eight_bits.py`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim.lr_scheduler import LambdaLR

from dtensor_ring import TransferPolicy
from examples.parts.small_models import small_model
from examples.parts.text import read_standard_library
from parallel_plans.huggingface import context_parallel_plan

MODEL, WORLD_SIZE, NUM_LAST = "llama", 2, 20
LARGEST_RATE, LARGEST_NORM = 5e-4, 1.0


@dataclass(frozen=True)
class Training:
    """A training run: that of `examples/train_hf.py`, but for its rates and these.

    Attributes:
        kv_dtype: what keys and values travel as; `None` for float32, the dtype of the model.
        noise: the first weights have normal random numbers of this size added, relative to each:
            how far runs are apart that differ in nothing but rounding.
        num_steps: optimizer steps.
        seq_len: tokens of a sequence.
        seed: which sequences the steps get.
        weights: a file for the weights after the last step, `None` to keep none.
    """

    kv_dtype: str | None
    num_steps: int
    seq_len: int
    noise: float = 0.0
    seed: int = 0
    weights: str | None = None

    @property
    def title(self) -> str:
        """What the run is called."""
        noise = f", first weights changed by {self.noise:.0e}" if self.noise else ""
        return f"{self.kv_dtype or 'float32'}{noise}"


@dataclass(frozen=True)
class Trained:
    """The losses of a run by step, in nats a byte, and the seconds that it took."""

    training: Training
    losses: list[float]
    seconds: float

    @property
    def last(self) -> float:
        """The mean loss of the last steps: that of one step depends on its batch."""
        return mean(self.losses[-NUM_LAST:])


def train(asked: Training, mesh: DeviceMesh) -> Trained:
    """Train on this rank, as all others do; rank 0 keeps the weights."""
    model: Any = changed(small_model(MODEL, asked.seq_len), asked.noise)
    kv_dtype = torch.bfloat16 if asked.kv_dtype == "bfloat16" else asked.kv_dtype
    policy = TransferPolicy(kv_dtype=kv_dtype)
    model = parallelize_module(model, mesh, context_parallel_plan(model, "zigzag", policy=policy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LARGEST_RATE)
    rates = LambdaLR(optimizer, partial(share_of_rate, num_steps=asked.num_steps))
    text, losses, start = read_standard_library(), [], time.perf_counter()
    for step in range(asked.num_steps):
        tokens = batch_of(text, asked.seed * asked.num_steps + step, asked.seq_len)
        with torch.enable_grad():
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= mesh.size()
        torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if asked.weights is not None and dist.get_rank() == 0:
        torch.save(model.state_dict(), asked.weights)
    return Trained(asked, losses, time.perf_counter() - start)


def share_of_rate(step: int, num_steps: int) -> float:
    """Share of the largest rate: it grows for a tenth of the steps, and falls to zero at the end.

    Runs that differ in nothing but rounding end nearer to each other than at a constant rate.
    """
    return min((step + 1) * 10 / num_steps, (1 - step / num_steps) * 10 / 9)


@torch.no_grad()
def changed(model: Any, noise: float) -> Any:
    """Change the weights by relative noise, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter *= 1 + noise * torch.randn(parameter.shape, generator=generator)
    return model


def batch_of(text: Tensor, step: int, seq_len: int, num: int = 2) -> Tensor:
    """Sequences `(num, S)` of a step, the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - seq_len, (num,), generator=generator)
    return torch.stack([text[start : start + seq_len] for start in starts]).long()


def attended_by(weights: Path, seq_len: int) -> list[Tensor]:
    """Query, key and value of all layers on one sequence, `(layers, N, S, H)` in float64."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found: list[tuple[Tensor, ...]] = []

    def attend(module: Any, *args: Any, **options: Any) -> Any:
        found.append(args[:3])
        return sdpa_attention_forward(module, *args, **options)

    ALL_ATTENTION_FUNCTIONS.register("attended", attend)
    model = small_model(MODEL, seq_len)
    model.load_state_dict(torch.load(weights))
    model.set_attn_implementation("attended")
    # A batch of no training step.
    tokens = batch_of(read_standard_library(), 1_000_000, seq_len, num=1)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    return [torch.cat(x).double() for x in zip(*found, strict=True)]
