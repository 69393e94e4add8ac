"""The census says what is so: a sample of the types of models, and one that is made wrong."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import pytest
import transformers

from parallel_plans.huggingface.core.attention_function import attention
from tests.census import PAGE, Verdict, page, rows_of, verdict
from tests.model_types import KINDS, types_of
from tests.pool import Pool

SAMPLE = {
    "gemma4_text, shared keys and values": "causal",
    "granitemoehybrid, attention only": "causal",
    "glm4_moe": "causal",
    "dots3_note": "causal",
    "bert": "masked",
    "qwen2_5_vl": "image-text",
    "gemma4": "image-text",
    "gemma4_unified": "image-text",
    "qwen3_vl": "image-text",  # the small one has no features for early layers
    "unlimited_ocr": "image-text",
    "hy_v4_vl": "image-text",
    "minimax_m3_vl": "image-text",
}
"""All of them are tried by `make census`."""
WITH_IMAGES = ("qwen3_vl", "qwen2_5_vl", "gemma4", "hy_v4_vl", "minimax_m3_vl")


@pytest.mark.parametrize("name", SAMPLE)
def test_sample(pool: Pool, name: str) -> None:
    verdicts = pool.run(2, verdict, SAMPLE[name], name)
    assert {x.what for x in verdicts} == {"equal"}, verdicts
    assert all((name in WITH_IMAGES) == ("with images" in x.why) for x in verdicts), verdicts


def scaled(*args: Any, scaling: float, **kwargs: Any) -> Any:
    return attention(*args, scaling=1.01 * scaling, **kwargs)


def verdict_of_broken(kind: str, name: str, how: str) -> Verdict:
    if how == "wrong":
        broken: Any = scaled
    else:
        broken = mock.Mock(side_effect=RuntimeError("a raw error"))
    with mock.patch("parallel_plans.huggingface.plan.attention", broken):
        return verdict(kind, name)


def test_it_can_say_wrong(pool: Pool) -> None:
    for found in pool.run(2, verdict_of_broken, "causal", "llama", "wrong"):
        assert found.what == "wrong"
        assert re.match("plain: .* differs by", found.why)
    for found in pool.run(2, verdict_of_broken, "causal", "llama", "error"):
        assert found == Verdict("error", "plain: RuntimeError: a raw error")


def test_refusals_and_models_that_are_not_built(pool: Pool) -> None:
    found = pool.run(2, verdict, "causal", "rwkv")[0]
    assert found.what == "refused"
    assert "carry a state" in found.why
    assert pool.run(2, verdict, "causal", "dbrx")[0].what == "not built"


def test_the_page_lists_every_type() -> None:
    text = PAGE.read_text()
    if f"transformers {transformers.__version__}," not in text:
        pytest.skip("the page is of the transformers in constraints.txt")
    rows = rows_of(text)
    assert page(rows) == text
    for kind in KINDS:
        assert list(rows[kind]) == types_of(kind)
        assert not {"wrong", "error"} & {what for what, _ in rows[kind].values()}
