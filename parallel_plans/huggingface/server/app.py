"""The HTTP side of a server: OpenAI's routes, by FastAPI."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from parallel_plans.huggingface.server.answers import AnswerChoice, AnswerForm, StreamText, event
from parallel_plans.huggingface.server.asked import AskedChat, AskedCompletion, AskedText, refused
from parallel_plans.huggingface.server.engine import AskedTokens
from parallel_plans.huggingface.server.metrics import ServerMetrics
from parallel_plans.huggingface.server.open_requests import HttpError, OpenRequests

Asked = AskedCompletion | AskedChat


@dataclass(frozen=True)
class Service:
    """What the routes need.

    Attributes:
        name: the name of the model.
        tokenizer: of transformers.
        requests: the open requests.
        max_length: the largest number of tokens of a prompt and its answer.
        ends: the tokens that end an answer.
        stops: the strings that end one, beside those that are asked for.
        metrics: what is counted.
        encoding: the one thread on which prompts become tokens: tokenizers of transformers are not
            for several.
        numbers: of requests.
    """

    name: str
    tokenizer: Any
    requests: OpenRequests
    max_length: int
    ends: frozenset[int]
    stops: tuple[str, ...]
    metrics: ServerMetrics
    encoding: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))
    numbers: Any = field(default_factory=count)

    async def prompts(self, asked: Asked) -> list[list[int]]:
        """Return the tokens of each prompt.

        Raises:
            HttpError: if a chat does not fit the template of the model.
        """
        loop = asyncio.get_running_loop()
        if isinstance(asked, AskedChat):
            return await loop.run_in_executor(self.encoding, self._chat_tokens, asked)
        return await loop.run_in_executor(self.encoding, self._tokens, asked)

    def _tokens(self, asked: AskedCompletion) -> list[list[int]]:
        given = asked.prompts
        return [x if isinstance(x, list) else self.tokenizer(x)["input_ids"] for x in given]

    def _chat_tokens(self, asked: AskedChat) -> list[list[int]]:
        messages = [x.to_template() for x in asked.messages]
        try:
            found = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        except Exception as error:  # templates of models raise what they like
            raise HttpError(400, f"the model's chat template: {error}", "messages") from error
        return [found]

    def asks(self, asked: Asked, prompts: list[list[int]], request_id: str) -> list[AskedTokens]:
        """Return the requests for the engine.

        Raises:
            HttpError: if a prompt is too long, or options contradict one another.
        """
        asked_tokens = []
        for number, prompt in enumerate(prompts):
            room = self.max_length - len(prompt)
            num_new = asked.num_asked or max(room, 1)
            if num_new > room:
                raise HttpError(
                    400,
                    f"a prompt and its answer may have {self.max_length} tokens, and {len(prompt)} "
                    f"of the prompt and {num_new} of the answer are {len(prompt) + num_new}; "
                    "shorten the prompt, or ask for fewer tokens",
                    "messages" if isinstance(asked, AskedChat) else "prompt",
                    "context_length_exceeded",
                )
            name, seed = f"{request_id}-{number}", asked.seed
            # Each prompt of a request has a seed of its own, and so has each of its `n` answers.
            seed = None if seed is None else seed + number * asked.n
            asked_tokens.append(AskedTokens(name, prompt, asked.options(num_new), seed))
        return asked_tokens

    def check_model(self, asked: AskedText) -> None:
        """Check the name of the model.

        Raises:
            HttpError: if it is another one.
        """
        if asked.model not in (None, self.name):
            message = f"there is no model {asked.model!r} here, but {self.name!r}"
            raise HttpError(404, message, "model", "model_not_found")


class Answer:
    """The answer to one request while it is generated; it is open until `close`.

    Args:
        service: what the routes need.
        asked: the request.
        asks: what the engine is asked for.
        form: how the answer is written.

    Raises:
        HttpError: if the request is not taken.
    """

    def __init__(
        self, service: Service, asked: Asked, asks: list[AskedTokens], form: AnswerForm
    ) -> None:
        self._service, self._asked, self.form = service, asked, form
        self._outcome: str | None = "cancelled"
        self._begin, self._is_first = time.monotonic(), True
        decode = _decoder(service.tokenizer)
        stops = [*asked.stops, *service.stops]
        self._texts = [StreamText(decode, x.prompt, stops) for x in asks for _ in x.sample_ids]
        self._names = [name for x in asks for name in x.sample_ids]
        self.choices = [AnswerChoice() for _ in self._names]
        self._queue = service.requests.open(asks)

    def close(self) -> None:
        """Cancel what has not ended, and count the request."""
        # Called at the end, and also when a client goes: the first call counts.
        if self._outcome is None:
            return
        for name in self._names:
            self._service.requests.cancel(name)
        metrics, kind = self._service.metrics, "chat" if self.form.is_chat else "completions"
        metrics.answered.labels(kind, self._outcome).inc()
        metrics.prompt_tokens.inc(self.form.num_prompt_tokens)
        metrics.generated_tokens.inc(sum(x.num_tokens for x in self.choices))
        metrics.answer.observe(time.monotonic() - self._begin)
        self._outcome = None

    async def pieces(self) -> AsyncIterator[tuple[int, str]]:
        """Yield the number of a choice, and its next text, until all choices have ended.

        Raises:
            HttpError: if the engine refuses a prompt, or fails.
        """
        while any(x.reason is None for x in self.choices):
            index, new = await self._queue.get()
            if new.error is not None:
                self._outcome = "refused" if new.status == 400 else "failed"
                raise HttpError(new.status, new.error)
            if self.choices[index].reason is not None:
                continue  # a stop string has ended it
            text = self._read(index, new.tokens, new.is_end)
            if self._texts[index].is_stopped:
                self._service.requests.cancel(self._names[index])
            if text or self.choices[index].reason:
                yield index, text
        self._outcome = "ok"

    def _read(self, index: int, tokens: list[int], is_end: bool) -> str:
        """Return the text of new tokens, and note whether the choice ends."""
        if tokens and self._is_first:
            self._is_first = False
            self._service.metrics.first_token.observe(time.monotonic() - self._begin)
        stream, choice = self._texts[index], self.choices[index]
        text = stream.push(tokens)
        if is_end:
            text += stream.end()
        choice.num_tokens = stream.num_tokens
        if stream.is_stopped:
            choice.reason = "stop"
        elif is_end:
            choice.reason = "stop" if tokens and tokens[-1] in self._service.ends else "length"
        choice.text += text
        return text

    async def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        async for _ in self.pieces():
            pass
        return self.form.whole(self.choices)

    async def events(self) -> AsyncIterator[str]:
        """Yield the events of a stream. An error ends it, as its own event."""
        for index in range(len(self.choices)):
            if first := self.form.first(index):
                yield first
        try:
            async for index, text in self.pieces():
                yield self.form.piece(index, text, self.choices[index].reason)
        except HttpError as error:
            yield event(error.body)
            return
        if self._asked.has_usage:
            yield self.form.last(self.choices)
        yield self.form.DONE


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    def decode(tokens: list[int]) -> str:
        return tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    return decode


class EventResponse(StreamingResponse):
    """The stream of an answer, which is closed as soon as the client has gone."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.events(), media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()


