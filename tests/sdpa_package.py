"""Stand-ins for the ops `cudnn::sdpa_fwd` and `cudnn::sdpa_bwd` of nvidia-cudnn-frontend 1.32.

They refuse what the package refuses, and compute in float64. What nobody promises is NaN: results
of queries that see nothing, and gradients of keys that no query sees.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.sequences import Scores, run_backward, run_forward

Given = dict[str, Any]

PACKAGES = "cudnn", "cudnn.sdpa", "cudnn.sdpa.fwd"
OPS = "cudnn.sdpa.fwd.torch_op"
PADDED = "lse_th, cu_seqlens_q, max_seqlen_q"

BAND = "bool is_causal=False, bool causal_bottom_right=False, "
BAND += "int window_left=-1, int window_right=-1, "
LENGTHS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_kv=None, "
    "int max_seqlen_q=0, int max_seqlen_kv=0, "
)
SCHEMAS = {
    "sdpa_fwd": "(Tensor q, Tensor k, Tensor v, float attn_scale, "
    + BAND
    + "Tensor? sinks=None, Tensor? seq_len_q=None, Tensor? seq_len_kv=None, "
    + LENGTHS
    + "bool return_lse=True) -> (Tensor, Tensor)",
    "sdpa_bwd": "(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    "float attn_scale, "
    + BAND
    + "Tensor? sinks=None, "
    + LENGTHS
    + "bool is_deterministic=False) -> (Tensor, Tensor, Tensor)",
}
"""Those of the package."""

GRAPHS = set[tuple[Any, ...]]()
"""What a graph would be made for, of all calls with packed sequences."""


def scores_of(given: Given) -> Scores:
    """The band, which begins at the top left of each sequence."""
    assert not given["is_causal"]
    assert not given["causal_bottom_right"]
    left, right = given["window_left"], given["window_right"]
    assert left != 0, "the bound must be greater than zero"
    assert min(left, right) >= -1
    bounds = (None if left < 0 else left - 1), (None if right < 0 else right)
    return Scores(given["attn_scale"], 0.0, *bounds, top_left=True)


def lengths_of(given: Given) -> tuple[Any, ...]:
    names = "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv"
    return tuple(given[name] for name in names)


def checked(given: Given, names: tuple[str, ...]) -> tuple[bool, list[Tensor]]:
    """Whether sequences are packed, and the tensors, token-major."""
    tensors, is_packed = [given[name] for name in names], given["cu_seqlens_q"] is not None
    query, key = tensors[:2]
    assert given["sinks"] is None
    assert len({x.dtype for x in tensors}) == 1
    assert all(x.stride(-1) == 1 for x in tensors)
    assert query.shape[-1] % 8 == tensors[2].shape[-1] % 8 == 0
    assert query.shape[1] % key.shape[1] == 0
    if not is_packed:
        assert (query.dim(), given["max_seqlen_q"], given["max_seqlen_kv"]) == (4, 0, 0)
        assert given["window_left"] < 0 or query.shape[2] <= key.shape[2], "max_s_q <= max_s_kv"
        assert min(query.shape[2], key.shape[2]) > 1, "older versions take no single one"
        return False, [x.transpose(1, 2) for x in tensors]
    assert query.dim() == 3
    cu_q, cu_kv, *longest = lengths_of(given)
    assert cu_q.shape == cu_kv.shape
    assert min(longest) > 0
    band = given["window_left"], given["window_right"]
    GRAPHS.add((names, len(cu_q), *longest, *band, *(x.shape[1:] for x in tensors)))
    return True, tensors


def alone(given: Given, own: int) -> Tensor:
    """Which tokens are in sequences that have nothing on the other side."""
    bounds = lengths_of(given)[:2]
    return (bounds[1 - own].diff() == 0).repeat_interleave(bounds[own].diff())


def forward(given: Given) -> tuple[Tensor, Tensor]:
    assert given["return_lse"]
    assert given["seq_len_q"] is given["seq_len_kv"] is None
    is_packed, tensors = checked(given, ("q", "k", "v"))
    lengths = lengths_of(given) if is_packed else (None,) * 4
    nothing = torch.nan, torch.nan
    out, lse = run_forward(scores_of(given), tuple(tensors), lengths, nothing)
    if is_packed:
        return out, lse.T.contiguous().unsqueeze(2)
    return out.transpose(1, 2), lse.unsqueeze(3)


def backward(given: Given) -> tuple[Tensor, ...]:
    assert not given["is_deterministic"]
    is_packed, (query, key, value, out, grad_out) = checked(given, ("q", "k", "v", "o", "grad_out"))
    lse, lengths = given["lse"], lengths_of(given) if is_packed else (None,) * 4
    assert lse.dtype == torch.float32
    if is_packed:
        shape = len(lengths[0]) - 1, query.shape[1], lengths[2], 1
        assert lse.shape == shape
        lse = unpadded(lse, lengths[0])
    else:
        assert lse.shape in (given["q"].shape[:3], (*given["q"].shape[:3], 1))
        lse = lse.reshape(lse.shape[:3]).contiguous()
    given_to = grad_out, (query, key, value), (out, lse)
    grads = run_backward(scores_of(given), *given_to, lengths)
    if not is_packed:
        return tuple(x.transpose(1, 2) for x in grads)
    for own, parts in ((0, grads[:1]), (1, grads[1:])):
        for grad in parts:
            grad[alone(given, own)] = torch.nan
    return tuple(grads)


def padded(given: Given) -> Tensor:
    """As `thd_lse_to_padded` of the package."""
    lse, bounds = given["lse_th"], given["cu_seqlens_q"].tolist()
    found = torch.zeros(len(bounds) - 1, lse.shape[1], given["max_seqlen_q"], 1)
    for sequence, (first, end) in enumerate(pairwise(bounds)):
        found[sequence, :, : end - first, 0] = lse[first:end].T
    return found


def unpadded(lse: Tensor, cu_seqlens: Tensor) -> Tensor:
    """`(N, T)`."""
    lengths = cu_seqlens.diff().tolist()
    parts = [x[:, :length, 0] for x, length in zip(lse, lengths, strict=True)]
    return torch.cat(parts, 1).contiguous()


RUNS = {"sdpa_fwd": forward, "sdpa_bwd": backward}
