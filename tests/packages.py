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

from dtensor_ring.compute.kernels import registry as kernels_of_the_hub
from tests import flex_package, hub, sdpa_package
from tests.package_calls import (
    CudnnOps,
    Run,
    backward,
    flash2_scores,
    flash3_scores,
    flash4_scores,
    forward,
    kvcache,
    paged_aten,
)


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

HUB_FLASH_ATTN = {
    "_flash_attn_varlen_forward": function(hub.VARLEN, forward(flash2_scores, (0.0, torch.inf), 2))
}
"""What differs in the build of the Hub."""

CUTE_FORWARD = (
    "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, "
    "softmax_scale=None, causal=False, softcap=None, window_size_left=None, "
    "window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, "
    "intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, "
    "score_mod=None, mask_mod=None, block_sparse_tensors=None, return_lse=False, out=None, "
    "lse=None, aux_tensors=None, aux_scalars=None"
)
"""Parameters of `flash_attn.cute.interface._flash_attn_fwd`; newer betas have more after them."""

CUTE_BACKWARD = (
    "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, "
    "window_size_left=None, window_size_right=None, m_block_size=64, n_block_size=128, "
    "num_threads=256, pack_gqa=False, num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, "
    "dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, "
    "V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, "
    "max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, "
    "score_mod=None, score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, "
    "block_sparse_tensors=None, dlse=None, learnable_sink=None"
)
"""Parameters of `flash_attn.cute.interface._flash_attn_bwd`."""

FLASH_ATTN_CUTE = {
    "_flash_attn_fwd": function(
        CUTE_FORWARD,
        # Rows without keys are 0 times values that nobody vouches for.
        forward(flash4_scores, (torch.nan, -torch.inf), 3),
    ),
    "_flash_attn_bwd": function(CUTE_BACKWARD, backward(flash4_scores, "dq dk dv")),
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
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[hub.Hub]:
    """All of them, as long as a test runs; what it gives counts downloads."""
    of_cudnn = {*flex_package.PACKAGES, *sdpa_package.PACKAGES}
    for package in ("flash_attn", "flash_attn.cute", *of_cudnn):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    for module, functions in {
        "flash_attn.flash_attn_interface": FLASH_ATTN,
        "flash_attn.cute.interface": FLASH_ATTN_CUTE,
        "flash_attn_interface": {},
        sdpa_package.OPS: {"thd_lse_to_padded": function(sdpa_package.PADDED, sdpa_package.padded)},
        **{
            module: {name: function(*of) for name, of in functions.items()}
            for module, functions in flex_package.FUNCTIONS.items()
        },
    }.items():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        for name, run in functions.items():
            monkeypatch.setattr(sys.modules[module], name, run, raising=False)
    flash3, aten = (
        torch.library.Library("flash_attn_3", "DEF"),
        torch.library.Library("aten", "IMPL"),
    )
    implementations = {}
    for name, (schema, run) in FLASH_ATTN_3.items():
        flash3.define(f"{name}{schema}")
        op = getattr(torch.ops.flash_attn_3, name).default
        implementations[name] = operator(op._schema, run, {})
        flash3.impl(name, implementations[name], "CPU")
    for name, (run, names) in aten_operators().items():
        op = getattr(torch.ops.aten, name).default
        aten.impl(name, operator(op._schema, run, names), "CPU")
    cudnn = torch.library.Library("cudnn", "FRAGMENT")
    for name, schema in sdpa_package.SCHEMAS.items():
        cudnn.define(f"{name}{schema}")
        op = getattr(torch.ops.cudnn, name).default
        cudnn.impl(name, operator(op._schema, sdpa_package.RUNS[name], {}), "CPU")
    schemas = {name: (schema, implementations[name]) for name, (schema, _) in FLASH_ATTN_3.items()}
    with hub.builds(FLASH_ATTN | HUB_FLASH_ATTN, schemas) as builds:
        there = hub.Hub(builds)
        monkeypatch.setitem(sys.modules, "kernels", hub.package(there))
        kernels_of_the_hub._loaded.cache_clear()
        yield there
        kernels_of_the_hub._loaded.cache_clear()
    for library in (flash3, aten, cudnn):
        library._destroy()
