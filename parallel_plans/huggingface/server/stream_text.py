"""The text of an answer, as its tokens come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

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
