"""The cross-entropy of a projection in tiles equals the one of whole logits, in less memory."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from parallel_plans.huggingface.losses import cross_entropy
from parallel_plans.huggingface.losses.cross_entropy import IGNORE_INDEX, projected_cross_entropy
from tests.test_memory import Counted

NUM_TOKENS, NUM_ENTRIES, WIDTH = 10, 150, 6


class Case(NamedTuple):
    has_bias: bool = False
    scale: float = 1.0
    softcap: float = 0.0
    tile_bytes: int = 400  # 10 vocabulary entries
    num_tokens: int = NUM_TOKENS
    labels: int | None = None


CASES = {
    "plain": Case(),
    "one tile": Case(tile_bytes=2**20),
    "bias": Case(has_bias=True),
    "scale": Case(scale=-0.7),
    "softcap": Case(softcap=2.0),
    "all": Case(True, 3.0, 2.0),
    "no tokens": Case(True, num_tokens=0),
    "no labels": Case(True, labels=IGNORE_INDEX),
    "the last entry": Case(labels=NUM_ENTRIES - 1),
}


def tensors(case: Case, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Hidden states, weight and bias; labels, one of them missing."""
    torch.manual_seed(0)
    shapes = [(case.num_tokens, WIDTH), (NUM_ENTRIES, WIDTH), (NUM_ENTRIES,)][: 2 + case.has_bias]
    labels = torch.randint(NUM_ENTRIES, (case.num_tokens,))
    labels[3:4] = IGNORE_INDEX
    if case.labels is not None:
        labels.fill_(case.labels)
    return [torch.randn(x, dtype=dtype, requires_grad=True) for x in shapes], labels


def dense(inputs: list[Tensor], labels: Tensor, case: Case) -> Tensor:
    logits = F.linear(*inputs) * case.scale
    if case.softcap:
        logits = (logits / case.softcap).tanh() * case.softcap
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")


def tiled(inputs: list[Tensor], labels: Tensor, case: Case) -> Tensor:
    hidden, weight, *bias = inputs
    scaling = case.scale, case.softcap
    return projected_cross_entropy(hidden, weight, bias[0] if bias else None, labels, *scaling)


def results(losses: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    grad = torch.linspace(-1, 2, len(losses)).to(losses)
    return [losses.detach(), *torch.autograd.grad(losses, inputs, grad)]


def test_equals_whole_logits() -> None:
    for name, case in CASES.items():
        inputs, labels = tensors(case)
        expected = results(dense(inputs, labels, case), inputs)
        with patch.object(cross_entropy, "TILE_BYTES", case.tile_bytes):
            found = results(tiled(inputs, labels, case), inputs)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_no_worse_than_whole_logits(dtype: torch.dtype) -> None:
    """Of the errors against float64: tiles add none."""
    case = CASES["all"]
    inputs, labels = tensors(case, dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = results(dense(exact, labels, case), exact)
    plain = results(dense([x.float() for x in inputs], labels, case), inputs)
    found = results(tiled(inputs, labels, case), inputs)
    assert [x.dtype for x in found] == [torch.float32, *[dtype] * 3]
    for ours, theirs, x in zip(found, plain, expected, strict=True):
        error, other = ((y.double() - x).norm() / x.norm() for y in (ours, theirs))
        assert error <= 2 * other + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("frozen", range(3))
def test_gradients_that_nobody_needs(frozen: int) -> None:
    case = CASES["all"]
    inputs, labels = tensors(case)
    expected = results(tiled(inputs, labels, case), inputs)[1:]
    inputs[frozen].requires_grad_(False)
    kept = [i for i in range(3) if i != frozen]
    found = results(tiled(inputs, labels, case), [inputs[i] for i in kept])[1:]
    torch.testing.assert_close(found, [expected[i] for i in kept], rtol=0, atol=0)


def test_entries_without_probability() -> None:
    """As a bias of -inf for entries that fill up the vocabulary; whole tiles of them come first."""
    case = CASES["bias"]
    inputs, labels = tensors(case)
    inputs[2].data[:40] = -torch.inf
    labels[labels < 40] = 50
    with patch.object(cross_entropy, "TILE_BYTES", case.tile_bytes):
        found = results(tiled(inputs, labels, case), inputs)
    torch.testing.assert_close(found, results(dense(inputs, labels, case), inputs))


def test_mean_of_no_labels() -> None:
    """0 / 0, whose gradient is infinite: that of tokens without a label is zero all the same."""
    case = CASES["no labels"]
    inputs, labels = tensors(case)
    grads = [
        torch.autograd.grad(losses.sum() / (labels != IGNORE_INDEX).sum(), inputs)
        for losses in (tiled(inputs, labels, case), dense(inputs, labels, case))
    ]
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    assert not torch.cat([x.flatten() for x in grads[0]]).any()


def test_a_second_derivative_is_refused() -> None:
    inputs, labels = tensors(Case())
    loss = tiled(inputs, labels, Case()).square().sum()
    grads = torch.autograd.grad(loss, inputs[:2], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once, not twice: leave create"):
        grads[0].sum().backward()


@pytest.mark.parametrize("label", [NUM_ENTRIES, -1])
def test_labels_out_of_the_vocabulary(label: int) -> None:
    inputs, labels = tensors(Case(labels=label))
    with pytest.raises(RuntimeError, match=r"labels are from 0 to 149, or -100"):
        tiled(inputs, labels, Case())


# It looks for a gradient of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_registered_as_torch_wants_it() -> None:
    inputs, labels = tensors(Case(has_bias=True))
    op: Any = torch.ops.dtensor_ring.projected_cross_entropy.default
    torch.library.opcheck(op, (*inputs, labels, 3.0, 2.0))


def test_autocast() -> None:
    """The projection runs in its dtype, as a linear layer does."""
    inputs, labels = tensors(Case(), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(tiled(inputs, labels, Case()), inputs)
        expected = results(dense(inputs, labels, Case()), inputs)
    assert [x.dtype for x in found] == [torch.float32] * 3
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert not torch.equal(found[0], results(tiled(inputs, labels, Case()), inputs)[0])


def peak_bytes(num_tokens: int, num_entries: int, width: int, dtype: torch.dtype) -> int:
    """Of forward and backward, beside the gradients; on the meta device, at any size."""
    options: Any = {"dtype": dtype, "device": "meta"}
    weight, hidden = (torch.empty(x, width, **options) for x in (num_entries, num_tokens))
    labels = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    gradients = (num_entries + num_tokens) * width * dtype.itemsize
    with Counted(0) as counted:
        losses, lse = cross_entropy.forward(hidden, weight, None, labels, 1.0, 30.0)
        forward = counted.peak
        needs = [True, True, False]
        cross_entropy.backward(losses, hidden, weight, None, labels, lse, 1.0, 30.0, needs)
    return max(forward, counted.peak - gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1024, 4096])
def test_memory(width: int, dtype: torch.dtype) -> None:
    """Of 16k tokens and 128k vocabulary entries: less than an eighth of the logits in float32."""
    num_tokens, num_entries = 16 * 1024, 128 * 1024
    peak = peak_bytes(num_tokens, num_entries, width, dtype)
    logits = 4 * num_tokens * num_entries
    assert logits / 64 < peak < logits / 8, f"{logits / peak:.1f}"
