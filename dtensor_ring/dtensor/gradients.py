"""Gradients of and by sharded sequences, as of one loss of the whole sequence.

Each rank computes the gradients of weights from its own tokens, and then the ranks average them. So
backward takes the gradient of an output times the number of ranks, and what it gives for a sequence
is divided by that number again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import DTensor

from dtensor_ring.dtensor.annotation import tokens_of
from dtensor_ring.dtensor.sequence_order import order_of, own_tokens, refusal, sequence_dim, wrapped


def for_backward(gradient: Any, x: Any) -> Any:
    """Return a gradient of a whole sequence as backward wants it.

    Raises:
        ValueError: if the sequence was flattened with other dimensions.
    """
    if gradient is None or not _has_tokens(x):
        return gradient
    dim = sequence_dim(x)
    if dim < 0:
        raise refusal(x, "backward")
    local, tokens = own_tokens(gradient, x, dim), order_of(x)
    return wrapped(local * tokens.mesh.size() if tokens.averages else local, x, dim)


def of_one_loss(gradient: Any, x: Any) -> Any:
    """Return a gradient that backward has computed as that of one loss, see `for_backward`."""
    if gradient is None or not _has_tokens(x) or not order_of(x).averages:
        return gradient
    return gradient / x.device_mesh.size()


def _has_tokens(x: Any) -> bool:
    """Return whether this is a sharded sequence, and not what a compiler traces backward by."""
    if not isinstance(x, DTensor) or tokens_of(x._spec.mesh) is None:
        return False
    return not isinstance(x._local_tensor, (FakeTensor, FunctionalTensor))


def _gradients(
    func: Any, outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **how: Any
) -> Any:
    """Compute `torch.autograd.grad`, of or by sharded sequences, as of one loss."""
    found = func(outputs, inputs, _all_for_backward(grad_outputs, outputs), *args, **how)
    return tuple(of_one_loss(x, of) for x, of in zip(found, _listed(inputs), strict=True))


def _backward(func: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **how: Any) -> None:
    func(tensors, _all_for_backward(grad_tensors, tensors), *args, **how)


def _all_for_backward(gradients: Any, of: Any) -> list[Any] | None:
    if gradients is None:
        return None
    return [for_backward(x, y) for x, y in zip(_listed(gradients), _listed(of), strict=True)]


def _listed(x: Any) -> list[Any]:
    return [x] if isinstance(x, Tensor) else list(x)


GRADIENTS = {torch.autograd.grad: _gradients, torch.autograd.backward: _backward}
