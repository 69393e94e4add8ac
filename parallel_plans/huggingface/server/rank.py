"""One rank of a server: it loads the model, and runs the engine; the first one listens, too."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from secrets import randbits
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import parallelize_module

from parallel_plans.huggingface.plan import context_parallel_plan
from parallel_plans.huggingface.server.engine import (
    HEARTBEAT,
    AskedTokens,
    Engine,
    EngineLook,
    Frontend,
    SampleTokens,
    broadcast_bytes,
)
from parallel_plans.huggingface.server.open_requests import OpenRequests
from parallel_plans.huggingface.serving.continuous_batch import ContinuousBatch

# Seconds after which groups fail, once clients were told that a rank hangs: what notices it first
# may end the process, as NCCL's watchdog does.
SPARE_SECONDS = 5


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server.

    Attributes:
        model: a folder with a model and its tokenizer, or its name in the cache of transformers.
        num_ranks: ranks that share each sequence.
        host: the address to listen on.
        port: the port to listen on; 0 for any that is free.
        name: the name of the model for clients; by default `model`.
        dtype: of the parameters; by default that of the checkpoint.
        layout: how tokens of prompts are sharded; by default the plan's.
        cache_dtype: int8 or fp8 for full blocks of keys and values; by default nothing is rounded.
        cache_tokens: tokens whose keys and values all ranks hold together.
        page_size: tokens of a block; by default 256 on a GPU, else 64.
        max_batch_tokens: the largest number of tokens of a step.
        max_requests: the largest number of answers that are generated at a time.
        max_open: the largest number of answers that are open, with those that wait.
        drain_seconds: how long open requests may take when the server is to end.
        rank_timeout: seconds that a rank waits for another one; no step may take longer.
        seed: of the first answer that samples without a seed of its own; by default drawn.
    """

    model: str
    num_ranks: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    dtype: torch.dtype | None = None
    layout: str | None = None
    cache_dtype: str | None = None
    cache_tokens: int = 65536
    page_size: int | None = None
    max_batch_tokens: int = 2048
    max_requests: int = 64
    max_open: int = 256
    drain_seconds: float = 30.0
    rank_timeout: float = 120.0
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check the time limit.

        Raises:
            ValueError: if ranks that wait would reach it.
        """
        if self.rank_timeout <= 2 * HEARTBEAT:
            raise ValueError(
                f"rank_timeout must be more than {2 * HEARTBEAT:g} s, as ranks that wait hear "
                f"from the first one each {HEARTBEAT:g} s; got {self.rank_timeout:g}"
            )

    @property
    def group_timeout(self) -> timedelta:
        """Return how long messages between ranks may take."""
        return timedelta(seconds=self.rank_timeout + SPARE_SECONDS)


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a socket with this address, on which nobody listens yet.

    Raises:
        OSError: if the address is taken, or is not of this machine.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind)
    # So that a server can start where another has just ended.
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as error:
        made.close()
        raise OSError(
            f"cannot listen on {host}:{port}: {error.strerror}; give another --port, 0 for any"
        ) from error
    return made


def run_rank(options: ServerOptions, ready: Callable[[FirstRank], None] | None = None) -> None:
    """Serve as this rank of the process group until the server ends.

    Args:
        options: of the server, the same on all ranks.
        ready: called on the first rank when it listens; by default it prints the address.

    Raises:
        OSError: on the first rank, if it cannot listen.
        RuntimeError: if a rank failed, died, or did not answer in time.
    """
    is_first = dist.get_rank() == 0
    listening = bound_socket(options.host, options.port) if is_first else None
    model, tokenizer = loaded(options)
    group = _cpu_group(options.group_timeout)
    stops = taken_stops(model)
    how = _batch_options(options, model.device, _shared_seed(group, options.seed))
    batch = model.init_continuous_batching(None, how)
    if listening is None:
        # The first rank says when the server ends.
        with handled(lambda *_: None):
            Engine(batch, group, None).run()
    else:
        first = FirstRank(options, model, tokenizer, listening, batch, stops)
        first.run(group, ready or announced)


def _cpu_group(timeout: timedelta) -> dist.ProcessGroup:
    """Return a group of all ranks on CPUs, whose messages may take so long."""
    made = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(made, dist.ProcessGroup), "all ranks are in it"
    return made


def announced(first: FirstRank) -> None:
    """Print the address of a server."""
    print(f"listening on {first.url}", flush=True)


# Minutes that ranks wait for the one that is the last to have loaded its weights.
LOADING_MINUTES = 60


def loaded(options: ServerOptions) -> tuple[Any, Any]:
    """Return the model under its plan, and its tokenizer, once all ranks have loaded them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is not None:
        torch.accelerator.set_device_index(dist.get_node_local_rank(fallback_rank=dist.get_rank()))
    kind = "cpu" if device is None else device.type
    # Ranks may load for minutes, longer than the limit that steps have.
    dtype, loading = options.dtype or "auto", _cpu_group(timedelta(minutes=LOADING_MINUTES))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval().to(kind)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    dist.barrier(loading)
    dist.destroy_process_group(loading)
    mesh = dist.init_device_mesh(kind, (options.num_ranks,), mesh_dim_names=("cp",))
    plan = context_parallel_plan(model, options.layout, cache_dtype=options.cache_dtype)
    return parallelize_module(model, mesh, plan), tokenizer


