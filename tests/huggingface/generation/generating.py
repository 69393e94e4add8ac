"""Models that generate over a sharded cache, beside the stock model, as ranks of a pool."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaForCausalLM

from dtensor_ring.transport.transport import ProcessGroupTransport
from parallel_plans.huggingface import ContextParallelCache
from parallel_plans.huggingface.core.versions import parameter_of_cache
from tests.families import ENCODERS, FAMILIES, VOCABULARY, in_dtype, small_model
from tests.huggingface.planned import under_plan

CAUSAL = tuple(family for family in FAMILIES if family not in ENCODERS)
NUM_NEW, PROMPT = 5, 13
"""Pools and blocks of 3, 4 and 5 tokens end while tokens are decoded, and are read after that."""
SEND_RECORD = ProcessGroupTransport.send_record
CACHE = parameter_of_cache(LlamaForCausalLM.forward)
"""The name of a cache in models and their outputs, in this version of transformers."""


def tokens(num_tokens: int = PROMPT, rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randint(2, VOCABULARY, (rows, num_tokens), generator=generator)


def stock(family: str) -> Any:
    """In float64, so that rounding decides no token, but for what a model wants in float32."""
    return in_dtype(small_model(family), torch.float64)


def sharded(family: str, layout: str = "zigzag", **options: Any) -> Any:
    model = stock(family)
    return under_plan(model, layout, **options)


@contextmanager
def exact_softmax() -> Iterator[None]:
    """Stock attention in float64, where it asks for float32."""
    plain = nn.functional.softmax

    def softmax(x: Tensor, *args: Any, dtype: Any = None, **kwargs: Any) -> Tensor:
        return plain(x, *args, dtype=x.dtype if x.dtype is torch.float64 else dtype, **kwargs)

    with mock.patch.object(nn.functional, "softmax", softmax):
        yield


def generate(model: Any, **options: Any) -> Any:
    """All rows get as many tokens: none ends early."""
    torch.manual_seed(3)
    asked = {"max_new_tokens": NUM_NEW, "min_new_tokens": NUM_NEW, "return_dict_in_generate": True}
    return model.generate(**asked | {"output_logits": True} | options)


def check_bits(x: Tensor) -> None:
    """All ranks have the same bits."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, x)
    assert all(torch.equal(x, other) for other in everyone)


def check_generated(found: Any, expected: Any, name: str, atol: float) -> None:
    """Tokens, logits and states of the stock model; all ranks have the same bits of logits."""
    same = torch.equal(found.sequences, expected.sequences)
    assert same, f"{name}: {found.sequences.tolist()}, {expected.sequences.tolist()}"
    check_bits(torch.stack(found.logits))
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=atol)
    pairs = zip(found.hidden_states or (), expected.hidden_states or (), strict=True)
    for step, (here, there) in enumerate(pairs):
        for x, y in zip(here, there, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=atol, msg=f"{name}, step {step}")


class Collectives(TorchDispatchMode):
    """Those that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            self.found.append(str(func))
        return func(*args, **kwargs or {})


@torch.no_grad()
def decode_messages(model: Any, prompt: dict[str, Tensor]) -> list[int]:
    """Messages of this rank, by step, of tokens after a prompt; call records carry all."""
    cache, counts = ContextParallelCache(model), []
    model(**prompt, cache=cache)
    for _ in range(3):
        with (
            mock.patch.object(ProcessGroupTransport, "send_record", autospec=True) as send_record,
            mock.patch.object(ProcessGroupTransport, "start") as start,
            Collectives() as collectives,
        ):
            send_record.side_effect = SEND_RECORD
            model(tokens(1), cache=cache)
        started = [
            message for call in start.call_args_list for side in call.args for message in side
        ]
        assert not started, "call records carry what is merged"
        assert not collectives.found
        counts.append(send_record.call_count)
    return counts
