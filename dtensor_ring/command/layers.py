"""The layers of a model."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def layers_of(module: nn.Module) -> list[nn.Module]:
    """The members of its outermost lists of modules.

    >>> len(layers_of(nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})))
    2
    """
    lists = [x for x in module.modules() if isinstance(x, (nn.ModuleList, nn.ModuleDict))]
    inner = {id(part) for x in lists for part in x.modules() if part is not x}
    return [layer for x in lists if id(x) not in inner for layer in x.children()]


def checkpoint_layers(module: nn.Module) -> None:
    """Make the backward of each layer compute its forward again, from the input that was kept."""
    for layer in layers_of(module):
        # Nothing is drawn at random without numbers.
        run: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        layer.forward = partial(run, layer.forward)
