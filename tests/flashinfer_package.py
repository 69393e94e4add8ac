"""Stand-ins for flashinfer-python 0.7.4: attention to keys in blocks, planned on the host."""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.pages import run_pages
from tests.sequences import Scores

INIT = (
    "self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
    "paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, "
    "custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None, "
    "jit_kwargs=None, variant_owns_mask=False, max_total_num_rows=None"
)
PLAN = (
    "self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, "
    "num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, "
    "packed_custom_mask=None, causal=False, pos_encoding_mode='NONE', "
    "use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None, "
    "rope_scale=None, rope_theta=None, q_data_type='float16', kv_data_type=None, "
    "o_data_type=None, non_blocking=True, prefix_len_ptr=None, token_pos_in_items_ptr=None, "
    "token_pos_in_items_len=0, max_item_len_ptr=None, seq_lens=None, seq_lens_q=None, "
    "block_tables=None, max_token_per_sequence=None, max_sequence_kv=None, "
    "fixed_split_size=None, disable_split_kv=False, uniform_q_len=None, use_token_head_sf=False"
)
RUN = (
    "self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, "
    "lse=None, return_lse=False, lse_base='log2', lse_layout='NH', enable_pdl=None, "
    "window_left=None, sinks=None, kv_cache_sf=None, skip_softmax_threshold_scale_factor=None, "
    "use_fp16_softmax=None, uses_spcompress=None"
)
SIGNATURES = {"__init__": INIT, "plan": PLAN, "run": RUN}
"""Of `BatchPrefillWithPagedKVCacheWrapper`."""

Given = dict[str, Any]


def bound(name: str) -> Any:
    return eval(f"lambda {SIGNATURES[name]}: locals()")


def method(name: str, run: Any) -> Any:
    """A method of that signature."""
    return eval(f"lambda {SIGNATURES[name]}: run(self, locals())", {"run": run})


class Wrapper:
    """Computes in float64; whatever it has no plan for fails.

    Attributes:
        made: how many there are, and how many plans they made.
    """

    made: ClassVar[list[int]] = [0, 0]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = bound("__init__")(self, *args, **kwargs)
        assert (given["kv_layout"], given["backend"]) == ("NHD", "fa2")
        assert given["float_workspace_buffer"].dtype == torch.uint8
        self.device = given["float_workspace_buffer"].device
        self.made[0] += 1

    def planned(self, given: Given) -> None:
        self.given = given
        names = "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"
        rows, blocks, read, last = (given[name] for name in names)
        assert all(x.dtype == torch.int32 for x in (rows, blocks, read, last))
        assert not rows.is_cuda, "it would wait for the GPU"
        assert len(rows) == len(blocks) == 1 + len(last)
        assert blocks[-1] == len(read)
        assert bool(((last >= 1) & (last <= given["page_size"])).all())
        assert not given["causal"]
        assert given["head_dim_qk"] in (64, 128, 256)
        self.made[1] += 1

    def ran(self, given: Given) -> tuple[Tensor, Tensor]:
        planned = self.given
        query, (keys, values) = given["q"], given["paged_kv_cache"]
        assert given["return_lse"]
        assert query.is_contiguous()
        assert query.shape[1:] == (planned["num_qo_heads"], planned["head_dim_qk"])
        assert len(query) == planned["qo_indptr"][-1]
        assert (query.dtype, keys.dtype) == (planned["q_data_type"], planned["kv_data_type"])
        blocks, block = planned["paged_kv_indptr"].tolist(), planned["page_size"]
        counts = planned["paged_kv_indptr"].diff()
        tables = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for row, (first, count) in enumerate(zip(blocks, counts.tolist(), strict=False)):
            tables[row, :count] = planned["paged_kv_indices"][first : first + count]
        lengths = (counts - 1) * block + planned["paged_kv_last_page_len"]
        of_pages = {"q": query, "k": keys, "v": values, "page_table": tables}
        of_pages |= {"seqused_k": lengths.int(), "cu_seqlens_q": planned["qo_indptr"]}
        of_pages["max_seqlen_q"] = int(planned["qo_indptr"].diff().max())
        scores = Scores(planned["sm_scale"], planned["logits_soft_cap"])
        out, lse = run_pages(of_pages, scores, 1)
        return out, lse.T.contiguous() / math.log(2)


Wrapper.plan = method("plan", Wrapper.planned)  # type: ignore[attr-defined]
Wrapper.run = method("run", Wrapper.ran)  # type: ignore[attr-defined]


def package() -> ModuleType:
    found = ModuleType("flashinfer")
    found.BatchPrefillWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    return found