async def _has_left(request: Request) -> None:
    """Wait until the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _answered(service: Service, request: Request, asked: Asked) -> Response:
    """Answer a request: in pieces, or whole, unless its client goes before that."""
    service.requests.check_open()
    service.check_model(asked)
    asked.check_stream()
    is_chat = isinstance(asked, AskedChat)
    prompts = await service.prompts(asked)
    name = f"{'chatcmpl' if is_chat else 'cmpl'}-{next(service.numbers)}"
    asks = service.asks(asked, prompts, name)
    form = AnswerForm(name, service.name, int(time.time()), is_chat, sum(map(len, prompts)))
    answer = Answer(service, asked, asks, form)
    if asked.stream:
        return EventResponse(answer)
    # For a client that has gone nobody reads the answer, but it would hold blocks of the pool.
    whole, left = asyncio.ensure_future(answer.whole()), asyncio.ensure_future(_has_left(request))
    try:
        await asyncio.wait((whole, left), return_when=asyncio.FIRST_COMPLETED)
        # 499 is nginx's number for a client that has gone; only logs will see it.
        return JSONResponse(await whole) if whole.done() else Response(status_code=499)
    finally:
        whole.cancel()
        left.cancel()
        answer.close()


def make_app(service: Service) -> FastAPI:
    """Return the application with all routes."""
    app = FastAPI(openapi_url=None)

    @app.exception_handler(HttpError)
    async def told(_: Request, error: HttpError) -> Response:
        return JSONResponse(error.body, error.status, headers=error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        supported = AskedChat if "chat" in request.url.path else AskedCompletion
        found = refused(list(error.errors()), supported)
        return JSONResponse(found.body, found.status)

    @app.exception_handler(HTTPException)
    async def no_route(request: Request, error: HTTPException) -> Response:
        found = HttpError(error.status_code, f"{request.url.path}: {error.detail}")
        return JSONResponse(found.body, found.status)

    @app.post("/v1/completions")
    async def completions(request: Request, asked: AskedCompletion) -> Response:
        return await _answered(service, request, asked)

    @app.post("/v1/chat/completions")
    async def chat(request: Request, asked: AskedChat) -> Response:
        return await _answered(service, request, asked)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        found = {"id": service.name, "object": "model", "created": 0, "owned_by": "dtensor_ring"}
        return {"object": "list", "data": [found | {"max_model_len": service.max_length}]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        service.requests.check_open()
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        kind = "text/plain; version=0.0.4; charset=utf-8"
        return Response(service.metrics.text(), media_type=kind)

    return app
