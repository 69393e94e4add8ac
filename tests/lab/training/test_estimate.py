"""What `estimate` says, next to what a real step on two ranks allocates."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from parts.small_models import small_model
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import _disable_current_modes

from dtensor_ring import Mask, ZigZag, compare_strategies, describe_schedule, simulate_attention
from dtensor_ring.all_to_all.plan import all_to_all_plan
from dtensor_ring.all_to_all.ulysses import ulysses_attention
from dtensor_ring.command.main import main
from dtensor_ring.compute.kernels.kernel import Kernel
from dtensor_ring.lab.problem import TensorSizes
from dtensor_ring.lab.recorded import Cost, RankAttention
from dtensor_ring.lab.training.footprint import Footprint, Storages
from dtensor_ring.ops import ring_op
from dtensor_ring.planning.strategy import Strategy, as_strategy
from dtensor_ring.transport import transport
from dtensor_ring.transport.rotation import Packet
from dtensor_ring.transport.transport import BufferPool, TransferPolicy
from parallel_plans.huggingface import (
    ContextParallelCache,
    context_parallel_plan,
    ring_checkpoint_contexts,
)
from parallel_plans.models import load, read_config
from tests.pool import Pool, on_ranks
from tests.rings import Case, Ring, fake_group
from tests.scripts import run_script
from tests.test_public import ROOT

SEQ_LEN, BATCH, RANKS = 1024, 2, 2
STATES = "parameters", "gradients", "optimizer"


class Measured(NamedTuple):
    """Bytes of a step on a rank."""

    peak: int
    """By torch's own tracker, which sees what ops return, and not what they have inside."""
    parameters: int
    working: int
    """Of the attention that has most."""


def _measured(name: str, strategy: str, checkpoint: str, kernels_too: bool) -> Measured:
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    model = small_model(name, SEQ_LEN)
    plan = context_parallel_plan(model, "zigzag", strategy=strategy)
    model = parallelize_module(model, mesh, plan)
    if checkpoint != "none":
        model.train()
        how = {} if checkpoint == "full" else {"context_fn": ring_checkpoint_contexts}
        model.activation_checkpointing_enable({"use_reentrant": False, **how})
    tokens = torch.zeros(BATCH, SEQ_LEN, dtype=torch.long)

    def step() -> None:
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        step()
    peaks = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    model.zero_grad()
    loops: list[Storages] = []
    names = ("ring_forward", "ring_backward", "sole_forward", "sole_backward")
    counted = {x: _counted(getattr(ring_op, x), loops, kernels_too) for x in names}
    with patch.multiple(ring_op, **counted):
        step()
    return Measured(peaks["Total"], peaks["Parameter"], max(loop.peak for loop in loops))


def _counted(
    run: Callable[..., Any], loops: list[Storages], kernels_too: bool
) -> Callable[..., Any]:
    """A loop that is counted; of its kernel only what it returns, unless `kernels_too`."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        loops.append(Storages())
        bound = signature(run).bind(*args, **kwargs)
        if not kernels_too:
            bound.arguments["kernel"] = Uncounted(bound.arguments["kernel"], loops[-1])
        # Buffers of other calls would serve, which are not counted.
        with patch.object(transport, "BUFFERS", BufferPool()), loops[-1]:
            return run(*bound.args, **bound.kwargs)

    return counted


class Uncounted:
    """A kernel of which results are counted only."""

    def __init__(self, kernel: Kernel, loop: Storages) -> None:
        self._kernel, self._loop = kernel, loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._kernel, name)
        if name not in ("forward", "backward"):
            return found

        def run(*args: Any) -> Any:
            with _disable_current_modes():
                results = found(*args)
            self._loop.count(results)
            return results

        return run


@pytest.mark.parametrize(
    ("name", "strategy", "checkpoint", "kernels_too"),
    [
        ("llama", "ring", "none", True),
        ("llama", "ring", "full", None),
        ("llama", "ring", "attention", None),
        ("llama", "ulysses", "none", False),
        pytest.param("qwen3_moe", "ring", "none", True, marks=pytest.mark.repeats),
        pytest.param("qwen3_moe", "ring", "full", None, marks=pytest.mark.repeats),
        pytest.param("deepseek_v3", "ring", "none", None, marks=pytest.mark.repeats),
    ],
)
def test_a_step_takes_what_was_estimated(
    pool: Pool,
    name: str,
    strategy: str,
    checkpoint: str,
    kernels_too: bool | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With what kernels have inside, or without; by `reference` that is more than all else."""
    options = "--strategy", strategy, "--checkpoint", checkpoint, "--unsharded"
    found = _estimated(_written(name, tmp_path), capsys, *options)
    assert (found["attention_kept"] == 0) == (checkpoint == "full")
    for rank in pool.run(RANKS, _measured, name, strategy, checkpoint, bool(kernels_too)):
        assert found["parameters"] == rank.parameters
        assert found["peak"] - found["optimizer"] == pytest.approx(rank.peak, rel=0.01)
        if kernels_too is not None:
            assert found["attention_working"] == pytest.approx(rank.working, rel=0.10)


