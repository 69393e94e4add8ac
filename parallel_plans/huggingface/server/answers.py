"""The answers of OpenAI's interface: how they are written, and their text as its tokens come."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass
class AnswerChoice:
    """One answer so far.

    Attributes:
        text: its text.
        reason: why it ended: stop or length; `None` before.
        num_tokens: the number of its tokens.
    """

    text: str = ""
    reason: str | None = None
    num_tokens: int = 0


@dataclass(frozen=True)
class AnswerForm:
    """How an answer to one request is written.

    Attributes:
        request_id: the id of the request.
        model: the name of the model.
        created: when it came, in seconds since 1970.
        is_chat: whether it is a chat.
        num_prompt_tokens: the number of tokens of its prompts.
    """

    request_id: str
    model: str
    created: int
    is_chat: bool
    num_prompt_tokens: int

    DONE = "data: [DONE]\n\n"
    """The last event of a stream."""

    def whole(self, choices: list[AnswerChoice]) -> dict[str, Any]:
        """Return a whole answer."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        listed = []
        for index, choice in enumerate(choices):
            said: dict[str, Any] = {"text": choice.text}
            if self.is_chat:
                said = {"message": {"role": "assistant", "content": choice.text}}
            rest = {"logprobs": None, "finish_reason": choice.reason}
            listed.append({"index": index} | said | rest)
        return self._frame(kind, listed) | {"usage": self.usage(choices)}

    def first(self, index: int) -> str | None:
        """Return the piece that comes before any text, if there is one."""
        if not self.is_chat:
            return None
        return self._piece(index, {"delta": {"role": "assistant", "content": ""}}, None)

    def piece(self, index: int, text: str, reason: str | None) -> str:
        """Return a piece of an answer, as an event of a stream."""
        if not self.is_chat:
            return self._piece(index, {"text": text}, reason)
        return self._piece(index, {"delta": {"content": text} if text else {}}, reason)

    def last(self, choices: list[AnswerChoice]) -> str:
        """Return the piece with the numbers of tokens."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return event(self._frame(kind, []) | {"usage": self.usage(choices)})

    def usage(self, choices: list[AnswerChoice]) -> dict[str, int]:
        """Return the numbers of tokens."""
        num_new = sum(x.num_tokens for x in choices)
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": num_new,
            "total_tokens": self.num_prompt_tokens + num_new,
        }

    def _piece(self, index: int, said: dict[str, Any], reason: str | None) -> str:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        choice = {"index": index} | said | {"logprobs": None, "finish_reason": reason}
        return event(self._frame(kind, [choice]))

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def event(data: dict[str, Any]) -> str:
    """Return an event of a stream."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


# Tokens of the prompt that are decoded with the first ones of the answer: some tokenizers drop a
# space at the beginning of what they decode.
CONTEXT = 5
# What tokenizers give for bytes that are not a whole character.
UNFINISHED = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[list[int]], str]


class StreamText:
    r"""The text of one answer, piece by piece.

    A piece is given out when later tokens cannot change it: whole characters only, and no part of
    a stop string. The pieces together are the text before the first stop string.

        text = StreamText(tokenizer.decode, prompt, stops=["\n\n"])
        for token in tokens:
            print(text.push([token]), end="")
        print(text.end())

    Args:
        decode: turns tokens into text.
        prompt: the tokens before the answer.
        stops: the strings that end the answer, none of them empty.

    Attributes:
        num_tokens: the number of tokens of the answer so far, with those of the stop string.
        is_stopped: whether a stop string was found. Nothing comes after it.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int], stops: Iterable[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._ids = list(prompt[-CONTEXT:])
        self._before = decode(self._ids)
        self._num_before = len(self._ids)
        self._held = ""
        self.num_tokens, self.is_stopped = 0, False

    def push(self, tokens: Iterable[int]) -> str:
        """Return the text that the next tokens complete."""
        return "".join([self._pushed(token) for token in tokens])

    def end(self) -> str:
        """Return the rest of the text: there are no more tokens."""
        if self.is_stopped:
            return ""
        return self._released(self._decode(self._ids)[len(self._before) :]) + self._rest()

    def _pushed(self, token: int) -> str:
        if self.is_stopped:
            return ""
        self.num_tokens += 1
        self._ids.append(token)
        text = self._decode(self._ids)
        # Bytes of a character may be in several tokens; a token may also shorten the text before.
        if len(text) <= len(self._before) or text.endswith(UNFINISHED):
            return ""
        found = text[len(self._before) :]
        # The tokens of this piece are the context of the next one.
        del self._ids[: self._num_before]
        self._before, self._num_before = self._decode(self._ids), len(self._ids)
        return self._released(found)

    def _released(self, text: str) -> str:
        """Add text; return what is before a stop string, and cannot be the beginning of one."""
        held = self._held + text
        found = [where for stop in self._stops if (where := held.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return held[: min(found)]
        # An end of the text that begins a stop string is held until more text decides.
        num_free = len(held) - max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[num_free:]
        return held[:num_free]

    def _rest(self) -> str:
        found, self._held = self._held, ""
        return found


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text begin a stop string.

    >>> _overlap("one <en", "<end>")
    3
    """
    sizes = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