def _page_size(options: ServerOptions, device: torch.device) -> int:
    return options.page_size or (64 if device.type == "cpu" else 256)


def _num_blocks(options: ServerOptions, device: torch.device) -> int:
    return -(-options.cache_tokens // (_page_size(options, device) * options.num_ranks))


def _shared_seed(group: dist.ProcessGroup, seed: int | None) -> int:
    """Return the seed of all ranks, which the first one draws if none is given."""
    drawn = randbits(61) if seed is None else seed
    return int(broadcast_bytes(group, str(drawn).encode()))


def _batch_options(options: ServerOptions, device: torch.device, seed: int) -> Any:
    from transformers import ContinuousBatchingConfig

    return ContinuousBatchingConfig(
        page_size=_page_size(options, device),
        num_blocks=_num_blocks(options, device),
        max_batch_tokens=options.max_batch_tokens,
        max_requests_per_batch=min(options.max_requests, options.max_batch_tokens),
        seed=seed,
    )


def longest(options: ServerOptions, model: Any) -> int:
    """Return the largest number of tokens of a prompt and its answer.

    The pool holds so many, and the model has positions for so many.
    """
    device = model.device
    held = _num_blocks(options, device) * _page_size(options, device) * options.num_ranks
    config = model.config.get_text_config()
    # One more than is held: nothing reads the keys of the last token of an answer.
    return min(held + 1, getattr(config, "max_position_embeddings", None) or held + 1)


def ends_of(model: Any) -> frozenset[int]:
    """Return the tokens that end an answer."""
    found = model.generation_config.eos_token_id
    return frozenset([] if found is None else [found] if isinstance(found, int) else found)


def taken_stops(model: Any) -> tuple[str, ...]:
    """Return the strings that end an answer by the model's config, and take them out of it.

    The server looks for stop strings in its texts, and `generate` would ask for a tokenizer.
    """
    config = model.generation_config
    found, config.stop_strings = getattr(config, "stop_strings", None), None
    return (found,) if isinstance(found, str) else tuple(found or ())


# Seconds between two checks of the engine.
WATCH_EVERY = 0.5


class FirstRank:
    """The rank that clients speak to: HTTP on a thread beside the engine.

    Args:
        options: of the server.
        model: the model.
        tokenizer: its tokenizer.
        listening: the socket.
        batch: the batch of the engine.
        stops: strings that end any answer.

    Attributes:
        url: where clients find it.
        batch: the batch.
    """

    def __init__(
        self,
        options: ServerOptions,
        model: Any,
        tokenizer: Any,
        listening: socket.socket,
        batch: ContinuousBatch,
        stops: tuple[str, ...],
    ) -> None:
        from parallel_plans.huggingface.server.app import Service, make_app
        from parallel_plans.huggingface.server.http_thread import HttpThread
        from parallel_plans.huggingface.server.metrics import ServerMetrics

        host, port = listening.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self.batch, self._options = batch, options
        self._slow: str | None = None
        self._inbox: SimpleQueue[AskedTokens | str | None] = SimpleQueue()
        self._requests = OpenRequests(self._inbox, options.max_open)
        service = Service(
            name=options.name or options.model,
            tokenizer=tokenizer,
            requests=self._requests,
            max_length=longest(options, model),
            ends=ends_of(model),
            stops=stops,
            metrics=ServerMetrics(self._requests),
        )
        self._http = HttpThread(make_app(service), listening)

    def run(self, group: dist.ProcessGroup, ready: Callable[[FirstRank], None]) -> None:
        """Listen, and run the engine until the server ends.

        Args:
            group: all ranks, on CPUs.
            ready: called when it listens.

        Raises:
            RuntimeError: if a rank failed, died or hangs. All open requests were told.
        """
        frontend = Frontend(self._inbox, self._publish, self._options.drain_seconds)
        with handled(self.stop), self._http as http:
            http.call(self._watch, frontend)
            ready(self)
            try:
                Engine(self.batch, group, frontend).run()
                if self._slow is not None:
                    raise RuntimeError(self._slow)
            except BaseException as error:
                http.call(self._requests.fail, 500, FAILED + first_line(error))
                raise
            http.call(self._requests.fail, 503, STOPS)

    def _watch(self, frontend: Frontend) -> None:
        """Tell all who wait once a step takes too long; the engine fails soon after."""
        seconds = self._options.rank_timeout
        if time.monotonic() - frontend.since > seconds:
            self._slow = f"a step took more than {seconds:g} s, so a rank hangs"
            self._requests.fail(500, FAILED + self._slow)
            self._inbox.put(None)  # if that step ends nevertheless
        else:
            self._http.call_later(WATCH_EVERY, self._watch, frontend)

    def _publish(self, found: list[SampleTokens], look: EngineLook | None) -> None:
        self._http.call(self._requests.deliver, found, look)

    def stop(self, *_: object) -> None:
        """Take no more requests, and end when those that are open have; a handler of signals."""
        self._http.call(self._requests.close, 503, STOPS)
        self._inbox.put(None)


FAILED = "the server failed, ask again later: "
STOPS = "the server stops; ask again when it has started again"


def first_line(error: BaseException) -> str:
    """Return the first line of an error."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def handled(handler: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which this handles the signals that end a process."""
    before = {x: signal.signal(x, handler) for x in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