def test_messages_are_those_of_the_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _written("llama", tmp_path)
    loss = {
        "messages": 2,
        "sent": 8,
        "received": 8,
    }  # a float32 to the other rank, and its gradient
    for strategy in ("ring", "all_gather", "ulysses"):
        found = _estimated(path, capsys, "--strategy", strategy)
        (attention,) = found["attentions"]
        passes = _costs_of_the_last(as_strategy(strategy, RANKS))
        for name in ("sent", "received", "messages"):
            each = sum(getattr(x, name) for x in passes)
            expected = attention["calls"] * each + loss[name]
            assert found["messages"][name] == expected, (strategy, name)


def test_a_message_that_grows_is_counted_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header of 16 bytes, which only the transport knows: all three commands count it."""
    path, before = _written("llama", tmp_path), {}

    def told() -> dict[str, tuple[int, int]]:
        asked: Any = Mask.causal(), SEQ_LEN, RANKS
        (row,) = compare_strategies(*asked, strategies=["ring"]).rows
        messages = _estimated(path, capsys, "--strategy", "ring")["messages"]
        both = row.forward + row.backward
        return {
            "compare": (both.sent, both.messages),
            "estimate": (messages["sent"], messages["messages"] - 2),  # without those of the loss
            "simulate": (sum(simulate_attention(*asked).num_bytes), both.messages),
        }

    before, original = told(), Packet.messages

    def longer(self: Packet, is_apart: bool) -> list[Tensor]:
        header = torch.empty(16, dtype=torch.uint8, device="meta")
        return [torch.cat([header, x.view(torch.uint8)]) for x in original(self, is_apart)]

    monkeypatch.setattr(Packet, "messages", longer)
    for name, (sent, count) in told().items():
        assert count == before[name][1] > 0
        assert sent == before[name][0] + 16 * count, name


def _costs_of_the_last(strategy: Strategy) -> tuple[Cost, Cost]:
    """Forward and backward of an attention of the demo model."""
    plans = describe_schedule("zigzag", Mask.causal(), SEQ_LEN, RANKS, strategy=strategy.spec).plans
    where = ZigZag(), ZigZag(), strategy.heads, RANKS - 1, RANKS, SEQ_LEN
    exchange = all_to_all_plan(*where) if strategy.heads > 1 else None
    sizes = TensorSizes((4, 2), (32, 32), BATCH, *(torch.float32,) * 3)
    return RankAttention(plans[-1], exchange, sizes).costs()


@pytest.mark.parametrize(
    ("name", "cache_dtype"),
    [
        ("llama", "own"),
        ("gemma3", "int8"),
        pytest.param("deepseek_v3", "fp8", marks=pytest.mark.repeats),
    ],
)
def test_a_cache_takes_what_was_estimated(
    pool: Pool, name: str, cache_dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the byte: layers that see everything, windows, latents."""
    found = _estimated(_written(name, tmp_path), capsys, "--cache-dtype", cache_dtype)
    *_, last = pool.run(RANKS, _cached, name, None if cache_dtype == "own" else cache_dtype)
    assert found["cache"] == last
    assert _estimated(_written(name, tmp_path), capsys)["cache"] is None


