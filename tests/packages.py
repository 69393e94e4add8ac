"""Stand-ins for the packages and operators of GPU kernels, with their signatures and conventions.

They compute in float64 on the CPU. A call with wrong names, positions, shapes or dtypes fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
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


def function(signature: str, run: Run) -> Callable[..., Any]:
    """A function of that signature."""
    bind = eval(f"lambda {signature}: locals()")
    return lambda *args, **kwargs: run(bind(*args, **kwargs))


def operator(schema: Any, run: Run, names: dict[str, str]) -> Callable[..., Any]:
    """What to register for an operator: defaults are filled in, and some names replaced."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = {x.name: x.default_value for x in schema.arguments}
        given |= dict(zip(given, args, strict=False)) | kwargs
        return run({names.get(name, name): value for name, value in given.items()})

    return kernel


VARLEN = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
WINDOW = "window_size_left, window_size_right"

FLASH_ATTN = {
    "_flash_attn_forward": function(
        f"q, k, v, dropout_p, softmax_scale, causal, {WINDOW}, softcap, alibi_slopes, "
        "return_softmax",
        forward(flash2_scores, (0.0, torch.inf), 2),
    ),
    "_flash_attn_varlen_forward": function(
        f"q, k, v, {VARLEN}, dropout_p, softmax_scale, causal, window_size_left=-1, "
        "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, "
        "block_table=None, leftpad_k=None, seqused_k=None",
        forward(flash2_scores, (0.0, torch.inf), 2),
    ),
    "flash_attn_with_kvcache": function(
        "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, "
        "softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, "
        "rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False",
        kvcache,
    ),
    "_flash_attn_backward": function(
        "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, "
        f"{WINDOW}, softcap, alibi_slopes, deterministic, rng_state=None",
        backward(flash2_scores, "d"),
    ),
    "_flash_attn_varlen_backward": function(
        f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {VARLEN}, dropout_p, softmax_scale, "
        f"causal, {WINDOW}, softcap, alibi_slopes, deterministic, rng_state=None",
        backward(flash2_scores, "d"),
    ),
}
"""`flash_attn.flash_attn_interface` of flash-attn 2.7."""

FLASH_ATTN_CUTE = {
    "_flash_attn_fwd": function(
        "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, "
        "softmax_scale=None, causal=False, softcap=None, window_size_left=None, "
        "window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, "
        "intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, "
        "score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, "
        "lse=None, aux_tensors=None, aux_scalars=None",
        # Rows without keys are 0 times values that nobody vouches for.
        forward(flash4_scores, (torch.nan, -torch.inf), 3),
    ),
    "_flash_attn_bwd": function(
        "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, "
        "window_size_left=None, window_size_right=None, m_block_size=64, n_block_size=128, "
        "num_threads=256, pack_gqa=False, num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, "
        "dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, "
        "V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
        "max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, "
        "score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, "
        "block_sparse_tensors=None, dlse=None, learnable_sink=None",
        backward(flash4_scores, "dq dk dv"),
    ),
}
"""`flash_attn.cute.interface` of flash-attn-4 4.0.0b28."""

FLASH_ATTN_3 = {
    "fwd": (
        "(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, "
        "Tensor? q_v=None, Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, "
        "Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, Tensor? seqused_q=None, "
        "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
        "Tensor? page_table=None, Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, "
        "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? seqlens_rotary=None, "
        "Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
        "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
        "int window_size_right=-1, int attention_chunk=0, float softcap=0.0, "
        "bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, int num_splits=0, "
        "bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)",
        forward(flash3_scores, (0.0, -torch.inf), 2),
    ),
    "bwd": (
        "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        "Tensor(dq!)? dq=None, Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, "
        "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? seqused_q=None, "
        "Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
        "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, "
        "int window_size_right=-1, float softcap=0.0, bool deterministic=False, "
        "int sm_margin=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        backward(flash3_scores, "d d d d d"),
    ),
}
"""The operators that `flash_attn_interface` registers."""


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


ATEN_NAMES = {"query": "q", "key": "k", "value": "v", "grad_out": "dout", "logsumexp": "lse"}


def aten_operators() -> dict[str, tuple[Run, dict[str, str]]]:
    """By name, and what we call their arguments."""
    cudnn = CudnnOps()
    return {
        "_flash_attention_forward": (paged_aten, ATEN_NAMES),
        "_flash_attention_backward": (backward(flash2_scores, "dq dk dv"), ATEN_NAMES),
        "_scaled_dot_product_cudnn_attention": (cudnn.forward, {}),
        "_scaled_dot_product_cudnn_attention_backward": (cudnn.backward, {}),
    }


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All of them, as long as a test runs."""
    for package in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for module, functions in {
        "flash_attn.flash_attn_interface": FLASH_ATTN,
        "flash_attn.cute.interface": FLASH_ATTN_CUTE,
        "flash_attn_interface": {},
    }.items():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        for name, run in functions.items():
            monkeypatch.setattr(sys.modules[module], name, run, raising=False)
    flash3, aten = (
        torch.library.Library("flash_attn_3", "DEF"),
        torch.library.Library("aten", "IMPL"),
    )
    for name, (schema, run) in FLASH_ATTN_3.items():
        flash3.define(f"{name}{schema}")
        op = getattr(torch.ops.flash_attn_3, name).default
        flash3.impl(name, operator(op._schema, run, {}), "CPU")
    for name, (run, names) in aten_operators().items():
        op = getattr(torch.ops.aten, name).default
        aten.impl(name, operator(op._schema, run, names), "CPU")
    yield
    flash3._destroy()
    aten._destroy()
