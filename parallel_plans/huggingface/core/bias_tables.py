"""Makes the bias that an attention adds by distance a table, which a ring takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Signature, signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from parallel_plans.huggingface.core.versions import names_in_forward, reads_positions

# The attribute with the number of distances, and the parameters of a forward that say the pairs.
EXTENT = "rel_extent"
POSITIONS = ("query_positions", "key_positions")
DISTANCE = "relative_distance"

# What the forward of an attention reads.
ATTENDS = "ALL_ATTENTION_FUNCTIONS"

# The attribute of an attention that gets a table: whether it scales by positions that it counts.
TABLE = "context_parallel_bias_table"
SCALED = "log_scaling_n_floor"


def bias_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that compute a bias by distance."""
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, EXTENT, None), int)
        and ATTENDS not in names_in_forward(module)  # which may hand the distances on
        and ({*POSITIONS} <= _parameters(module).keys() or DISTANCE in _parameters(module))
    ]


def _parameters(module: nn.Module) -> Any:
    return signature(type(module).forward).parameters


# Note [Tables for a bias]: in some models, such as Inkling, each token has a bias for each distance
# to earlier tokens, computed from its hidden state. A module computes it, and looks it up for all
# pairs of the tokens that it sees. On a rank these are not the pairs of the sequence, and they are
# many. So under a plan the module is asked for each distance once, `(B, N, L, E)`: the attention
# hands this table on, and ring attention looks up the pairs.
def make_tables(model: nn.Module) -> list[nn.Module]:
    """Make these modules return tables, and mark the attentions that get them; return the modules.

    The attentions have the modules as children.
    """
    changed = bias_modules(model)
    for module in changed:
        plain = type(module).forward
        module.forward = MethodType(_forward(plain, signature(plain)), module)
    for attention in model.modules():
        if any(child in changed for child in attention.children()):
            counts = SCALED in names_in_forward(attention) and not reads_positions(attention)
            setattr(attention, TABLE, counts)
    return changed


def _forward(plain: Callable[..., Tensor], known: Signature) -> Callable[..., Tensor]:
    """Return the forward of a module for each distance, in place of the pairs of tokens."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        given = known.bind(self, *args, **kwargs)
        arguments, extent = given.arguments, getattr(self, EXTENT)
        if DISTANCE in arguments:
            pairs = arguments[DISTANCE]
            # Each distance once, in place of that of each pair of tokens.
            distances = torch.arange(extent, device=pairs.device)
            arguments[DISTANCE] = distances.expand(len(pairs), -1)
        else:
            rows, cols = POSITIONS
            # One query at position 0 and keys before it: key number d is at distance d.
            zero = torch.zeros_like(arguments[rows])
            arguments |= {rows: zero, cols: -torch.arange(extent, device=zero.device)}
        return plain(*given.args, **given.kwargs)

    return forward


@contextmanager
def making_tables(model: nn.Module) -> Iterator[None]:
    """Open a context in which these modules return tables."""
    changed = make_tables(model)
    try:
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)
        for attention in model.modules():
            vars(attention).pop(TABLE, None)


def takes_table(attention: nn.Module) -> bool:
    """Return whether the bias of an attention is a table."""
    return getattr(attention, TABLE, None) is not None


def log_scaled(attention: Any) -> bool:
    """Return whether an attention scales queries and bias by positions that it counts itself."""
    is_scaled = getattr(attention, TABLE, False) and not attention.is_sliding
    return is_scaled and getattr(attention.config, SCALED) is not None


def log_scale(attention: Any, positions: Tensor) -> Tensor:
    """Return the factor of queries and bias at some positions, float32, `(L,)`."""
    config = attention.config
    ratio = ((positions + 1).float() / config.log_scaling_n_floor).clamp(min=1.0)
    return 1.0 + config.log_scaling_alpha * torch.log(ratio)
