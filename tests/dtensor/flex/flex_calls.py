"""Calls of `flex_attention`, and worlds to try them in."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

LSE = AuxRequest(lse=True)
OFTEN = (1, "contiguous"), (2, "contiguous"), (4, "zigzag")


def attend(query: Any, key: Any, value: Any, block_mask: BlockMask | None) -> tuple[Any, Any]:
    options = {"scale": 0.3, "enable_gqa": True, "return_aux": LSE}
    out, aux = flex_attention(query, key, value, block_mask=block_mask, **options)
    return out, aux.lse


@contextmanager
def gradients_on_cpus() -> Iterator[None]:
    """Without the one check of FlexAttention that needs a GPU for them, before all dispatch."""
    check, flex_module._validate_device = flex_module._validate_device, lambda *tensors: None
    try:
        yield
    finally:
        flex_module._validate_device = check


@contextmanager
def quiet() -> Iterator[None]:
    """PyTorch warns that eager calls take the whole matrix of scores, which ours do not."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


def cases(*often: tuple[int, str]) -> list[Any]:
    """Ranks and layouts, of which those that repeat others are seldom run."""
    worlds = product((1, 2, 3, 4), ("contiguous", "zigzag"))
    seldom = pytest.mark.repeats
    return [pytest.param(*x, marks=() if x in often else seldom) for x in worlds]