@torch.no_grad()
def _cached(name: str, cache_dtype: str | None) -> int:
    """Bytes of a cache on this rank."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("cp",))
    model = small_model(name, SEQ_LEN)
    model = parallelize_module(model, mesh, context_parallel_plan(model, cache_dtype=cache_dtype))
    cache = ContextParallelCache(model)
    model(torch.zeros(BATCH, SEQ_LEN, dtype=torch.long), cache=cache, logits_to_keep=1)
    return cache.usage().held[mesh.get_local_rank()]


def test_parameters_are_sharded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over dp_shard and cp together, also where dp_shard is not named."""
    path = _written("llama", tmp_path)
    whole = _estimated(path, capsys, "--unsharded")
    assert whole["gathered"] == 0
    layer = 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352 + 2 * 128)
    running = [_estimated(path, capsys, "--unsharded", "--offload", "optimizer")["peak"]]
    for mesh, ranks in (("cp=2", 2), ("cp=2,dp_shard=2,dp_replicate=3", 4)):
        found = _estimated(path, capsys, "--mesh", mesh)
        for name in STATES:
            assert found[name] == whole[name] // ranks
        assert found["gathered"] == 4 * (2 * 256 * 128 + 128) + 3 * layer
        far = _estimated(path, capsys, "--mesh", mesh, "--offload", "optimizer")
        running.append(far["peak"] - far["gathered"])
        # Only those gradients count that are there in the fullest moment.
        beside = found["peak"] - far["peak"] - found["parameters"] - found["optimizer"]
        assert 0 <= beside <= found["gradients"]
    assert len({*running}) == 1


