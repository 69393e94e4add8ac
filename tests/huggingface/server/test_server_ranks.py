"""Servers whose ranks are processes: the command, many clients, and a rank that dies or hangs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
import torch.distributed as dist

from dtensor_ring.command.main import main
from parallel_plans.huggingface.server import launch
from parallel_plans.huggingface.server.launch import start_rank, watched
from parallel_plans.huggingface.server.rank import FirstRank, ServerOptions, bound_socket
from parallel_plans.models import load, read_config, serve
from tests.huggingface.server.tiny import OPTIONS, Stock, serving, until, write_tiny
from tests.pool import Pool, on_ranks, settle, starting
from tests.scripts import running_launcher, session

pytest.importorskip("fastapi")


def run(pipe: Connection, command: list[str]) -> None:
    os.dup2(pipe.fileno(), sys.stdout.fileno())
    sys.exit(main(load, command, read=read_config, serve=serve))


def test_command(pool: Pool, tmp_path: Path) -> None:
    """It starts two ranks, says where it listens, answers, and ends when it is told to.

    What forks the workers of the pool forks these processes, too.
    """
    folder, context = write_tiny(tmp_path), starting()
    command = ["serve", "--model", folder, "--mesh", "cp=2", "--port", "0", "--name", "tiny"]
    command += ["--page-size", "8", "--cache-tokens", "1024"]
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run, args=(theirs, command))
    process.start()
    theirs.close()
    try:
        with os.fdopen(os.dup(ours.fileno())) as printed:
            said, _, url = printed.readline().rpartition(" ")
        assert said == "listening on"
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 5}
        answer = httpx.post(f"{url.strip()}/v1/completions", json=body, timeout=60)
        assert answer.json()["choices"][0]["text"] == Stock(folder).text("hello", 5)
        process.terminate()
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()


@pytest.mark.repeats
def test_torchrun(pool: Pool, tmp_path: Path) -> None:
    """It brings the ranks. They hear a signal that ends it: what is open is answered."""
    folder, stock = write_tiny(tmp_path, ends=False), Stock(str(tmp_path))
    command = ["--nproc-per-node", 2, "-m", "dtensor_ring", "serve", "--model", folder]
    command += ["--mesh", "cp=2", "--port", 0, "--page-size", 8, "--cache-tokens", 1024]
    with running_launcher("torch.distributed.run", *command) as (process, printed):
        until(lambda: "listening on" in printed() or process.exitcode is not None, seconds=100)
        url = printed().partition("listening on ")[2].split()[0]
        asked = {"prompt": "hello", "max_tokens": 90, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=60) as stream:
            lines = stream.iter_lines()
            first = next(lines)
            for pid in {*session(process.pid)} - {process.pid}:
                os.kill(pid, signal.SIGTERM)
            events = [json.loads(x[len("data: ") :]) for x in (first, *lines) if "{" in x]
        text = "".join(x["choices"][0]["text"] for x in events)
        assert text == stock.text("hello", 90)
        process.join(60)
        assert process.exitcode == 0


def test_a_time_limit_that_idle_ranks_would_reach(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("model", {"cp": 2}, rank_timeout=1.0) == 2
    expected = "rank_timeout must be more than 2 s, as ranks that wait hear"
    assert expected in capsys.readouterr().err


def test_other_axes_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve("model", {"dp_shard": 2, "cp": 2}) == 2
    assert "an axis cp and knows no other, got dp_shard, cp" in capsys.readouterr().err


def test_an_address_that_is_taken() -> None:
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"cannot listen on 127.0.0.1:{port}: .*; give another"):
            bound_socket("127.0.0.1", port)


pytest.importorskip("fastapi")


KINDS = [(f"{i} is", 4 + 8 * i) for i in range(7)]
"""Prompts, and the tokens of their answers."""


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_tiny(tmp_path_factory.mktemp("endless"), ends=False)


def start(pipe: Connection, rank: int, port: int, options: ServerOptions) -> None:
    settle()
    os.dup2(pipe.fileno(), sys.stdout.fileno())
    start_rank(rank, port, options)


class Started:
    """A server whose ranks are processes, started as the command does but forked."""

    def __init__(self, options: ServerOptions) -> None:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._store, context = store, starting()
        ours, theirs = context.Pipe(duplex=False)
        self.ranks = [
            context.Process(target=start, args=(theirs, i, store.port, options), name=f"rank {i}")
            for i in range(options.num_ranks)
        ]
        for process in self.ranks:
            process.start()
        theirs.close()
        self.status: int | None = None
        self._watching = Thread(target=self._watch)
        self._watching.start()
        with os.fdopen(os.dup(ours.fileno())) as printed:
            self.url = printed.readline().split()[-1]

    def _watch(self) -> None:
        self.status = watched(self.ranks)

    def ended(self) -> int | None:
        """The exit status."""
        self._watching.join(60)
        return self.status


@contextmanager
def started(folder: str, **options: Any) -> Iterator[Started]:
    server = Started(replace(OPTIONS, model=folder, num_ranks=2, **options))
    try:
        yield server
    finally:
        for process in server.ranks:
            process.kill()
        server.ended()


async def one(client: httpx.AsyncClient, url: str, number: int, leaves_after: int | None) -> str:
    """How one streamed request ends: the text, `left`, `error` or `lost`."""
    prompt, num_new = KINDS[number % len(KINDS)]
    body = {"prompt": prompt, "max_tokens": num_new, "temperature": 0, "stream": True}
    text, num_events = "", 0
    try:
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return "error" if "message" in answer.json()["error"] else "lost"
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return text
                if line.startswith("data: "):
                    found, num_events = json.loads(line.removeprefix("data: ")), num_events + 1
                    if "error" in found:
                        return "error"
                    text += found["choices"][0]["text"]
                if num_events == leaves_after:
                    return "left"
    except httpx.ConnectError:
        return "error"  # the server has ended: this one was not taken
    except httpx.TransportError:
        return "lost"
    return "lost"


async def many(url: str, num: int, num_leaving: int, kill: Any = None) -> list[str]:
    """How all of many requests end, that come at once; `kill` is called among them."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=120, limits=limits) as client:
        every = num // num_leaving if num_leaving else num + 1
        leaving = [1 if i % every == 0 and i // every < num_leaving else None for i in range(num)]
        tasks = [asyncio.create_task(one(client, url, i, x)) for i, x in enumerate(leaving)]
        if kill is not None:
            while sum(task.done() for task in tasks) < num // 3:
                await asyncio.sleep(0.02)
            kill()
        return list(await asyncio.gather(*tasks))


def kinds(ends: list[str], texts: set[str]) -> Counter[str]:
    return Counter("text" if x in texts else x for x in ends)


def test_a_rank_that_dies_among_requests(pool: Pool, endless: str) -> None:
    """Some leave, and a rank dies: everyone else has the text, or an error; then a new server.

    What forks the workers of the pool forks these ranks, too.
    """
    stock, num, num_leaving = Stock(endless), 48, 8
    texts = {stock.text(*kind) for kind in KINDS}
    with started(endless, max_open=num) as server:
        ends = asyncio.run(many(server.url, num, num_leaving, server.ranks[1].kill))
        found = kinds(ends, texts)
        assert found["text"] > 0
        assert found["error"] > 0
        assert found.keys() <= {"text", "error", "left"}, found
        assert found["left"] <= num_leaving
        assert server.ended() == 1
        assert [x.exitcode for x in server.ranks] == [1, -signal.SIGKILL]
    with started(endless, max_open=num) as server:
        again = kinds(asyncio.run(many(server.url, num // 4, 2)), texts)
        assert again == {"text": num // 4 - 2, "left": 2}
        server.ranks[0].terminate()
        assert server.ended() == 0


@pytest.mark.repeats
def test_a_rank_that_hangs(pool: Pool, endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All have the text or an error in time, and the server ends."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 1)  # what the hung rank has to end
    stock, num = Stock(endless), 48
    texts, seconds = {stock.text(*kind) for kind in KINDS}, 10.0
    with started(endless, max_open=num, rank_timeout=seconds) as server:
        hung, since = server.ranks[1].pid, list[float]()

        def stop() -> None:
            os.kill(hung, signal.SIGSTOP)
            since.append(time.monotonic())

        found = kinds(asyncio.run(many(server.url, num, 0, stop)), texts)
        took = time.monotonic() - since[0]
        assert found["text"] > 0
        assert found["error"] > 0
        assert found.keys() <= {"text", "error"}, found
        assert took < seconds + 30, "a deadline against hangs"
        assert server.ended() == 1
        assert [x.exitcode for x in server.ranks] == [1, -signal.SIGKILL]


def ask_slowly(first: FirstRank) -> None:
    """A step that ends once who waits has an error; it is the last one."""
    step, answered = first.batch.step, Event()

    def slow() -> Any:
        assert not first.batch.has_requests() or answered.wait(60)
        return step()

    first.batch.step = slow
    answer = httpx.post(f"{first.url}/v1/completions", json={"prompt": "hi"}, timeout=50)
    answered.set()
    assert answer.status_code == 500
    assert "a step took more than 2.1 s, so a rank hangs" in answer.json()["error"]["message"]


@on_ranks(2)
def test_a_step_that_takes_too_long(endless: str) -> None:
    how = {"rank_timeout": 2.1, "drain_seconds": 0.0}
    if dist.get_rank():
        serving(endless, ask_slowly, **how)
    else:
        with pytest.raises(RuntimeError, match="a step took more than"):
            serving(endless, ask_slowly, **how)


@pytest.mark.repeats
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_while_idle(
    pool: Pool, endless: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server ends, though nobody asks; the first rank is found by the others."""
    monkeypatch.setattr(launch, "GRACE_SECONDS", 1)
    with started(endless, rank_timeout=10.0) as server:
        os.kill(server.ranks[rank].pid, signal.SIGSTOP)
        assert server.ended() == 1


def held_kibibytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


@pytest.mark.repeats
def test_memory_does_not_grow_over_2000_requests(pool: Pool, endless: str) -> None:
    """KiB of each rank after each hundred of them."""
    with started(endless, max_open=100) as server:
        found = []
        for _ in range(20):
            ends = asyncio.run(many(server.url, 100, 10))
            assert not {"lost", "error"} & {*ends}
            found.append([held_kibibytes(x.pid) for x in server.ranks])
    settled, last = found[len(found) // 2], found[-1]
    for before, after in zip(settled, last, strict=True):
        assert after < before + 4096, found
