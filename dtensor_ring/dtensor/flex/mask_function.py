"""Converts the function of a block mask to text, which a compiled graph on disk can contain.

Dynamo inlines the calls of a mask function and lifts the tensors that it captures. So its graph is
a few operators on its arguments. An op cannot take a function as an argument, but it can take text,
which any process can run.
"""

from __future__ import annotations
import __future__

from functools import lru_cache, partial
from math import inf, nan
from typing import Any

import torch
from torch.fx import GraphModule, Node

from dtensor_ring.dtensor.flex.block_mask import MaskFunction

# The names that the text may use besides builtins: torch.fx writes these for operators and
# functions.
NAMES = {"torch": torch, "device": torch.device, "inf": inf, "nan": nan}

# The globals that torch.fx adds to every text.
UNUSED = {"NoneType", "fx_pytree", "pytree"}

KINDS = {"placeholder", "call_function", "call_method", "output"}


def text_of(function: GraphModule) -> str:
    """Return the source of the graph of a mask function.

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
    """Return the function that a text defines."""
    names: dict[str, Any] = dict(NAMES)
    # Do not evaluate annotations: their types depend on the version of torch that wrote the text.
    flags = __future__.annotations.compiler_flag
    exec(compile(text, "<function of a block mask>", "exec", flags, dont_inherit=True), names)
    return partial(names["forward"], None)


def result_of(function: GraphModule) -> Node:
    """Return the result node of a graph with one result."""
    (output,) = (node for node in function.graph.nodes if node.op == "output")
    result: Any = output.args[0]
    return result[0] if isinstance(result, (tuple, list)) else result


def shows_all(function: Any) -> bool:
    """Return whether a function is FlexAttention's mask that shows every key, or its graph."""
    if isinstance(function, GraphModule):
        return getattr(result_of(function), "target", None) == "new_ones"
    from torch.nn.attention.flex_attention import noop_mask  # takes a second

    return function is noop_mask


def leaves_scores(function: Any) -> bool:
    """Return whether a `score_mod` is FlexAttention's identity, or its graph."""
    if isinstance(function, GraphModule):
        return result_of(function) is next(iter(function.graph.nodes))
    from torch.nn.attention.flex_attention import _identity  # takes a second

    return function is _identity
