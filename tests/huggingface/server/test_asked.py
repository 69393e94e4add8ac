"""What parameters of a request become options of `generate`."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("fastapi")

from parallel_plans.huggingface.server.asked import AskedChat, AskedCompletion

NEW = {"max_new_tokens": 9}
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, NEW),
    ({"temperature": 0}, NEW | {"do_sample": False}),
    ({"temperature": 0.0, "top_p": 0.5}, NEW | {"do_sample": False}),
    ({"temperature": 0.7}, NEW | {"do_sample": True, "temperature": 0.7}),
    ({"top_p": 0.5, "top_k": 4}, NEW | {"do_sample": True, "top_p": 0.5, "top_k": 4}),
    ({"min_p": 0.1}, NEW | {"do_sample": True, "min_p": 0.1}),
    ({"n": 3}, NEW | {"do_sample": True, "num_return_sequences": 3}),
    ({"repetition_penalty": 1.5}, NEW | {"repetition_penalty": 1.5}),
    ({"temperature": None, "n": 1, "stop": "a"}, NEW),
    ({"frequency_penalty": 0.0, "logit_bias": {}, "best_of": 1, "logprobs": False}, NEW),
]


def test_options() -> None:
    for given, expected in OPTIONS:
        asked = AskedCompletion.model_validate({"prompt": "a"} | given)
        assert asked.options(9) == expected, given


def test_numbers_of_tokens() -> None:
    """A chat goes on as long as there is room, a text for 16 tokens."""
    messages = [{"role": "user", "content": "a"}]
    assert AskedCompletion.model_validate({"prompt": "a"}).num_asked == 16
    assert AskedChat.model_validate({"messages": messages}).num_asked is None
    both = {"messages": messages, "max_tokens": 3, "max_completion_tokens": 4}
    assert AskedChat.model_validate(both).num_asked == 4


def test_prompts() -> None:
    rows = [[1], [2]]
    for given, expected in (
        ("ab", ["ab"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        (rows, rows),
    ):
        assert AskedCompletion.model_validate({"prompt": given}).prompts == expected
    with pytest.raises(ValueError, match="must be a text"):  # half of a character
        AskedCompletion.model_validate({"prompt": "a\ud800"})
