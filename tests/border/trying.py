"""Tries one line on a sharded sequence and on the stock tensor, and says what came of it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves, tree_map_only

from dtensor_ring import unshard_sequence
from tests.border.operations import REFUSED, SHARDED, WHOLE

STOCK = {"x.full_tensor()": "x", "x.redistribute(placements=[Shard(2)])": "x"}
"""What a line that plain tensors do not have is compared with."""
HINTS = re.compile(r"unshard_sequence|to_local\(\)|logits_to_keep=")
"""What every refusal says to write instead."""
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Answer:
    """What came of a line.

    Attributes:
        verdict: `SHARDED` or `WHOLE` if it is right, `REFUSED`, or else what is wrong.
        value: its result, as the line gave it; `None` if it raised.
        expected: what the line gives on the stock tensor; the error, if it raised.
    """

    verdict: str
    value: Any = None
    expected: Any = None

    @property
    def is_right(self) -> bool:
        return self.verdict in (SHARDED, WHOLE)


def names_of(stock: Tensor) -> dict[str, Any]:
    """The names that a line may use beside `x`: plain tensors, the same on every rank."""
    batch, length, features = stock.shape
    tokens = torch.arange(batch * length).view(batch, length)
    return {
        "torch": torch,
        "F": F,
        "copy": copy,
        "Shard": Shard,
        "S": length,
        "labels": tokens * 7 % min(features, length),
        "mask": tokens % 3 != 1,
        "index": torch.tensor([length - 1, 0, length // 2]),
        "other": (tokens[..., None] * 3 + torch.arange(features)).sin().to(stock.dtype),
        "weight": torch.arange(4.0 * features).view(4, features).cos().to(stock.dtype),
    }


def function_of(line: str) -> Callable[[Any, dict[str, Any]], Any]:
    """A function of `x` and the other names; a statement changes `x`, and gives it."""
    try:
        code, is_statement = compile(line, line, "eval"), False
    except SyntaxError:
        code, is_statement = compile(line, line, "exec"), True

    def run(x: Any, names: dict[str, Any]) -> Any:
        if not is_statement:
            return eval(code, names | {"x": x})
        local = {"x": x.clone()}
        exec(code, names, local)
        return local["x"]

    return run


def compiled_function_of(line: str) -> Callable[[Any, dict[str, Any]], Any]:
    """The same, compiled; what the line is of is computed within the graph, too."""

    def run(x: Any, names: dict[str, Any]) -> Any:
        torch._dynamo.reset()  # one function, for a compiler
        function = eval(f"lambda x: {line}", dict(names))
        return torch.compile(lambda x: function(x * 1), backend="aot_eager")(x)

    return run


def attempt(
    line: str,
    x: Any,
    stock: Tensor,
    run: Callable[[str], Callable[[Any, dict[str, Any]], Any]] = function_of,
) -> Answer:
    """Run a line on both tensors, and compare; `run` makes the function of the sharded one."""
    names = names_of(stock)
    expected: Any
    try:
        own = names | {"unshard_sequence": lambda whole, dim: whole}
        expected = function_of(STOCK.get(line, line))(stock, own)
    except Exception as error:
        expected = error
    try:
        value = run(line)(x, names | {"unshard_sequence": unshard_sequence})
        # What is made whole by its user is made whole here: that may be refused, too.
        whole = tree_map_only(DTensor, made_whole, value)
    except Exception as error:
        return Answer(_raised(error, expected), None, expected)
    if isinstance(expected, Exception):
        return Answer(f"silent: stock raises {expected}", value, expected)
    wrong = differs(whole, expected) or _shapes(value, expected)
    if wrong:
        return Answer(f"silent: {wrong}", value, expected)
    is_sharded = any(isinstance(leaf, DTensor) for leaf in tree_leaves(value))
    return Answer(SHARDED if is_sharded else WHOLE, value, expected)


def made_whole(x: DTensor) -> Tensor:
    """The whole of a sharded sequence, or of a replicated tensor."""
    (where,) = x.placements
    return unshard_sequence(x, where.dim) if isinstance(where, Shard) else x.full_tensor()


def said(error: BaseException) -> str:
    """All that an error says."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def _raised(error: Exception, expected: Any) -> str:
    if HINTS.search(said(error)) or type(error) is type(expected):
        return REFUSED
    return f"raw {type(error).__name__}: {said(error)[:200]}"


def differs(found: Any, expected: Any) -> str | None:
    """In what two results differ beyond rounding; `None` if in nothing."""
    found_leaves, leaves = tree_leaves(found), tree_leaves(expected)
    if len(found_leaves) != len(leaves):
        return f"{len(found_leaves)} results, not {len(leaves)}"
    for one, other in zip(found_leaves, leaves, strict=True):
        if wrong := _differs(one, other):
            return wrong
    return None


def _differs(found: Any, expected: Any) -> str | None:
    if isinstance(expected, Tensor):
        if not isinstance(found, Tensor):
            return f"a {type(found).__name__}, not a tensor"
        if found.shape != expected.shape or found.dtype != expected.dtype:
            return (
                f"{tuple(found.shape)} of {found.dtype}, not {tuple(expected.shape)} of "
                f"{expected.dtype}"
            )
        tolerance = TOLERANCE.get(expected.dtype, 0.0)
        if torch.allclose(found.detach(), expected.detach(), tolerance, tolerance, True):
            return None
        largest = (found.detach().double() - expected.detach().double()).abs().max()
        return f"other numbers, by {largest:.2g}"
    if isinstance(expected, float):
        is_same = abs(found - expected) <= 1e-6 * (1 + abs(expected)) or found != found
        return None if is_same else f"{found}, not {expected}"
    if type(expected).__name__ == "ndarray":
        return _differs(torch.as_tensor(found), torch.as_tensor(expected))
    return None if found == expected else f"{found}, not {expected}"


def _shapes(value: Any, expected: Any) -> str | None:
    """Whether a sharded result has another shape than the stock one."""
    for one, other in zip(tree_leaves(value), tree_leaves(expected), strict=True):
        if isinstance(one, DTensor) and one.shape != other.shape:
            return f"it says {tuple(one.shape)}, not {tuple(other.shape)}"
    return None
