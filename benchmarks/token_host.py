"""Measure what a decoded token of a Hugging Face model costs the host, beside an earlier commit.

    python benchmarks/token_host.py

A Llama of 8 layers that are next to nothing decodes on rank 0 of 1 and of 2. Attention's kernel and
messages take no time: the kernel returns zeros, and the other rank is played, which sends back what
it gets, with the record of the call. The same script measures a checkout of the earlier commit and
this tree. Each runs in its own process, and they take turns. The time is the CPU time of the main
thread: the least of all tokens of a process, and the median of several starts, which differ by some
5 percent. ``--base`` names another commit. With ``--quick`` there is one start, and the card goes
to ``out``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

BASE = "fa22c993"
"""Before a token was bound once for all layers."""
WORLD_SIZES = (1, 2)
PROMPT, TOKENS, WARM_UP = 63, 50, 5
STARTS, ROUNDS, FEW = 6, 3, 1
MEASURED = ("stock", "ours")
ROOT = Path(__file__).resolve().parent.parent


class Arrived:
    """A message that was there at once."""

    def wait(self, *_: Any) -> bool:
        return True


class Peers:
    """Plays the other ranks of this process's group: each sends back what it gets."""

    def __init__(self, world_size: int) -> None:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        from dtensor_ring.agreement.group_state import group_state_of
        from dtensor_ring.transport.transport import ProcessGroupTransport

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        self._groups = dist.distributed_c10d._world.pg_map
        self._state_of, self._posted, self._arrived = group_state_of, [], Arrived()
        if world_size > 1:
            kind: Any = ProcessGroupTransport
            kind.receive_record = lambda _, message: self._receive(message)
            kind.send_record = lambda _, message: self._send(message)
            kind.keeps_tags = lambda *_: True

    def agree(self, compares: bool) -> None:
        """Let calls compare their records, or not: a ring's shards are not what was sent."""
        for group in self._groups:
            if group.size() > 1:
                self._state_of(group).sends_records = compares

    def _receive(self, message: Any) -> Arrived:
        self._posted.append(message.flat.data_ptr())
        return self._arrived

    def _send(self, message: Any) -> Arrived:
        while self._posted:
            num_bytes = message.flat.numel()
            ctypes.memmove(self._posted.pop(), message.flat.data_ptr(), num_bytes)
        return self._arrived


def llama() -> Any:
    """A language model of 8 layers whose kernels take next to no time."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**small, **heads, num_hidden_layers=8)).eval()


def least(model: Any, peers: Peers) -> float:
    """Milliseconds of the fastest token after a prompt."""
    import torch

    tokens, mask = torch.arange(1, 1 + PROMPT)[None], torch.ones(1, PROMPT, dtype=torch.long)
    seconds = []
    with torch.no_grad():
        peers.agree(compares=False)
        cache = model(input_ids=tokens, use_cache=True).past_key_values
        peers.agree(compares=True)
        for _ in range(TOKENS):
            mask = torch.cat([mask, mask.new_ones(1, 1)], 1)
            how = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
            since = time.thread_time()
            model(input_ids=tokens[:, :1], **how)
            seconds.append(time.thread_time() - since)
    return 1e3 * min(seconds[WARM_UP:])


def serve(world_size: int) -> None:
    """Measure one round for each line of the input."""
    import torch
    from instant import Instant
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import parallelize_module

    from dtensor_ring.compute.kernels.registry import register_kernel
    from parallel_plans.huggingface import context_parallel_plan

    torch.set_num_threads(1)
    register_kernel(Instant())
    peers, stock, ours = Peers(world_size), llama(), llama()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("cp",))
    parallelize_module(ours, mesh, context_parallel_plan(ours, kernel=Instant.name))
    for _ in sys.stdin:
        gc.collect()
        gc.disable()
        found = [least(model, peers) for model in (stock, ours)]
        gc.enable()
        print(json.dumps(dict(zip(MEASURED, found, strict=True))), flush=True)


@contextmanager
def served(tree: Path, world_size: int) -> Iterator[subprocess.Popen[str]]:
    """A process that measures the code of a tree."""
    command = [sys.executable, "-W", "ignore", __file__, "--serve", str(world_size)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(tree)}, **pipes) as process:
        yield process


def one_round(process: subprocess.Popen[str]) -> dict[str, float]:
    """Milliseconds of a token of each model."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    for line in process.stdout:
        if line.startswith("{"):
            return json.loads(line)
    raise RuntimeError("the process that measures has ended")


def compare(base: Path, world_size: int, starts: int) -> dict[str, Any]:
    """Times of a world size, by tree and model: the least of each start of the processes."""
    trees = {"base": base, "now": ROOT}
    found: dict[str, list[float]] = {f"{tree} {what}": [] for tree in trees for what in MEASURED}
    for _ in range(starts):
        with ExitStack() as stack:
            processes = {x: stack.enter_context(served(y, world_size)) for x, y in trees.items()}
            rounds = [
                {f"{tree} {what}": x for what, x in one_round(process).items()}
                for _ in range(ROUNDS)
                for tree, process in processes.items()
            ]
        for name, times in found.items():
            times.append(min(x[name] for x in rounds if name in x))
    return {"world_size": world_size, "milliseconds": found}


def report(console: Any, base: str, measurements: list[dict[str, Any]]) -> None:
    """Print medians of all starts, in Markdown."""
    from harness import table_of

    console.print(f"\nMilliseconds of a token on the host; the base is {base}.\n")
    numbers = "stock", "base", "now", "now / base", "least", "most", "over stock, now / base"
    table = table_of(("ranks",), numbers)
    for x in measurements:
        of = {name: median(times) for name, times in x["milliseconds"].items()}
        base_ours, ours, stock = of["base ours"], of["now ours"], of["now stock"]
        pairs = zip(x["milliseconds"]["now ours"], x["milliseconds"]["base ours"], strict=True)
        ratios = [a / b for a, b in pairs]
        ratio = ours / base_ours, min(ratios), max(ratios)
        over = (ours - stock) / (base_ours - of["base stock"])
        times = [f"{y:.2f}" for y in (stock, base_ours, ours, *ratio, over)]
        table.add_row(str(x["world_size"]), *times)
    console.print(table)


def main() -> None:
    """Compare this tree with a commit, or serve a process that does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds, written to out")
    parser.add_argument("--base", default=BASE, help="the commit to compare with")
    parser.add_argument("--serve", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    from harness import origin, publish

    about = origin()
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", options.base, "dtensor_ring", "parallel_plans"],
            cwd=ROOT,
            capture_output=True,
            check=True,
        ).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        starts = FEW if options.quick else STARTS
        measurements = [compare(Path(folder), size, starts) for size in WORLD_SIZES]
    show = partial(report, base=options.base, measurements=measurements)
    title = "What a decoded token costs the host"
    publish("token_host", title, options.quick, about, {"measurements": measurements}, show)


if __name__ == "__main__":
    main()