def test_whether_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Into 95 % of what is given, of a machine, or of an h100; in the same dtype everywhere."""
    path = _written("llama", tmp_path)
    command = ["estimate", "--model", str(path), "--seq-len", str(SEQ_LEN), "--mesh", "dp=2,cp=2"]
    for options, said in (
        ((), "fits                 into 76.0 GiB that a step may take of h100"),
        (("--machine", "h200"), "GiB that a step may take of h200"),
        (("--memory", "0.01"), "does not fit needs 0.0 GiB, and a step may take 0.0 GiB of a dev"),
    ):
        assert main(load, [*command, *options]) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert " ".join(said.split()) in printed
        assert "dtype of layers bfloat16" in printed
        assert "dp_shard 2 x cp 2" in printed
    assert main(load, [*command, "--memory", "0.01", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["capacity"] == int(0.0095 * 2**30) < found["peak"]
    assert "needs" in found["why_not"]


def test_what_goes_to_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _written("llama", tmp_path)
    full = _estimated(path, capsys, "--checkpoint", "full")
    inputs = BATCH * SEQ_LEN // RANKS * 128 * 4
    far = _estimated(path, capsys, "--checkpoint", "full", "--offload", "checkpoints")
    assert (full["host"], far["host"]) == (0, 4 * inputs)
    # One that is there for its layer, and three on their way: four layers have no others.
    assert full["others_kept"] == far["others_kept"]
    assert full["peak"] == pytest.approx(far["peak"], rel=0.10)
    results = _estimated(path, capsys, "--checkpoint", "attention")["attention_kept"]
    both = _estimated(path, capsys, "--checkpoint", "attention", "--offload", "checkpoints")
    assert both["host"] == 4 * inputs + results
    assert both["attention_kept"] == results // 2  # of two layers of four
    without = _estimated(path, capsys, "--offload", "optimizer")
    states = sum(full[name] for name in STATES)
    assert without["host"] == states
    assert all(without[name] == 0 for name in STATES)
    # But for gradients, all of which are not there yet in the fullest moment.
    beside = _estimated(path, capsys)["peak"] - without["peak"]
    assert states - full["gradients"] <= beside <= states


def test_eight_bits_travel(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _written("llama", tmp_path)
    plain, rounded = (_estimated(path, capsys, *x) for x in ((), ("--kv-dtype", "int8")))
    assert rounded["messages"]["sent"] < plain["messages"]["sent"]


def test_a_config_of_torchtitan() -> None:
    if not HAS_TORCHTITAN:
        pytest.skip("torchtitan is not installed")
    model = "parallel_plans.torchtitan.config_registry:llama3_debugmodel_ring"
    options = ("--model", model, "--seq-len", 4096, "--mesh", "cp=4")
    (run,) = run_script("dtensor_ring", "estimate", *options, cwd=ROOT)
    assert "6 x 16 heads over 16, head dim 16, 3 hops" in run.printed
    assert "Llama3Model" in run.printed


MODERN_BERT = small_model("modernbert", 64).config.to_json_string(use_diff=False)
HAS_TORCHTITAN = find_spec("torchtitan") is not None
NO_CONFIG = "is not a config function of torchtitan" if HAS_TORCHTITAN else "torchtitan>=0.3.0,<0.4"


def edited(**changes: Any) -> str:
    """The config of a small llama with other entries."""
    return json.dumps(small_model("llama", 64).config.to_dict() | changes, default=str)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ("[1]", (), "is not the config.json of a model of transformers"),
        (edited(num_attention_heads=33, head_dim=None), (), "33"),
        (edited(hidden_size=None), (), "hidden_size of llama must be a whole number from 1"),
        (edited(hidden_size="128"), (), "hidden_size of llama must be a whole number from 1"),
        (edited(hidden_size=4096.5), (), "hidden_size of llama must be a whole number from 1"),
        (edited(layer_types=["foo"] * 4), (), "foo"),
        (edited(num_key_value_heads=0), (), "num_key_value_heads of llama must be a whole number"),
        (edited(rope_scaling={"rope_type": "x", "factor": 1}), (), "makes no model of"),
        (edited(vocab_size=0), (), "vocab_size of llama must be a whole number from 1"),
        (edited(num_hidden_layers=10**9), (), "must be a whole number from 1 to 4,096"),
        ("[" * 200_000, (), "is not JSON"),
        ('{"model_type": "llamas"}', (), "is not the config.json of a model of transformers"),
        ('{"model_type": "resnet"}', (), "a training step of a language model"),
        (
            '{"model_type": "mamba", "num_hidden_layers": 2}',
            (),
            "has no attention over its sequence",
        ),
        (None, (), "there is no file or folder"),
        (None, ("--model", "nobody:config"), NO_CONFIG),
        ("", ("--layout", "zag"), "unknown layout 'zag'"),
        (MODERN_BERT, ("--cache-dtype", "int8"), "that generate have; leave --cache-dtype out"),
        ("", ("--strategy", "ulysses:3"), "do not divide"),
        ("", ("--offload", "checkpoints"), "offload of checkpoints needs checkpoint 'full'"),
        ("", ("--offload", "gradients"), "offload takes checkpoints and optimizer"),
        ("", ("--longest", "--checkpoint", "full"), "so leave --checkpoint out"),
        ("", ("--longest", "--seq-len", "63"), "63 tokens cannot be divided over the 2 ran"),
        ("", ("--longest", "--machine", "h1000"), "machine 'h1000' is neither a file"),
        (MODERN_BERT, ("--longest",), "sees tokens ahead"),
    ],
)
def test_what_cannot_be_estimated_is_one_line(
    config: str | None,
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.json"
    if config is not None:
        path.write_text(config or small_model("llama", 64).config.to_json_string(use_diff=False))
    command = ["estimate", "--model", str(path), "--seq-len", "64", "--mesh", "cp=2", *options]
    assert main(load, command, read=read_config) == 2
    *_, line = capsys.readouterr().err.splitlines()  # after what transformers logs
    assert message in line


def _written(name: str, folder: Path) -> Path:
    path = folder / "config.json"
    path.write_text(small_model(name, SEQ_LEN).config.to_json_string(use_diff=False))
    return path


def _estimated(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    command = ["estimate", "--model", str(path), "--seq-len", str(SEQ_LEN), "--mesh"]
    command += [f"cp={RANKS}", "--batch", str(BATCH), "--dtype", "float32", *options]
    capsys.readouterr()
    assert main(load, [*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
@pytest.mark.parametrize("strategy", ["ring", "ulysses", "ulysses:2"])
@on_ranks(1)
def test_messages_of_a_policy(strategy: str, kv_dtype: str | None) -> None:
    """What an attention without memory counts is what a comparison counts, to the byte."""
    policy, dtype, rank = TransferPolicy(kv_dtype=kv_dtype), torch.bfloat16, 1
    ring = Ring(ZigZag(), 4, 800, Mask.causal(), strategy=strategy)
    case = Case(ring, dtype, (8, 4), head_dims=(64, 64), policy=policy)
    before, attend, exchange = replace(case, ring=replace(ring, strategy="ring")), case.attend, None
    if strategy != "ring":
        heads = as_strategy(strategy, 4).heads
        attend = lambda *x: ulysses_attention(*x, case.call(), with_lse=False)  # noqa: E731
        exchange = all_to_all_plan(ring.layout, ring.layout, heads, rank, 4, 800)
    with fake_group(4, rank):
        inputs = [x.detach().to("meta").requires_grad_() for x in before.shards(rank)]
        with Footprint() as step:
            out, _ = attend(*inputs)
            out.backward(torch.empty_like(out))
    sums = policy.sum_dtype(dtype)
    sizes = TensorSizes((8, 4), (64, 64), 2, dtype, policy.dtype_of_keys(dtype), sums)
    forward, backward = RankAttention(ring.plans()[rank], exchange, sizes).costs()
    # Buffers and tensors of an all-to-all are not here.
    held = backward.held if strategy == "ring" else step.messages.held
    assert step.messages == replace(forward + backward, held=held)
