"""Parts of a server: what ranks are told, and texts of answers piece by piece."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from parallel_plans.huggingface.server.answers import StreamText
from parallel_plans.huggingface.server.engine import (
    FRAME,
    AskedTokens,
    StepCommands,
    broadcast_bytes,
)
from tests.huggingface.server.tiny import byte_tokenizer
from tests.pool import on_ranks


@on_ranks(3)
def test_bytes_of_any_size() -> None:
    """Those that fit the first message, just or not at all, and empty ones."""
    group = dist.new_group(backend="gloo")
    for size in (0, 1, FRAME - 9, FRAME - 8, FRAME - 7, 3 * FRAME):
        sent = bytes(i % 251 for i in range(size))
        assert broadcast_bytes(group, b"" if group.rank() else sent) == sent


@pytest.mark.parametrize(
    "commands",
    [
        StepCommands(),
        StepCommands(is_end=True),
        StepCommands(
            [AskedTokens("a", [1, 2], {"temperature": 0.1 + 0.2, "do_sample": True}, 2**61)], ["b"]
        ),
    ],
)
def test_commands_are_read_as_they_were_sent(commands: StepCommands) -> None:
    assert StepCommands.of(commands.to_bytes()) == commands


TOKENIZER = byte_tokenizer()
LETTERS = st.text("abé中🙂", max_size=12)
STOPS = st.lists(st.text("abé中", min_size=1, max_size=4), max_size=3)


def decode(tokens: list[int]) -> str:
    return TOKENIZER.decode(tokens, skip_special_tokens=True)


def tokens_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def pieces_of(stream: StreamText, tokens: list[int], at_once: int = 1) -> list[str]:
    cut = [tokens[i : i + at_once] for i in range(0, len(tokens), at_once)]
    return [*(stream.push(part) for part in cut), stream.end()]


def ended(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [text[:end].index(stop) for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: min(found)]
    return text


@given(LETTERS, LETTERS, STOPS, st.integers(1, 4))
def test_any_text(prompt: str, text: str, stops: list[str], at_once: int) -> None:
    """A token is a byte, so most characters take several."""
    stream = StreamText(decode, tokens_of(prompt), stops)
    pieces = pieces_of(stream, tokens_of(text), at_once)
    assert "".join(pieces) == ended(text, stops)
    assert stream.is_stopped == (ended(text, stops) != text)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


@given(st.lists(st.integers(0, 256), max_size=20))
def test_any_bytes(tokens: list[int]) -> None:
    """What is no text is given as the tokenizer gives it, as soon as it is sure."""
    assert "".join(pieces_of(StreamText(decode, []), tokens)) == decode(tokens)


def test_tokens_of_the_stop_string_count() -> None:
    stream = StreamText(decode, [], ["stop"])
    assert stream.push(tokens_of("do st")) == "do "
    assert stream.push(tokens_of("op it")) == ""
    assert (stream.num_tokens, stream.is_stopped) == (7, True)
    assert (stream.push(tokens_of("more")), stream.end(), stream.num_tokens) == ("", "", 7)


@pytest.mark.parametrize(("text", "held"), [("one <e", "one "), ("one <x", "one <x")])
def test_the_beginning_of_a_stop_string_waits(text: str, held: str) -> None:
    stream = StreamText(decode, [], ["<end>"])
    assert stream.push(tokens_of(text)) == held
    assert stream.end() == text.removeprefix(held)


def test_a_space_that_tokenizers_drop_is_kept() -> None:
    """As those of Llama do, at the beginning of what they decode."""
    words = [" once", " upon", " a", " time"]

    def decode_words(tokens: list[int]) -> str:
        return "".join(words[x] for x in tokens).removeprefix(" ")

    assert pieces_of(StreamText(decode_words, [0, 1]), [2, 3]) == [" a", " time", ""]
