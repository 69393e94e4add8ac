"""What clients may ask for: the bodies of OpenAI's requests, as far as they are supported."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from parallel_plans.huggingface.server.open_requests import HttpError


def _is(given: Any, value: Any) -> bool:
    """Return whether a value is given; 0 is not False."""
    return given == value and isinstance(given, bool) == isinstance(value, bool)


# Half of a character, which JSON may have, and no tokenizer takes.
HALF = re.compile("[\ud800-\udfff]")


def _is_text(given: Any) -> bool:
    return isinstance(given, str) and given != "" and not HALF.search(given)


def _is_token(given: Any) -> bool:
    return type(given) is int


def _is_row(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(map(_is_token, given))


class Strict(BaseModel):
    """A part of a request: each field has its type, and there are no others."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    """Options of a stream: whether its last piece has the numbers of tokens."""

    include_usage: bool = False


def _whole(given: str) -> str:
    if HALF.search(given):
        raise ValueError("must be a text of whole characters, got half of a surrogate pair")
    return given


AnyText = Annotated[str, AfterValidator(_whole)]
Text = Annotated[AnyText, Field(min_length=1)]


class TextPart(Strict):
    """A text within a message."""

    type: Literal["text"]
    text: AnyText


class Message(Strict):
    """A message of a chat."""

    role: Text
    content: AnyText | list[TextPart]
    name: AnyText | None = None

    def to_template(self) -> dict[str, str]:
        """Return it as chat templates take it."""
        content = self.content
        if not isinstance(content, str):
            content = "".join(part.text for part in content)
        given = {"role": self.role, "content": content}
        return given if self.name is None else given | {"name": self.name}


# What OpenAI's clients may send though it asks for nothing.
ASKS_NOTHING = (
    ("best_of", 1),
    ("echo", False),
    ("frequency_penalty", 0),
    ("logit_bias", {}),
    ("logprobs", False),
    ("presence_penalty", 0),
    ("tools", []),
)


class AskedText(Strict):
    """What both kinds of requests have: how many tokens, how they are chosen, and how they come.

    `None` is as in the generation config of the model.
    """

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0)
    n: int = Field(1, ge=1, le=128)
    seed: int | None = Field(None, ge=0, lt=2**62)
    stop: Text | Annotated[list[Text], Field(max_length=16)] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def leave_out(cls, given: Any) -> Any:
        """Leave out what asks for nothing."""
        if not isinstance(given, dict):
            return given
        nothing = [name for name, value in ASKS_NOTHING if _is(given.get(name), value)]
        return {k: v for k, v in given.items() if v is not None and k not in nothing}

    @property
    def stops(self) -> list[str]:
        """Return the strings that end an answer."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def has_usage(self) -> bool:
        """Return whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def options(self, num_tokens: int) -> dict[str, Any]:
        """Return the options of `generate` for so many new tokens.

        Raises:
            HttpError: if they contradict one another.
        """
        asked = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        asked = {name: value for name, value in asked.items() if value is not None}
        generation: dict[str, Any] = {"max_new_tokens": num_tokens}
        if self.repetition_penalty is not None:
            generation["repetition_penalty"] = self.repetition_penalty
        # So OpenAI's clients ask for greedy decoding; `generate` refuses a temperature of 0.
        if self.temperature == 0:
            if self.n > 1:
                message = "n: temperature=0 has one answer only, leave one of them out"
                raise HttpError(400, f"{message}, got n={self.n}", "n")
            return generation | {"do_sample": False}
        if asked or self.n > 1:
            generation |= {"do_sample": True, **asked}
        return generation | ({"num_return_sequences": self.n} if self.n > 1 else {})

    def check_stream(self) -> None:
        """Check what is asked of a stream.

        Raises:
            HttpError: if there is no stream.
        """
        if self.stream_options is not None and not self.stream:
            raise HttpError(400, "stream_options needs stream=true", "stream_options")


class AskedCompletion(AskedText):
    """The body of `/v1/completions`."""

    prompt: Any

    @field_validator("prompt")
    @classmethod
    def check_prompt(cls, given: Any) -> Any:
        """Check that it is one of the four kinds of prompts."""
        rows = given if isinstance(given, list) else [given]
        for kind in (_is_text, _is_token, _is_row):
            if rows and all(map(kind, rows)):
                return given
        raise ValueError("must be a text, a row of tokens, or a list of texts or rows")

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, of which a row of tokens is one."""
        given: Any = self.prompt
        is_one = isinstance(given, str) or _is_token(given[0])
        return [given] if is_one else given

    @property
    def num_asked(self) -> int | None:
        """Return how many tokens are asked for, at most; `None` for all there is room for."""
        return self.max_tokens or 16  # what OpenAI's interface says


class AskedChat(AskedText):
    """The body of `/v1/chat/completions`."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)

    @property
    def num_asked(self) -> int | None:
        """Return how many tokens are asked for, at most; `None` for all there is room for."""
        return self.max_completion_tokens or self.max_tokens


def refused(errors: list[Any], supported: type[AskedText]) -> HttpError:
    """Return the answer to a request that has these errors of pydantic.

    Args:
        errors: the errors, of which the first is told.
        supported: what it might have sent.
    """
    # A field that we do not know is told first, as it may be why others are missing.
    unknown = [x for x in errors if x["type"] == "extra_forbidden"]
    error = (unknown or errors)[0]
    if error["type"] == "json_invalid":
        return HttpError(400, f"the body is no JSON: {error['ctx']['error']}")
    fields = [str(x) for x in error["loc"] if x != "body"]
    where, param = ".".join(fields) or "the body", fields[0] if fields else None
    if unknown:
        known = sorted(supported.model_fields) if len(fields) == 1 else Message.model_fields
        message = f"{where} is not supported here; supported are {', '.join(known)}"
        return HttpError(400, message, param, "unsupported_parameter")
    said = error["msg"].removeprefix("Value error, ")
    got = "" if error["type"] == "missing" else f", got {error['input']!r:.80}"
    return HttpError(400, f"{where}: {said}{got}", param)
