"""Parses what options of the command line are given, or raises `ArgumentTypeError`."""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import TYPE_CHECKING

from dtensor_ring.lab.machine import Machine
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.training.names import MESH_AXES
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import MAX_RANKS, MAX_TOKENS

if TYPE_CHECKING:
    import torch


def number(text: str) -> int:
    """Parse a positive number, which may have separators.

    >>> number("131_072")
    131072
    """
    try:
        found = int(text)
    except ValueError:
        found = 0
    if not 1 <= found <= MAX_TOKENS:
        raise ArgumentTypeError(f"{text!r} is not a positive number up to {MAX_TOKENS:,}")
    return found


def gibibytes(text: str) -> float:
    """Parse a positive number of GiB.

    >>> gibibytes("79.6")
    79.6
    """
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.0 < found < 2**30:
        raise ArgumentTypeError(f"{text!r} is not a number of GiB: 80")
    return found


def machine_of(text: str) -> Machine:
    """Parse a machine: the name of a preset, or a file."""
    try:
        return as_machine(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def mask_of(text: str) -> Mask:
    """Parse a mask: the name of its builder, and its number of tokens.

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
    raise ArgumentTypeError(
        f"{text!r} is not a mask: causal, full, sliding:<tokens before a query that it sees> or "
        "chunked:<tokens of a chunk>"
    )


def numbers(text: str) -> list[int]:
    """Parse numbers that are separated by commas.

    >>> numbers("0,1000,8192")
    [0, 1000, 8192]
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r} are not numbers with commas between them: 0,1000,8192"
        ) from None


def hybrid_of(text: str) -> tuple[int, ...] | str:
    """Parse layers with a state and with attention, numbers of a token, and of a layer's map.

    The last one may be left out. What is no numbers is the path of a config.

    >>> hybrid_of("36,12,2048"), hybrid_of("36,12,2048,1000")
    ((36, 12, 2048), (36, 12, 2048, 1000))
    """
    if not text.replace(",", "").replace("-", "").isdigit():
        return text
    found = numbers(text)
    if len(found) in (3, 4) and min(found) >= 0:
        return tuple(found)
    raise ArgumentTypeError(
        f"{text!r} are not layers with a state, layers with attention, numbers of a token, and of "
        "a map of a layer: 36,12,2048,1048576; or give a config.json"
    )


def chosen_of(text: str) -> tuple[int, ...] | str:
    """Parse keys of a query, numbers of an index key and of a chosen token; or return a path.

    >>> chosen_of("2048,128,576"), chosen_of("config.json")
    ((2048, 128, 576), 'config.json')
    """
    return tuple(numbers(text)) if text.replace(",", "").isdigit() else text


def heads_of(text: str) -> tuple[int, int]:
    """Parse the number of query heads, and of key and value heads.

    >>> heads_of("32,8")
    (32, 8)
    """
    match numbers(text):
        case [queries, keys] if min(queries, keys) > 0:
            return queries, keys
    raise ArgumentTypeError(f"{text!r} are not heads of queries and of keys: 32,8")


def mesh_of(text: str) -> dict[str, int]:
    """Parse the axes of a mesh, and the number of ranks along each; "dp" is "dp_shard".

    >>> mesh_of("dp=4,cp=8")
    {'dp_shard': 4, 'cp': 8}
    """
    axes: dict[str, int] = {}
    for part in text.split(","):
        given, _, size = part.partition("=")
        name = "dp_shard" if given == "dp" else given
        is_size = size.isascii() and size.isdigit() and 0 < int(size) <= MAX_RANKS
        if name in axes or name not in MESH_AXES or not is_size:
            raise ArgumentTypeError(
                f"{text!r} is not a mesh, such as cp=8 or dp=4,cp=8: axes are "
                f"{', '.join(MESH_AXES)} and dp, which is dp_shard, each once with its number of "
                f"ranks, {MAX_RANKS:,} at most"
            )
        axes[name] = int(size)
    return axes


def dtype_of(text: str) -> torch.dtype:
    """Parse the name of a floating dtype.

    >>> dtype_of("bfloat16")
    torch.bfloat16
    """
    import torch  # takes seconds, see Note [Parsed first]

    found = getattr(torch, text, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ArgumentTypeError(f"{text!r} is not a floating dtype: bfloat16, float32")
    return found


def format_of(text: str) -> str:
    """Return the name of a format of eight bits.

    >>> format_of("int8")
    'int8'
    """
    from dtensor_ring.quantised.block_scales import FORMATS  # imports torch

    if text not in FORMATS:
        raise ArgumentTypeError(f"{text!r} is not one of {', '.join(FORMATS)}")
    return text
