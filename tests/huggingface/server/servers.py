"""Servers in this process, and those that are processes of their own, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import Any

import torch.distributed as dist

from parallel_plans.huggingface.server.rank import FirstRank, ServerOptions, run_rank

OPTIONS = ServerOptions("", 2, port=0, name="tiny", page_size=8, cache_tokens=4096, seed=1)


def serving(folder: str, client: Callable[[FirstRank], Any], **options: Any) -> Any:
    """What a client returns, which runs beside the server of these ranks, on the first of them."""
    answers, errors = [], []

    def ask(first: FirstRank) -> None:
        try:
            answers.append(client(first))
        except BaseException as error:
            errors.append(error)
        finally:
            first.stop()

    threads = []

    def ready(first: FirstRank) -> None:
        threads.append(Thread(target=ask, args=(first,)))
        threads[0].start()

    given = {"model": folder, "num_ranks": dist.get_world_size()} | options
    run_rank(replace(OPTIONS, **given), ready)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return answers[0] if answers else None


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never holds"
        time.sleep(0.02)
