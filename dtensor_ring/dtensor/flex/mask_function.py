"""The function of a block mask as text: a graph that is kept on disk has it, with its options.

Dynamo inlines what a mask function calls and lifts the tensors that it captures, so its graph is a
few operators on its arguments. An op has no argument for a function, but it has one for text, which
any process can run.
"""

from __future__ import annotations
import __future__

from functools import lru_cache, partial
from math import inf, nan
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dtensor_ring.dtensor.flex.block_mask import MaskFunction

NAMES = {"torch": torch, "device": torch.device, "inf": inf, "nan": nan}
"""What the text may name beside builtins: all that torch.fx writes for operators and functions."""

UNUSED = {"NoneType", "fx_pytree", "pytree"}
"""Names that torch.fx gives to every text."""

KINDS = {"placeholder", "call_function", "call_method", "output"}


def text_of(function: GraphModule) -> str:
    """The source of the graph of a mask function.

    Raises:
        ValueError: if the graph needs more than torch, its arguments and numbers.
    """
    code = function.graph.python_code("self")
    kinds = {node.op for node in function.graph.nodes} - KINDS
    foreign = {name for name in code.globals if name not in NAMES and name not in UNUSED}
    if kinds or foreign:
        raise ValueError(
            f"the function of block_mask uses {', '.join(sorted(kinds | foreign))}, which a "
            "compiled graph cannot keep; make its slices outside, by slices_of_block_mask and "
            "sequence_slices, and call ring_attention"
        )
    return code.src


@lru_cache(maxsize=256)
def function_of(text: str) -> MaskFunction:
    """The function of a text."""
    names: dict[str, Any] = dict(NAMES)
    # Annotations stay text: they name types of whatever torch wrote the graph.
    flags = __future__.annotations.compiler_flag
    exec(compile(text, "<function of a block mask>", "exec", flags, dont_inherit=True), names)
    return partial(names["forward"], None)


def result_of(function: GraphModule) -> Node:
    """The node that a graph of one result returns."""
    (output,) = (node for node in function.graph.nodes if node.op == "output")
    result: Any = output.args[0]
    return result[0] if isinstance(result, (tuple, list)) else result


def shows_all(function: Any) -> bool:
    """Whether it is the function of FlexAttention that shows every key, or the graph of it."""
    if isinstance(function, GraphModule):
        return getattr(result_of(function), "target", None) == "new_ones"
    from torch.nn.attention.flex_attention import noop_mask  # takes a second

    return function is noop_mask


def leaves_scores(function: Any) -> bool:
    """Whether a `score_mod` is the one of FlexAttention that returns its score, or its graph."""
    if isinstance(function, GraphModule):
        return result_of(function) is next(iter(function.graph.nodes))
    from torch.nn.attention.flex_attention import _identity  # takes a second

    return function is _identity
