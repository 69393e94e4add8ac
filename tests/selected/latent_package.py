"""A stand-in for the lists of latents of flash-attn-4, with its signatures and conventions.

It computes in float64 on the CPU from what it is given. Shapes, dtypes and lists that the package
refuses fail here, too, and so do arguments whose meaning nobody has written down here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.package_calls import Given
from tests.packages import CUTE_FORWARD, function

FORWARD = (
    f"{CUTE_FORWARD}, q_descale=None, k_descale=None, "
    "v_descale=None, gather_kv_indices=None, scheduler_metadata=None, seqlen_k_per_split=None, "
    "disable_scheduler_metadata=False, gather_bwd_recompute_p=False"
)
"""Of `flash_attn.cute.interface._flash_attn_fwd` of flash-attn-4 4.0.0b36."""

BACKWARD = (
    "q, k, v, qv, out, dout, lse, p, row_max, gather_kv_indices, learnable_sink=None, "
    "softmax_scale=None, causal=False, m_block_size=128, n_block_size=64, num_threads=256, "
    "cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
    "max_seqlen_k=None, min_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, "
    "dqv=None, recompute_p=False, token_chunk=None, o_lo=None"
)
"""Of `_flash_attn_bwd_sparse_mla`."""


def run_forward(given: Given) -> tuple[Any, ...]:
    """Out in bfloat16 and lse in float32, by token; the last three are for its own autograd."""
    assert given["return_lse"]
    assert given["gather_bwd_recompute_p"]
    assert given["qv"].requires_grad, "takes a maximum that is not exact"
    given = {name: x.detach() if isinstance(x, Tensor) else x for name, x in given.items()}
    sink, scale = given["learnable_sink"], given["softmax_scale"]
    scores = scored(given)
    num_heads = scores.shape[2]
    extra = torch.full((num_heads,), -torch.inf) if sink is None else sink
    assert extra.shape == (num_heads,)
    assert extra.dtype in (torch.float32, torch.bfloat16, torch.float16)
    extra = extra.double().view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
    lse = torch.cat((scale * scores, extra), -1).logsumexp(-1)
    out = weights_of(scale * scores, lse) @ given["v"][:, :, 0].double().unsqueeze(1)
    return out.bfloat16(), lse.float(), None, None, None


def run_backward(given: Given) -> tuple[Any, ...]:
    """Gradients of q and qv in bfloat16, of k and v in float32; none of sinks without sinks."""
    assert given["recompute_p"]
    assert (given["p"], given["row_max"]) == (None, None)
    assert len(given["v"]) == 1, "takes chunks of tokens of one row only"
    assert given["token_chunk"] > 0
    q, k, v, qv, out, dout = (given[name].double() for name in ("q", "k", "v", "qv", "out", "dout"))
    check(given["out"], out.shape[:3], (512,), torch.bfloat16)
    check(given["dout"], out.shape[:3], (512,), torch.bfloat16)
    check(given["lse"], out.shape[:3], (), torch.float32)
    scores, scale = scored(given), given["softmax_scale"]
    assert scores.shape[:3] == out.shape[:3]
    weights = weights_of(scale * scores, given["lse"].double())
    values = v[:, :, 0].unsqueeze(1)
    grads = weights * (dout @ values.mT - (out * dout).sum(-1, keepdim=True)) * scale
    of_v = torch.einsum("blnt,blnd->btd", grads, qv) + torch.einsum("blnt,blnd->btd", weights, dout)
    of_k = torch.einsum("blnt,blnd->btd", grads, q)
    dq, dqv = grads @ k[:, :, 0].unsqueeze(1), grads @ values
    of_rows = (x.unsqueeze(2).float() for x in (of_k, of_v))
    return dq.bfloat16(), *of_rows, dqv.bfloat16(), None


def scored(given: Given) -> Tensor:
    """Products `(B, L, N, T)`, -inf where a row is not in the list."""
    q, k, v, qv, lists = (given[x] for x in ("q", "k", "v", "qv", "gather_kv_indices"))
    (batch, num_queries, num_heads, _), num_rows = q.shape, k.shape[1]
    assert 0 < num_heads <= 128
    for x, shape, dim in (
        (q, (batch, num_queries, num_heads), 64),
        (qv, (batch, num_queries, num_heads), 512),
        (k, (batch, num_rows, 1), 64),
        (v, (batch, num_rows, 1), 512),
    ):
        check(x, shape, (dim,), torch.bfloat16)
        assert all(stride % 8 == 0 for stride in x.stride()[:3]), "copies what is not aligned"
    check(lists, (batch, num_queries), lists.shape[2:], torch.int32)
    assert lists.shape[2] % 128 == 0
    assert (lists < num_rows).all()
    is_in = torch.zeros(batch, num_queries, num_rows + 1, dtype=torch.bool)
    is_in.scatter_(-1, lists.long() % (num_rows + 1), True)
    products = torch.einsum("blnd,btd->blnt", q.double(), k[:, :, 0].double())
    products += torch.einsum("blnd,btd->blnt", qv.double(), v[:, :, 0].double())
    return products.masked_fill(~is_in[..., :num_rows].unsqueeze(2), -torch.inf)


def weights_of(scores: Tensor, lse: Tensor) -> Tensor:
    """Of rows that see nothing, 0."""
    return (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp()


def check(x: Tensor, shape: Any, dims: Any, dtype: torch.dtype) -> None:
    assert x.shape == (*shape, *dims)
    assert x.dtype == dtype


def only(run: Callable[[Given], Any], signature: str, *known: str) -> Callable[..., Any]:
    """A function that refuses arguments beside the known ones, and those without defaults."""
    bind = function(signature, lambda given: given)
    needed = {x.strip() for x in signature.split(",") if "=" not in x}
    plain = bind(**dict.fromkeys(needed))

    def refusing(given: Given) -> Any:
        unknown = given.keys() - needed - set(known)
        assert all(given[name] == plain[name] for name in unknown)
        return run(given)

    return function(signature, refusing)


LISTS = "gather_kv_indices", "softmax_scale"
PACKAGE = {
    "_flash_attn_fwd": only(
        run_forward,
        FORWARD,
        *("qv", "learnable_sink", "return_lse", "gather_bwd_recompute_p", *LISTS),
    ),
    "_flash_attn_bwd_sparse_mla": only(
        run_backward, BACKWARD, *("recompute_p", "token_chunk", *LISTS)
    ),
}


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """`flash_attn.cute.interface`, as long as a test runs."""
    install(monkeypatch)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("flash_attn", "flash_attn.cute", "flash_attn.cute.interface"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    for name, run in PACKAGE.items():
        monkeypatch.setattr(sys.modules["flash_attn.cute.interface"], name, run, raising=False)
