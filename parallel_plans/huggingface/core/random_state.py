"""Random numbers of a rank: each token gets its own dropout mask, and ranks stay in step.

A graph of a compiler, or of CUDA, has no state to change: there each dropout is a hash of a seed
that all ranks draw, of the rank, and of the place in the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode

from dtensor_ring.extension import draw_seed, dropout_factors, is_capturing

# Odd, so that any two ranks get two seeds, also in the 32 bits that the generator of CPUs uses.
OF_RANK, OF_DRAW = 0x5851F42D4C957F2D, 0x9E3779B97F4A7C15
# Numbers that a draw takes of a GPU's generator: it counts in fours.
ONE_DRAW = 4
# A tensor of a rank has fewer than 2**40 numbers.
MAX_BITS = 40


def random_of_rank(model: Any, rank: int, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which dropout of a model in training is that of a rank's own tokens.

    Args:
        model: the model that runs.
        rank: this rank on the axis.
        device: where its tokens are.

    Raises:
        ValueError: if ranks would skip different layers.
    """
    if not model.training or device.type == "meta":
        return nullcontext()
    if torch.compiler.is_compiling() or is_capturing(device):
        return RankDropout(rank)
    _check_layers(model, device)
    return RankState(rank, device)


def _check_layers(model: Any, device: torch.device) -> None:
    """Refuse layers that are skipped by the random state of the CPU, if that is a rank's own."""
    if device.type != "cpu":
        return
    for name in ("layerdrop", "decoder_layerdrop"):
        rate = getattr(model.config, name, 0)
        if rate:
            raise ValueError(
                f"{name}={rate} skips layers by the random state of the CPU, which differs between "
                f"ranks where tokens are on CPUs: make the model with {name}=0"
            )


# Note [Random state of a rank]: all ranks of an axis seed alike, so token number i of one rank
# would be dropped as token number i of another. So a forward of a model in training runs from a
# state that is a function of the seed and the rank on the axis. After it, the state is that of
# before, one draw further, the same on all ranks: what all ranks draw later (a head on whole
# outputs, a sampler) is the same on all, and so is the state of ranks that share this rank's tokens
# (tensor parallelism). Checkpointed layers are computed again from the state that torch kept of
# them, which is this rank's.
class RankState:
    """A context with the random state of a rank, see Note [Random state of a rank]."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._generator = rank, _generator(device)

    def __enter__(self) -> None:
        # The draw moves the state, so that the next forward drops others; all ranks move it alike.
        number = _drawn(self._generator)
        self._after = self._generator.get_state()
        self._generator.manual_seed((number + OF_RANK * (self._rank + 1)) % 2**63)

    def __exit__(self, *error: object) -> None:
        self._generator.set_state(self._after)


def _generator(device: torch.device) -> torch.Generator:
    """Return the generator of a device that random functions take by default."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]


def _drawn(generator: torch.Generator) -> int:
    """Return a number that the state gives, and advance it; the host does not wait for a GPU."""
    if generator.device.type == "cpu":
        # One number for all samples of a vmap, which refuses to draw, or draws one for each.
        with temporarily_clear_interpreter_stack():
            return int(torch.randint(2**62, (), generator=generator, device="cpu"))
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + ONE_DRAW)
    return seed + OF_DRAW * offset


class RankDropout(TorchFunctionMode):
    """A mode in which `torch.nn.functional.dropout` drops by a hash, for graphs."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run a function of torch, or dropout of this rank."""
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if args and callable(args[0]) and not isinstance(args[0], Tensor):
            # A part of a graph of its own, as checkpointed layers are: it is traced without modes.
            return func(self._within(args[0]), *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs in a mode like this one."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with RankDropout(self._rank):
                return function(*args, **kwargs)

        return run

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or not 0 < p < 1:  # nothing to draw, or an error of torch
            return F.dropout(input, p, training, inplace)
        places = torch.arange(input.numel(), device=input.device).view(input.shape)
        # By an exclusive or: a compiler would fold a sum with the hash's product, and overflow.
        # The rank is above the bits of a place, so no two numbers of the ranks have one index.
        index = places ^ (self._rank + 1 << MAX_BITS)
        factors = dropout_factors(draw_seed(input.device), index, p, input.dtype)
        return input.mul_(factors) if inplace else input * factors
