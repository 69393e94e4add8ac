"""The loop that all ranks of a server run: what came in, a step of the batch, what goes out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from parallel_plans.huggingface.serving.continuous_batch import ContinuousBatch

# Seconds between two messages to ranks that wait.
HEARTBEAT = 1.0


@dataclass(frozen=True)
class AskedTokens:
    """A prompt whose continuation is asked for.

    Attributes:
        request_id: its id, which no other has.
        prompt: its tokens.
        options: options of `generate`, which can be written as JSON.
        seed: of its first sample; `None` for the next one of the server.
    """

    request_id: str
    prompt: list[int]
    options: dict[str, Any]
    seed: int | None = None

    @property
    def sample_ids(self) -> list[str]:
        """Return the ids of the outputs: of the request, then of its other samples."""
        num_others = self.options.get("num_return_sequences", 1) - 1
        return [self.request_id, *(f"{self.request_id}__child#{i}" for i in range(num_others))]


class SampleTokens(NamedTuple):
    """What a step has for one sample.

    Attributes:
        sample_id: its id.
        tokens: its next tokens.
        is_end: whether there are no more.
        error: why there are no more, if something is wrong.
        status: the HTTP status of the error.
    """

    sample_id: str
    tokens: list[int]
    is_end: bool = False
    error: str | None = None
    status: int = 500


class EngineLook(NamedTuple):
    """Numbers of the engine for metrics; blocks are those of the fullest rank."""

    steps: int
    preempted: int
    cached_tokens: int
    held: int
    num_blocks: int


# Note [Commands of a step]: requests come in on the first rank only. Before each step it sends all
# that is new to the other ranks, as JSON in a tensor of bytes: requests to add, requests to cancel,
# and whether the server ends. Then all ranks make the same calls of the batch. While there is
# nothing to do, the first rank sleeps and says so every `HEARTBEAT` seconds, so that no wait
# reaches its time limit. Then all ranks meet, as they do in a step: a rank that died, or hangs, is
# found.
@dataclass
class StepCommands:
    """What the first rank sends to all before a step, see Note [Commands of a step]."""

    adds: list[AskedTokens] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    is_end: bool = False

    def to_bytes(self) -> bytes:
        """Return them as JSON, or nothing if there are none, as in most steps."""
        if not (self.adds or self.cancels or self.is_end):
            return b""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def of(cls, data: bytes) -> StepCommands:
        """Return the commands that `to_bytes` has written."""
        if not data:
            return cls()
        found = json.loads(data)
        return cls([AskedTokens(**x) for x in found["adds"]], found["cancels"], found["is_end"])


# Bytes of the first message of commands. What is longer takes a second one.
FRAME = 4096
NUM_LENGTH = 8


def broadcast_bytes(group: dist.ProcessGroup, data: bytes) -> bytes:
    """Return the bytes that the first rank of a group of CPUs gives; other ranks give none."""
    # A frame, whose size all ranks know before they get it:
    #     | length | as much of the data as there is room for | zeros |
    frame = torch.zeros(FRAME, dtype=torch.uint8)
    room = FRAME - NUM_LENGTH
    if group.rank() == 0:
        # One frame holds the length and most messages, so that a step takes one broadcast.
        head = len(data).to_bytes(NUM_LENGTH, "little") + data[:room]
        frame[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    dist.broadcast(frame, group=group, group_src=0)
    head = frame.numpy().tobytes()
    size = int.from_bytes(head[:NUM_LENGTH], "little")
    first_part = head[NUM_LENGTH : NUM_LENGTH + min(size, room)]
    if size <= room:
        return first_part
    rest = torch.empty(size - room, dtype=torch.uint8)
    if group.rank() == 0:
        rest = torch.frombuffer(bytearray(data[room:]), dtype=torch.uint8)
    dist.broadcast(rest, group=group, group_src=0)
    return first_part + rest.numpy().tobytes()


# Who does what between two broadcasts:
#     HTTP thread              engine of the first rank      engines of other ranks
#     requests -> inbox    ->  commands, broadcast       ->  the same commands
#                              a step of the batch           the same step
#     answers  <- publish  <-  its tokens
class Engine:
    """Runs a continuous batch on this rank until the server ends.

    Args:
        batch: the batch.
        group: all ranks, on CPUs.
        frontend: where requests come in, and tokens go out; on the first rank only.
    """

    def __init__(
        self, batch: ContinuousBatch, group: dist.ProcessGroup, frontend: Frontend | None
    ) -> None:
        self._batch, self._group, self._frontend = batch, group, frontend

    def run(self) -> None:
        """Run until the first rank says that the server ends.

        Raises:
            RingError: if a rank raised.
            RuntimeError: if a rank died, or did not answer in time.
        """
        while True:
            own = None if self._frontend is None else self._frontend.commands(self._batch)
            sent = b"" if own is None else own.to_bytes()
            commands = StepCommands.of(broadcast_bytes(self._group, sent))
            if commands.is_end:
                return
            refused = self._apply(commands)
            if not self._batch.has_requests():
                dist.barrier(self._group)
            outputs = self._batch.step()
            if self._frontend is not None:
                self._frontend.hand_out(self._batch, outputs, refused)

    def _apply(self, commands: StepCommands) -> list[SampleTokens]:
        """Add and cancel what the commands say; return what the batch refused."""
        refused: list[SampleTokens] = []
        # Neighbours only: requests are added in the order in which they came.
        for _, found in groupby(commands.adds, key=lambda x: (x.seed, repr(x.options))):
            alike = list(found)
            names = [x.request_id for x in alike]
            given = {"seed": alike[0].seed, **alike[0].options}
            try:  # one message between ranks for all that are alike
                self._batch.add_requests([x.prompt for x in alike], names, **given)
            except ValueError as error:  # on all ranks
                samples = [name for x in alike for name in x.sample_ids]
                refused += [SampleTokens(name, [], True, str(error), 400) for name in samples]
        for name in commands.cancels:
            with suppress(ValueError):  # on all ranks: it was refused, or ended
                self._batch.cancel_request(name)
        return refused


# Seconds between two looks at the pool, for metrics.
LOOK_EVERY = 0.5


class Frontend:
    """The part of the engine that the first rank has alone: open requests, and their tokens.

    Args:
        inbox: requests (`AskedTokens`), ids of samples to cancel (`str`), and `None` to end.
        publish: takes what a step has for samples, and numbers for metrics, if there are new ones.
        drain_seconds: how long open requests may take once the server is to end.

    Attributes:
        since: when the last step began, by the monotonic clock.
    """

    def __init__(
        self,
        inbox: SimpleQueue[AskedTokens | str | None],
        publish: Callable[[list[SampleTokens], EngineLook | None], None],
        drain_seconds: float,
    ) -> None:
        self._inbox, self._publish, self._drain_seconds = inbox, publish, drain_seconds
        self._num_sent: dict[str, int] = {}
        self._end_at: float | None = None
        self._look_at, self.since = 0.0, time.monotonic()

    def commands(self, batch: ContinuousBatch) -> StepCommands:
        """Return what came in since the last step; wait if there is nothing else to do."""
        commands = StepCommands()
        if not batch.has_requests() and self._end_at is None:
            # A wait with a limit: the other ranks must hear of this one before their time limit.
            with suppress(Empty):
                self._take(self._inbox.get(timeout=HEARTBEAT), commands)
        with suppress(Empty):
            while True:
                self._take(self._inbox.get_nowait(), commands)
        self.since = time.monotonic()
        if self._end_at is not None:
            # The server ends once all answers are given, or after the time that they had.
            commands.is_end = not self._num_sent or time.monotonic() >= self._end_at
        return commands

    def _take(self, item: AskedTokens | str | None, commands: StepCommands) -> None:
        if item is None:
            self._end_at = self._end_at or time.monotonic() + self._drain_seconds
        elif isinstance(item, str):
            if self._num_sent.pop(item, None) is not None:
                commands.cancels.append(item)
        else:
            commands.adds.append(item)
            self._num_sent |= dict.fromkeys(item.sample_ids, 0)

    def hand_out(
        self, batch: ContinuousBatch, outputs: Sequence[Any], refused: list[SampleTokens]
    ) -> None:
        """Give out the tokens of a step."""
        samples = [x for x in refused if self._num_sent.pop(x.sample_id, None) is not None]
        for output in outputs:
            num_sent = self._num_sent.pop(output.request_id, None)
            if num_sent is not None:  # else nobody waits for it
                tokens = output.generated_tokens[num_sent:]
                samples.append(SampleTokens(output.request_id, tokens, True, output.error, 400))
        for name, num_sent in list(self._num_sent.items()):
            tokens = batch.new_tokens(name, num_sent)
            if tokens is None:  # a sample of a prompt that was refused
                del self._num_sent[name]
                samples.append(SampleTokens(name, [], True, "its prompt cannot be served", 400))
            elif tokens:
                self._num_sent[name] += len(tokens)
                samples.append(SampleTokens(name, tokens))
        look = self._look(batch)
        if samples or look:
            self._publish(samples, look)

    def _look(self, batch: ContinuousBatch) -> EngineLook | None:
        """Return the numbers of the engine, from time to time."""
        if time.monotonic() < self._look_at or batch.pool is None:
            return None
        self._look_at = time.monotonic() + LOOK_EVERY
        counts, usage = batch.counts, batch.pool.usage()
        held = max(usage.held)
        return EngineLook(counts.steps, counts.preempted, counts.cached, held, usage.num_blocks)
