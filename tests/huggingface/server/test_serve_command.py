"""The command `serve`: ranks as processes, signals, and what cannot be served."""

from __future__ import annotations

import json
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

import httpx

from dtensor_ring.command.main import main
from parallel_plans.huggingface.server.rank import bound_socket
from parallel_plans.models import load, read_config, serve
from tests.huggingface.server.servers import until
from tests.huggingface.server.tiny import Stock, write_tiny
from tests.pool import Pool, starting
from tests.scripts import running_launcher, session


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
