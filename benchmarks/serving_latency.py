"""Measure the server on CPUs: time to the first token, and tokens per second, by arrival rate.

Run ``python benchmarks/serving_latency.py``: it starts the server's ranks itself, sends requests at
random times with a mean rate, streams their answers, and writes every time to
``benchmarks/results``. With ``--quick`` requests are few, and the results go to ``out``.
"""

import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any

import httpx
import torch
from harness import is_quick, origin, publish, table_of
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
PROMPT_LEN, NUM_NEW = 512, 32
"""Tokens of a prompt, of which the first half is shared by all, and of its answer."""


@dataclass
class Load:
    """Requests at a mean rate, and what each of them took.

    Attributes:
        rate: requests per second.
        first: seconds from when a request is sent to its first token.
        between: seconds between two of its tokens, in the mean.
        seconds: from the first request to the end of the last answer.
    """

    ranks: int
    rate: float
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    seconds: float = 0


def write_model(folder: str) -> None:
    """A random model, and a tokenizer with one token a byte."""
    torch.manual_seed(0)
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(names)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=raw).save_pretrained(folder)
    ends = {"bos_token_id": None, "eos_token_id": None}
    config = LlamaConfig(vocab_size=256, max_position_embeddings=4096, **SIZES, **ends)
    LlamaForCausalLM(config).save_pretrained(folder)


async def one(client: httpx.AsyncClient, url: str, number: int, load: Load) -> None:
    shared = [i % 256 for i in range(PROMPT_LEN // 2)]
    own = random.Random(number).choices(range(256), k=PROMPT_LEN - len(shared))
    body = {"prompt": shared + own, "max_tokens": NUM_NEW, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "temperature": 0}
    begin, first, num_new = time.perf_counter(), 0.0, 0
    async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                found = json.loads(line.removeprefix("data: "))
                first = first or time.perf_counter()
                num_new = found.get("usage", {}).get("completion_tokens", num_new)
    assert num_new == NUM_NEW, "it was not answered"
    load.first.append(first - begin)
    load.between.append((time.perf_counter() - first) / (NUM_NEW - 1))


async def measure(url: str, load: Load, num: int) -> None:
    drawn, tasks, begin = random.Random(0), [], time.perf_counter()
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as client:
        for number in range(num):
            tasks.append(asyncio.create_task(one(client, url, number, load)))
            await asyncio.sleep(drawn.expovariate(load.rate))
        await asyncio.gather(*tasks)
    load.seconds = time.perf_counter() - begin


def served(ranks: int, rates: list[float], num: int, folder: str) -> list[Load]:
    """Start a server of `ranks` ranks, and load it at each rate in turn."""
    command = [sys.executable, "-m", "dtensor_ring", "serve", "--model", folder, "--port", "0"]
    command += ["--mesh", f"cp={ranks}"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        found = re.search(r"http://\S+", server.stdout.readline())
        assert found is not None, "it did not start"
        asyncio.run(measure(found[0], Load(ranks, 100.0), 2))  # the first requests allocate
        loads = [Load(ranks, rate) for rate in rates]
        for load in loads:
            asyncio.run(measure(found[0], load, num))
    finally:
        server.terminate()
        server.wait()
    return loads


def show(loads: list[Load], console: Console) -> None:
    console.print(
        f"\nRequests of {PROMPT_LEN} tokens, of which {PROMPT_LEN // 2} are shared by all, with "
        f"{NUM_NEW} new ones, streamed.\nThey come at random times with a mean rate. A Llama of "
        f"{SIZES['num_hidden_layers']} layers and width {SIZES['hidden_size']}, float32.\n"
    )
    columns = ["first token, ms", "90 %", "next token, ms", "tokens/s"]
    table = table_of(["ranks", "requests/s"], columns)
    for load in loads:
        slow = quantiles(load.first, n=10)[-1] if len(load.first) > 1 else load.first[0]
        numbers = 1e3 * median(load.first), 1e3 * slow, 1e3 * median(load.between)
        speed = len(load.first) * NUM_NEW / load.seconds
        texts = [f"{x:,.0f}" for x in (*numbers, speed)]
        table.add_row(str(load.ranks), f"{load.rate:g}", *texts)
    console.print(table)


def main() -> None:
    quick = is_quick(__doc__)
    rates, num, worlds = ([8.0], 3, [1]) if quick else ([1.0, 2.0, 4.0], 24, [1, 2])
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder)
        loads = [load for ranks in worlds for load in served(ranks, rates, num, folder)]
    measured: dict[str, Any] = {"loads": [asdict(load) for load in loads]}
    title = "The server: time to the first token, by arrival rate"
    publish("serving_latency", title, quick, origin(), measured, lambda x: show(loads, x))


if __name__ == "__main__":
    main()
