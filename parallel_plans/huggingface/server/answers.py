"""The answers of OpenAI's interface: whole, and in pieces."""

from __future__ import annotations

import json
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


DONE = "data: [DONE]\n\n"
