"""Names of the cache, in forwards that follow one version of transformers or another."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from transformers import LlamaModel

from parallel_plans.huggingface.core.versions import cache_name, parameter_of_cache, with_cache


class Newer:
    def forward(self, input_ids: Any, cache: Any = None) -> None: ...


class Older:
    def forward(self, input_ids: Any, past_key_values: Any = None, **kwargs: Any) -> None: ...


class Mamba:
    def forward(self, input_ids: Any, cache_params: Any = None) -> None: ...


class Without:
    def forward(self, input_ids: Any, **kwargs: Any) -> None: ...


NAMES = {Newer: "cache", Older: "past_key_values", Mamba: "cache_params"}


def test_a_cache_gets_the_name_that_the_forward_has() -> None:
    for kind, given in product(NAMES, NAMES.values()):
        found = with_cache(kind(), dict.fromkeys(NAMES.values()) | {"input_ids": 1, given: 2})
        assert found == {"input_ids": 1, NAMES[kind]: 2}


def test_a_forward_that_names_none_hands_on_its_parts_name() -> None:
    assert parameter_of_cache(Without.forward) is None
    assert cache_name(Without()) == parameter_of_cache(LlamaModel.forward)


def test_no_cache_and_two() -> None:
    assert with_cache(Newer(), {"input_ids": 1, "cache": None}) == {"input_ids": 1}
    with pytest.raises(ValueError, match="cache and cache_params are names of one argument"):
        with_cache(Newer(), {"cache": 1, "cache_params": 2})
