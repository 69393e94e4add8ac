"""Passes the keyword arguments of a block to its attention, where the block's code does not.

A model gives its blocks what the plan adds to a forward. Some blocks take any keywords and use none
of them, such as those of Nemotron, so their attention would not know how the sequence is sharded.
They do hand on their mask, also where checkpointing computes them again: so it carries the keyword.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dis import get_instructions
from functools import cache
from inspect import CO_VARARGS, CO_VARKEYWORDS, unwrap
from types import CodeType, MethodType
from typing import Any, NamedTuple

from torch import nn

from parallel_plans.huggingface.core.versions import names_in_forward

KEYWORD, MASK = "ring", "attention_mask"


def deaf_attention(model: nn.Module) -> list[tuple[nn.Module, nn.Module]]:
    """Return the blocks that use none of their keywords, each with an attention module of it."""
    deaf = {kind for kind in {type(module) for module in model.modules()} if _drops_keywords(kind)}
    return [
        (block, child)
        for block in model.modules()
        if type(block) in deaf
        for child in block.children()
        if "ALL_ATTENTION_FUNCTIONS" in names_in_forward(child)
    ]


@cache  # plans of a process read the same classes again and again
def _drops_keywords(block: type[nn.Module]) -> bool:
    code: CodeType | None = getattr(unwrap(block.forward), "__code__", None)
    if code is None or not code.co_flags & CO_VARKEYWORDS:
        return False
    # The name of `**kwargs` follows all other arguments.
    place = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & CO_VARARGS)
    name = code.co_varnames[place]
    # No instruction loads them: the block drops what it is given.
    return all(found.argval != name for found in get_instructions(code))


class _MaskAndKeyword(NamedTuple):
    """What a block hands on instead of its mask."""

    mask: Any
    keyword: Any


def pass_on(model: nn.Module) -> list[nn.Module]:
    """Make these blocks hand the plan's keyword on beside the mask; return changed modules."""
    changed: list[nn.Module] = []
    for block, attention in deaf_attention(model):
        for module, change in ((block, _joined), (attention, _parted)):
            module.forward = MethodType(_forward(type(module).forward, change), module)
            changed.append(module)
    return changed


def _forward(plain: Callable[..., Any], change: Callable[[dict[str, Any]], None]) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        change(kwargs)
        return plain(self, *args, **kwargs)

    return forward


def _joined(kwargs: dict[str, Any]) -> None:
    if KEYWORD in kwargs and MASK in kwargs:
        # Every block hands its mask to its attention, so the keyword travels with it.
        kwargs[MASK] = _MaskAndKeyword(kwargs[MASK], kwargs[KEYWORD])


def _parted(kwargs: dict[str, Any]) -> None:
    if isinstance(kwargs.get(MASK), _MaskAndKeyword):
        kwargs[MASK], kwargs[KEYWORD] = kwargs[MASK]


@contextmanager
def passing_on(model: nn.Module) -> Iterator[None]:
    """Open a context in which these blocks hand the plan's keyword on."""
    changed = pass_on(model)
    try:
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)
