"""The policy of transfers as the text that an op takes."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from dtensor_ring import TransferPolicy

POLICIES = {
    "the default": {},
    "narrow": {"kv_dtype": torch.bfloat16, "grad_dtype": torch.float16},
    "eight bits": {"kv_dtype": "int8", "num_parts": 3, "transport": "symmetric"},
    "fixed": {"order": "fixed", "block": 64},
}


def test_every_field_is_in_a_case() -> None:
    given = {name for fields_of in POLICIES.values() for name in fields_of}
    assert given == {x.name for x in fields(TransferPolicy) if x.init}


@pytest.mark.parametrize("given", POLICIES.values(), ids=list(POLICIES))
def test_a_policy_comes_back_from_its_text(given: dict[str, object]) -> None:
    policy = TransferPolicy(**given)  # type: ignore[arg-type]
    assert TransferPolicy.of_spec(policy.spec) == policy
    assert (policy.spec == "") == (not given), "an op takes no text for the default"
    assert len(policy.spec.split()) == len(given)
