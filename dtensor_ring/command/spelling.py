"""Values as they are written on a command line."""

from __future__ import annotations

import argparse

import torch

from dtensor_ring.command.mesh import AXES
from dtensor_ring.planning.balancing.hybrid import Hybrid
from dtensor_ring.planning.masks.mask import Mask


def number(text: str) -> int:
    """A positive number, which may have separators: 131072 or 131_072.

    Raises:
        ArgumentTypeError: if it is none.

    >>> number("131_072")
    131072
    """
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return found


def mask_of(text: str) -> Mask:
    """A mask by its builder and its number.

    Raises:
        ArgumentTypeError: if no mask is written so.

    >>> mask_of("sliding:4096").left
    4096
    """
    match text.split(":"):
        case ["causal"]:
            return Mask.causal()
        case ["full"]:
            return Mask.full()
        case ["sliding", size]:
            return Mask.sliding(number(size))
        case ["chunked", size]:
            return Mask.chunked(number(size))
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a mask: causal, full, sliding:<tokens before a query that it sees> or "
        "chunked:<tokens of a chunk>"
    )


def numbers(text: str) -> list[int]:
    """Numbers, separated by commas.

    Raises:
        ArgumentTypeError: if a part is not a number.

    >>> numbers("0,1000,8192")
    [0, 1000, 8192]
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} are not numbers with commas between them: 0,1000,8192"
        ) from None


def hybrid_of(text: str) -> Hybrid:
    """Layers with a state, layers with attention, and numbers of a token between them.

    Raises:
        ArgumentTypeError: if these are not three numbers from 0 on.

    >>> hybrid_of("36,12,2048").hidden_size
    2048
    """
    match numbers(text):
        case [stateful, attention, hidden_size] if min(stateful, attention, hidden_size) >= 0:
            return Hybrid(stateful, attention, hidden_size)
    raise argparse.ArgumentTypeError(
        f"{text!r} are not layers with a state, layers with attention and numbers of a token: "
        "36,12,2048"
    )


def heads_of(text: str) -> tuple[int, int]:
    """Heads of queries, and of keys and values.

    Raises:
        ArgumentTypeError: if these are not two numbers.

    >>> heads_of("32,8")
    (32, 8)
    """
    match numbers(text):
        case [queries, keys]:
            return queries, keys
    raise argparse.ArgumentTypeError(f"{text!r} are not heads of queries and of keys: 32,8")


def mesh_of(text: str) -> dict[str, int]:
    """Axes of a mesh, and how many ranks are along each.

    Raises:
        ArgumentTypeError: if these are not known axes with numbers.

    >>> mesh_of("cp=8,dp_shard=4")
    {'cp': 8, 'dp_shard': 4}
    """
    pairs = [part.partition("=") for part in text.split(",")]
    names = [name for name, _, _ in pairs]
    if "tp" in names:
        raise argparse.ArgumentTypeError(
            f"{text!r} has tensor parallelism, which is not estimated: the plan of a model decides "
            "what it divides; leave tp out: a rank has less with it than is then estimated"
        )
    if not set(names) <= set(AXES) or len(names) != len(set(names)) or "cp" not in names:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a mesh: cp=8, and where there are more axes cp=8,dp_shard=4; known "
            f"axes: {', '.join(AXES)}"
        )
    return {name: number(size) for name, _, size in pairs}


def dtype_of(text: str) -> torch.dtype:
    """A floating dtype by its name.

    Raises:
        ArgumentTypeError: if it is none.

    >>> dtype_of("bfloat16")
    torch.bfloat16
    """
    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise argparse.ArgumentTypeError(f"{text!r} is not a floating dtype: bfloat16, float32")
    return found
