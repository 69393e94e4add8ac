"""What the stand-ins for packages and operators of GPU kernels compute, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.pages import run_pages
from tests.sequences import Lengths, Scores, run_backward, run_forward

Given = dict[str, Any]
"""Arguments of a call, by name."""

Run = Callable[[Given], Any]


def lengths_of(given: Given) -> Lengths:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    older = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")
    return tuple(given.get(name, given.get(old)) for name, old in zip(names, older, strict=True))


def scores_of(given: Given, left: int | None, right: int | None) -> Scores:
    scale = given["softmax_scale"] if "softmax_scale" in given else given["scale"]
    is_causal = given["causal"] if "causal" in given else given["is_causal"]
    return Scores(scale, given.get("softcap") or 0.0, left, 0 if is_causal else right)


def flash2_scores(given: Given) -> Scores:
    """Bounds from the longest on are unbounded, and one that is left reaches so far itself."""
    query, key, (cu_seqlens, _, max_rows, max_cols) = given["q"], given["k"], lengths_of(given)
    if cu_seqlens is None:
        max_cols = key.shape[1]
    elif max_rows == 1 and query.shape[1] > key.shape[1]:
        assert len(query) == len(cu_seqlens) - 1, "takes one row of each segment"
    window = [given["window_size_left"], given["window_size_right"]]
    window = [-1 if x is None or x >= max_cols else x for x in window]
    if sum(bound < 0 for bound in window) == 1:
        window = [max_cols if bound < 0 else bound for bound in window]
    return scores_of(given, *(None if bound < 0 else bound for bound in window))


def flash3_scores(given: Given) -> Scores:
    """-1 is unbounded."""
    window = given["window_size_left"], given["window_size_right"]
    assert all(bound >= -1 for bound in window)
    return scores_of(given, *(None if bound < 0 else bound for bound in window))


def flash4_scores(given: Given) -> Scores:
    """`None` is unbounded."""
    window = given["window_size_left"], given["window_size_right"]
    assert all(bound is None or bound >= 0 for bound in window)
    return scores_of(given, *window)


def forward(scores: Callable[[Given], Scores], no_keys: tuple[float, float], rest: int) -> Run:
    """Out, lse and `rest` other results."""

    def run(given: Given) -> tuple[Tensor, ...]:
        tensors = given["q"], given["k"], given["v"]
        if given.get("page_table") is not None:
            assert given["cu_seqlens_k"] is None, "page tables come without boundaries of keys"
            out, lse = run_pages(given, scores_of(given, None, None), 1)
            return out, lse, *(torch.empty(0) for _ in range(rest))
        out, lse = run_forward(scores(given), tensors, lengths_of(given), no_keys)
        return out, lse, *(torch.empty(0) for _ in range(rest))

    return run


def paged_aten(given: Given) -> tuple[Tensor, ...]:
    """`aten._flash_attention_forward`, which reads block tables, too."""
    if given["block_table"] is None:
        return forward(flash2_scores, (0.0, torch.inf), 3)(given)
    # It wants the boundaries of both sides or of none, and mixes up the splits of packed rows.
    assert given["cum_seq_k"].diff().tolist() == given["seqused_k"].tolist()
    assert given["num_splits"] == 1
    lengths = zip(
        ("cu_seqlens_q", "", "max_seqlen_q", "max_seqlen_k"), lengths_of(given), strict=True
    )
    paged = {**given, **dict(lengths), "page_table": given["block_table"]}
    bounds = given["window_size_left"], given["window_size_right"]
    assert set(bounds) <= {None, -1}
    out, lse = run_pages(paged, scores_of(given, None, None), 256)
    return out, lse, *(torch.empty(0) for _ in range(3))


def kvcache(given: Given) -> tuple[Tensor, Tensor]:
    """`flash_attn_with_kvcache`, whose cache may be in pages."""
    assert given["return_softmax_lse"]
    assert not given["causal"]
    assert given["window_size"] == (-1, -1)
    assert all(given[name] is None for name in ("k", "v", "cache_batch_idx", "cache_leftpad"))
    names = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens"}
    paged = {name: given[other] for name, other in names.items()}
    paged |= {"q": given["q"], "page_table": given["block_table"]}
    return run_pages(paged, scores_of(given, None, None), 256)


def backward(scores: Callable[[Given], Scores], returned: str) -> Run:
    """Gradients, which are written to memory that is given; the names say what is returned."""

    def run(given: Given) -> Any:
        strict = torch.are_deterministic_algorithms_enabled()
        assert given.get("deterministic", strict) == strict  # aten's goes by the setting itself
        tensors = given["q"], given["k"], given["v"]
        saved = given["out"], given.get("softmax_lse", given.get("lse"))
        grads = run_backward(scores(given), given["dout"], tensors, saved, lengths_of(given))
        results = dict(zip(("dq", "dk", "dv"), grads, strict=True), d=saved[1].clone())
        for name in ("dq", "dk", "dv"):
            if given.get(name) is not None:
                results[name] = given[name].copy_(results[name])
        found = tuple(results[name] for name in returned.split())
        return found if len(found) > 1 else found[0]

    return run


class CudnnOps:
    """Full and causal, top-left, with lse `(B, N, R, 1)`; its graphs are kept from call to call."""

    def __init__(self) -> None:
        self._graphs: dict[Any, Any] = {}

    def forward(self, given: Given) -> tuple[Any, ...]:
        out, lse = run_forward(*self._of(given), (None,) * 4, (0.0, 0.0))
        rows, cols = (given[name].shape[2] for name in ("query", "key"))
        unused = torch.empty((), dtype=torch.int64)
        result = out.transpose(1, 2), lse.unsqueeze(3), None, None, rows, cols
        return *result, unused, unused.clone(), None

    def backward(self, given: Given) -> tuple[Tensor, ...]:
        scores, tensors = self._of(given)
        dout, out, lse = given["grad_out"], given["out"], given["logsumexp"]
        assert (given["max_q"], given["max_k"]) == (tensors[0].shape[1], tensors[1].shape[1])
        assert all(given[name] is not None for name in ("philox_seed", "philox_offset"))
        assert lse.dim() == 4
        key = [(x.shape, x.stride()) for x in tensors], given["is_causal"]
        graph = dout.stride(), out.stride(), lse.stride()
        assert self._graphs.setdefault(str(key), graph) == graph, "it would take the old strides"
        dout, out = dout.transpose(1, 2), out.transpose(1, 2)
        saved = out, lse.squeeze(3)
        grads = run_backward(scores, dout, tensors, saved, (None,) * 4)
        return tuple(grad.transpose(1, 2) for grad in grads)

    def _of(self, given: Given) -> tuple[Scores, tuple[Tensor, ...]]:
        tensors = tuple(given[name].transpose(1, 2) for name in ("query", "key", "value"))
        assert all(x.shape[1] > 1 for x in tensors), "it takes no single query or key"
        assert given["attn_bias"] is given.get("cum_seq_q") is given.get("cum_seq_k") is None
        assert given["dropout_p"] == 0
        right = 0 if given["is_causal"] else None
        return Scores(given["scale"], 0.0, None, right, top_left=True), tensors
