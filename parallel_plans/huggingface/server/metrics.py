"""What a server counts, in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from parallel_plans.huggingface.server.open_requests import OpenRequests

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)


class ServerMetrics:
    """The metrics of one server.

    Args:
        requests: its open requests, whose numbers are read when metrics are asked for.

    Attributes:
        answered: requests, by `endpoint` and `outcome`: ok, cancelled, failed or refused.
        prompt_tokens: tokens of prompts.
        generated_tokens: tokens that were generated and read.
        first_token: seconds from a request to its first token.
        answer: seconds from a request to its end.
    """

    def __init__(self, requests: OpenRequests) -> None:
        self._requests, self._registry = requests, CollectorRegistry()
        kept: dict[str, Any] = {"namespace": "dtensor_ring", "registry": self._registry}
        self.answered = Counter("requests", "Requests that ended", ["endpoint", "outcome"], **kept)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts", **kept)
        self.generated_tokens = Counter("generated_tokens", "Tokens generated", **kept)
        kept["buckets"] = SECONDS
        self.first_token = Histogram("time_to_first_token_seconds", "To the first token", **kept)
        self.answer = Histogram("request_seconds", "To the end of a request", **kept)
        self._registry.register(self)

    def collect(self) -> Iterator[Any]:
        """Yield what is read when metrics are asked for, as a collector of Prometheus."""
        name = "dtensor_ring_open_answers"
        yield GaugeMetricFamily(name, "Answers that wait or are generated", len(self._requests))
        look = self._requests.look
        if look is None:
            return
        yield CounterMetricFamily("dtensor_ring_steps", "Steps of the engine", look.steps)
        name = "dtensor_ring_preempted"
        yield CounterMetricFamily(name, "Times a request gave its blocks to others", look.preempted)
        name = "dtensor_ring_cached_prompt_tokens"
        yield CounterMetricFamily(name, "Tokens of prompts found in the pool", look.cached_tokens)
        name = "dtensor_ring_pool_blocks_held"
        yield GaugeMetricFamily(name, "Blocks held on the fullest rank", look.held)
        name = "dtensor_ring_pool_blocks"
        yield GaugeMetricFamily(name, "Blocks of the pool on each rank", look.num_blocks)

    def text(self) -> bytes:
        """Return all metrics."""
        return generate_latest(self._registry)
