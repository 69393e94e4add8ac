"""What a server answers, asked by an HTTP client: the texts of the stock model, and errors."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from parallel_plans.huggingface.server.asked import AskedChat, AskedCompletion
from parallel_plans.huggingface.server.rank import FirstRank
from tests.huggingface.server.tiny import LONGEST, STOP, Stock, serving, until, write_tiny
from tests.pool import Pool, on_ranks

pytest.importorskip("fastapi")


PROMPTS = ["hello", "A story: ", "x", "once upon a time, in a land far away, there was a ring"]
NUM_NEW = 14


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose answers end only by their lengths."""
    return write_tiny(tmp_path_factory.mktemp("endless"), ends=False)


def post(url: str, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/{path}", json=body, timeout=60)


def streamed(url: str, path: str, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream but the last one, which says that it is done."""
    with httpx.stream("POST", f"{url}/v1/{path}", json=body | {"stream": True}, timeout=60) as got:
        assert got.headers["content-type"].startswith("text/event-stream")
        lines = [x.removeprefix("data: ") for x in got.iter_lines() if x]
    assert lines.pop() == "[DONE]"
    return [json.loads(x) for x in lines]


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [c for x in events for c in x["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def ask_all(first: FirstRank) -> None:
    url, stock = first.url, Stock(first._options.model)
    expected = [stock.text(prompt, NUM_NEW) for prompt in PROMPTS]
    how = {"max_tokens": NUM_NEW, "temperature": 0}

    def both(prompt: str) -> tuple[str, str]:
        whole = post(url, "completions", prompt=prompt, **how).json()["choices"][0]
        pieces = streamed(url, "completions", prompt=prompt, **how)
        reasons = [c["finish_reason"] for x in pieces for c in x["choices"]]
        assert reasons == [None] * (len(pieces) - 1) + [whole["finish_reason"]]
        return whole["text"], text_of(pieces)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(both, PROMPTS)) == [(x, x) for x in expected]
    check_many_prompts(url, stock, expected)
    check_chat(url, stock)
    check_stops(url, expected[3])
    check_stop_of_config(url, stock)
    check_samples(url)


def check_many_prompts(url: str, stock: Stock, expected: list[str]) -> None:
    """Texts, or rows of tokens; the numbers of tokens are those of all."""
    rows = [stock.tokenizer(x)["input_ids"] for x in PROMPTS]
    for prompt in (PROMPTS, rows):
        answer = post(url, "completions", prompt=prompt, max_tokens=NUM_NEW).json()
        assert [x["text"] for x in answer["choices"]] == expected
        assert [x["index"] for x in answer["choices"]] == [0, 1, 2, 3]
        num_new = sum(len(stock.tokens(row, NUM_NEW)) for row in rows)
        num_old = sum(map(len, rows))
        total = {"total_tokens": num_old + num_new}
        assert answer["usage"] == {"prompt_tokens": num_old, "completion_tokens": num_new} | total
    first = post(url, "completions", prompt=rows[0]).json()["choices"][0]
    assert first["text"] == stock.text(PROMPTS[0], 16)


def check_chat(url: str, stock: Stock) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    rendered = "<system>be brief\n<user>hi\n<assistant>"
    expected = stock.text(rendered, NUM_NEW)
    answer = post(url, "chat/completions", messages=messages, max_completion_tokens=NUM_NEW).json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": expected}
    parts = [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]
    messages[0]["content"] = parts
    how = {"max_tokens": NUM_NEW, "stream_options": {"include_usage": True}}
    events = streamed(url, "chat/completions", messages=messages, model="tiny", **how)
    assert {x["object"] for x in events} == {"chat.completion.chunk"}
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == expected
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == answer["usage"]
    assert answer["usage"]["prompt_tokens"] == len(rendered)


def check_stops(url: str, text: str) -> None:
    """The text before the first of them, however it is cut into pieces."""
    stop = text[4:7]
    how = {"prompt": PROMPTS[3], "max_tokens": NUM_NEW, "temperature": 0, "stop": [stop, "none"]}
    answer = post(url, "completions", **how).json()
    assert answer["choices"][0]["text"] == text[: text.index(stop)]
    assert answer["choices"][0]["finish_reason"] == "stop"
    events = streamed(url, "completions", **how)
    assert text_of(events) == answer["choices"][0]["text"]


def check_stop_of_config(url: str, stock: Stock) -> None:
    """The text before it, which the stock model's has at its end."""
    answer = post(url, "completions", prompt="once", max_tokens=40, temperature=0).json()
    choice = answer["choices"][0]
    assert choice["text"] + STOP == stock.text("once", 40)
    assert choice["finish_reason"] == "stop"


def check_samples(url: str) -> None:
    """The samples of a prompt are those of their seeds, each alone."""
    how = {"prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "top_k": 50}
    three = post(url, "completions", n=3, seed=5, **how).json()["choices"]
    alone = [post(url, "completions", seed=5 + i, **how).json()["choices"][0] for i in range(3)]
    assert [x["text"] for x in three] == [x["text"] for x in alone]
    assert len({x["text"] for x in three}) > 1
    events = streamed(url, "completions", n=3, seed=5, **how)
    assert [text_of(events, i) for i in range(3)] == [x["text"] for x in three]


def test_texts_are_those_of_the_stock_model(pool: Pool, folder: str) -> None:
    pool.run(2, serving, folder, ask_all)


CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}
REFUSED: dict[str, tuple[str, dict[str, Any], int, str | None, str]] = {
    "too long": ("completions", TEXT | {"max_tokens": LONGEST}, 400, "prompt", "may have 512 tok"),
    "long chat": ("chat/completions", CHAT | {"max_tokens": 600}, 400, "messages", "have 512 tok"),
    "suffix": ("completions", TEXT | {"suffix": "x"}, 400, "suffix", "suffix is not supported"),
    "tools": ("chat/completions", CHAT | {"tools": [1]}, 400, "tools", "tools is not supported"),
    "logprobs": ("completions", TEXT | {"logprobs": 0}, 400, "logprobs", "is not supported"),
    "type": ("completions", TEXT | {"max_tokens": "4"}, 400, "max_tokens", "integer, got '4'"),
    "range": ("completions", TEXT | {"temperature": 3}, 400, "temperature", "less than or equal"),
    "no prompt": ("completions", {"max_tokens": 3}, 400, "prompt", "Field required"),
    "prompt": ("completions", {"prompt": [[1], "a"]}, 400, "prompt", "must be a text, a row of"),
    "empty": ("completions", {"prompt": ""}, 400, "prompt", "must be a text, a row of"),
    "cold": ("completions", TEXT | {"temperature": 1e-45}, 400, None, "no token can be drawn"),
    "token": ("completions", {"prompt": [7, 999]}, 400, None, "tokens must be from 0 to 256"),
    "greedy n": ("completions", TEXT | {"temperature": 0, "n": 2}, 400, "n", "one answer only"),
    "usage": ("completions", TEXT | {"stream_options": {}}, 400, "stream_options", "stream=true"),
    "image": (
        "chat/completions",
        {"messages": [{"role": "user", "content": "a", "tool_calls": []}]},
        400,
        "messages",
        "messages.0.tool_calls is not supported here",
    ),
    "model": ("completions", TEXT | {"model": "other"}, 404, "model", "no model 'other' here"),
    "route": ("embeddings", TEXT, 404, None, "/v1/embeddings: Not Found"),
}


def ask_wrongly(first: FirstRank) -> None:
    for name, (path, body, status, param, match) in REFUSED.items():
        answer = post(first.url, path, **body)
        assert answer.status_code == status, name
        error = answer.json()["error"]
        assert error["param"] == param, name
        assert match in error["message"], (name, error)
        assert error["type"] == "invalid_request_error"
    how = {"content": b'{"prompt"', "headers": {"content-type": "application/json"}}
    broken = httpx.post(f"{first.url}/v1/completions", timeout=60, **how)
    assert broken.status_code == 400
    assert "the body is no JSON" in broken.json()["error"]["message"]
    nothing = {"logprobs": False, "presence_penalty": 0.0, "user": "me", "echo": None}
    assert post(first.url, "completions", prompt="hi", max_tokens=2, **nothing).status_code == 200
    models = httpx.get(f"{first.url}/v1/models").json()["data"]
    assert [(x["id"], x["max_model_len"]) for x in models] == [("tiny", LONGEST)]


def test_refused(pool: Pool, folder: str) -> None:
    pool.run(2, serving, folder, ask_wrongly)


def metric(first: FirstRank, name: str) -> float:
    lines = httpx.get(f"{first.url}/metrics").text.splitlines()
    return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith(name))


def leave_early(first: FirstRank) -> None:
    """Clients that go away give their blocks back, and others beyond the limit are told so."""
    url = f"{first.url}/v1/completions"
    long = {"prompt": "hi", "max_tokens": 400, "seed": 3, "temperature": 2, "n": 2}
    with httpx.stream("POST", url, json=long | {"stream": True}, timeout=60) as stream:
        lines = stream.iter_lines()  # which ends the stream when it goes
        next(lines)
        with httpx.Client(timeout=60) as client, pytest.raises(httpx.ReadTimeout):
            client.post(url, json=long, timeout=0.3)
        until(lambda: metric(first, "dtensor_ring_open_answers ") == 2)
        full = httpx.post(url, json=long | {"n": 3}, timeout=60)
        assert full.status_code == 429
        assert full.headers["retry-after"] == "1"
        assert full.json()["error"]["message"].startswith("2 answers are open, 4 may be")
    until(lambda: metric(first, "dtensor_ring_open_answers ") == 0)
    until(lambda: not first.batch.has_requests())
    assert first.batch.counts.steps < 300, "each would take 400"
    assert not any(first.batch.pool.usage().held)
    assert metric(first, 'dtensor_ring_requests_total{endpoint="completions",outcome="canc') == 2
    assert post(first.url, "completions", prompt="hi", max_tokens=2).status_code == 200
    assert httpx.get(f"{first.url}/health").json() == {"status": "ok"}
    first.stop()
    until(lambda: not _is_healthy(first))


def _is_healthy(first: FirstRank) -> bool:
    try:
        return httpx.get(f"{first.url}/health").status_code == 200
    except httpx.TransportError:
        return False


@on_ranks(2)
def test_clients_that_leave(endless: str) -> None:
    serving(endless, leave_early, max_open=4)


def stop_meanwhile(first: FirstRank) -> None:
    """What is open is finished, and nothing new is taken."""
    expected = Stock(first._options.model).text("x", 60)
    url = f"{first.url}/v1/completions"
    asked = {"prompt": "x", "max_tokens": 60, "temperature": 0, "stream": True}
    with httpx.stream("POST", url, json=asked, timeout=60) as stream:
        lines = stream.iter_lines()
        first_line = next(lines)
        first.stop()
        until(lambda: not _is_healthy(first))
        late = [first_line, *lines]
    events = [json.loads(x.removeprefix("data: ")) for x in late if "{" in x]
    assert text_of(events) == expected


def test_stops_when_open_requests_have_ended(pool: Pool, endless: str) -> None:
    pool.run(2, serving, endless, stop_meanwhile)


pytest.importorskip("fastapi")


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


def test_halves_of_characters() -> None:
    """JSON may have them, and no tokenizer takes them."""
    half = "a\ud800"
    for kind, given in (
        (AskedCompletion, {"prompt": half}),
        (AskedCompletion, {"prompt": "a", "stop": [half]}),
        (AskedChat, {"messages": [{"role": "user", "content": half}]}),
        (AskedChat, {"messages": [{"role": "user", "content": [{"type": "text", "text": half}]}]}),
    ):
        with pytest.raises(ValueError, match="must be a text"):
            kind.model_validate(given)
