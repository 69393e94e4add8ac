"""Ways to call a model with a cache: loops of users' own, compiled, and in training mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.huggingface.generation.generating import CACHE, generate, sharded, stock, tokens
from tests.pool import on_ranks

NUM_NEW = 4


def loop(goes_on: bool) -> Any:
    """A `custom_generate` that goes on with the cache of the forward before, or the first one."""

    def generated(model: Any, input_ids: Tensor, **given: Any) -> Tensor:
        cache, new = given[CACHE], input_ids
        for _ in range(NUM_NEW):
            output = model(new, **{CACHE: cache})
            cache = output[CACHE] if goes_on else cache
            new = output.logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, new], 1)
        return input_ids

    return generated


@on_ranks(2)
def test_loops() -> None:
    ours, theirs = sharded("Llama"), stock("Llama")

    def run(model: Any, goes_on: bool) -> Tensor:
        asked = {"custom_generate": loop(goes_on), "max_new_tokens": NUM_NEW}
        return model.generate(tokens(), **asked)

    expected = run(theirs, goes_on=False)  # its cache grows in place
    assert torch.equal(run(ours, goes_on=True), expected)
    with pytest.raises(ValueError, match=rf"go on with that, output\.{CACHE}"):
        run(ours, goes_on=False)


@pytest.mark.parametrize("way", ["model", "forward"])
@on_ranks(2)
def test_compiled(way: str) -> None:
    """Forwards with a cache run eager within a compiled model."""
    ours, theirs = sharded("Llama"), stock("Llama")
    if way == "model":
        ours.compile(backend="eager")
    else:
        ours.forward = torch.compile(ours.forward, backend="eager")
    answers = [generate(x, input_ids=tokens()).sequences for x in (ours, theirs)]
    assert torch.equal(*answers)


@on_ranks(2)
def test_checkpointing() -> None:
    ours = sharded("Llama").train()
    ours.activation_checkpointing_enable()
    with pytest.raises(ValueError, match=r"call model\.eval\(\) first, or pass use_cache=False"):
        ours.generate(tokens(), max_new_tokens=NUM_NEW)
    asked = {"max_new_tokens": NUM_NEW, "do_sample": False}
    without = ours.generate(tokens(), use_cache=False, **asked)
    assert torch.equal(without, ours.eval().generate(tokens(), **asked))
