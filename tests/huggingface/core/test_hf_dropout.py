"""Dropout of models under the plan: each token has its own, and ranks stay in step."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch._dynamo.backends.registry import lookup_backend
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from dtensor_ring.dtensor import axis as axis_module
from parallel_plans.huggingface import ring_checkpoint_contexts
from parallel_plans.huggingface.core.random_state import RankDropout, RankState
from tests.dense import largest
from tests.huggingface.planned import under_plan
from tests.pool import Pool, on_ranks

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
CONTEXTS = {"use_reentrant": False, "context_fn": ring_checkpoint_contexts}


def planned(model: Any, layout: str = "zigzag", size: int | None = None) -> Any:
    """The model under its plan, in training, over the last axis of the mesh."""
    size = size or dist.get_world_size()
    shape = dist.get_world_size() // size, size
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("tp", "cp"))
    under_plan(model, layout, mesh=mesh["cp"])
    return model.train()


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"intermediate_size": 24, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**SIZES | sizes | options))


def opt(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"ffn_dim": 24, "word_embed_proj_dim": 16, "attention_dropout": 0.0}
    return OPTForCausalLM(OPTConfig(**SIZES | sizes | {"dropout": 0.5} | options))


def with_lora() -> Any:
    adapters = LoraConfig(r=2, lora_dropout=0.5, target_modules=["q_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of peft: transformers has renamed a method
        return get_peft_model(llama(hidden_size=256), adapters).get_base_model()


def kept_by(model: Any, *calls: Any) -> list[Tensor]:
    """Which numbers of a tensor dropout kept, by call of it."""
    kept: list[Tensor] = []
    plain = F.dropout

    def recorded(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        kept.append(plain(torch.ones_like(x), *args, **kwargs) != 0)
        return x * kept[-1]

    with patch.object(F, "dropout", recorded):
        for call in calls:
            call(model)
    return kept


def forward(model: Any, batch: int = 2, length: int = 32) -> Tensor:
    ids = torch.arange(batch * length).view(batch, length) % 64
    return model(input_ids=ids, labels=ids).loss


def chi_square(one: Tensor, other: Tensor) -> float:
    """Of independence of two masks with one half of each value: with one degree of freedom."""
    table = (
        torch.stack([(x & y).sum() for x in (one, ~one) for y in (other, ~other)]).double()
        / one.numel()
    )
    return float(one.numel() * ((table - 0.25) ** 2 / 0.25).sum())


# The same graphs; Inductor takes half a minute for each.
BACKENDS = "aot_eager", pytest.param("inductor", marks=pytest.mark.repeats)


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.repeats), 4])
@on_ranks()
def test_masks_of_any_two_ranks_are_independent() -> None:
    """Over a million numbers of each rank, and of two forwards of one rank."""
    model = planned(with_lora())
    length = 512 * dist.get_world_size()
    torch.manual_seed(1)
    with torch.no_grad():
        first, _, second, _ = kept_by(model, *[lambda x: forward(x, 8, length)] * 2)
    assert first.numel() == 2**20
    everyone = [torch.empty_like(first) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, first)
    others = [x for rank, x in enumerate(everyone) if rank != dist.get_rank()]
    # Three tests of the sums of four cells: 1e-6 of all masks are above 31.
    assert largest(chi_square(first, x) for x in (*others, second)) < 31
    _check_in_step()


def _check_in_step() -> None:
    """What comes next is the same on all ranks."""
    after = torch.rand(4)
    everyone = [torch.empty_like(after) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, after)
    assert all(torch.equal(x, after) for x in everyone)


@on_ranks(4)
def test_ranks_of_tensor_parallelism_agree() -> None:
    """Ranks 0 and 2 share tokens, as 1 and 3 do."""
    model = planned(opt(), size=2)
    torch.manual_seed(1)
    kept = kept_by(model, forward)
    flat = torch.cat([x.flatten() for x in kept])
    everyone = [torch.empty_like(flat) for _ in range(4)]
    dist.all_gather(everyone, flat)
    rank = dist.get_rank()
    assert [torch.equal(flat, x) for x in everyone] == [x % 2 == rank % 2 for x in range(4)]
    _check_in_step()


@pytest.mark.parametrize("attention_dropout", [0.0, 0.3])
@on_ranks(2)
def test_recomputation_gives_the_same_bits(attention_dropout: float) -> None:
    found = []
    for how in (None, {"use_reentrant": False}, {"use_reentrant": True}, CONTEXTS):
        model = planned(opt(attention_dropout=attention_dropout))
        if how is not None:
            model.activation_checkpointing_enable(how)
        torch.manual_seed(1)
        forward(model).backward()
        found.append([x.grad for x in model.parameters()])
        _check_in_step()
    for grads in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(grads, found[0], strict=True))


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        ("zigzag", 6),
        *(pytest.param(x, 50, marks=pytest.mark.repeats) for x in ("zigzag", "striped")),
    ],
)
def test_attention_dropout_trains_alike_on_any_number_of_ranks(
    pool: Pool, layout: str, steps: int
) -> None:
    one, two, four = (pool.run(size, _loss_curve, layout, steps)[0] for size in (1, 2, 4))
    assert max(one) - min(one) > 0.01 * steps, "it learns"
    for losses in (two, four):
        assert largest(abs(x - y) for x, y in zip(losses, one, strict=True)) < 1e-5
    without = pool.run(1, _loss_curve, layout, steps, 0.0)[0]
    assert largest(abs(x - y) for x, y in zip(without, one, strict=True)) > 1e-3


def _loss_curve(layout: str, steps: int, rate: float = 0.2) -> list[float]:
    """Losses of steps; by SGD, as Adam's first steps turn rounding into full ones."""
    model = planned(llama(attention_dropout=rate), layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    torch.manual_seed(2)
    losses = []
    for _ in range(steps):
        loss = forward(model)
        loss.backward()
        for x in model.parameters():
            dist.all_reduce(x.grad.div_(dist.get_world_size()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_each_layer_drops_weights_of_its_own() -> None:
    """Two layers and two forwards have four seeds, the same on all ranks; none in evaluation."""
    model = planned(llama(attention_dropout=0.3))
    torch.manual_seed(3)
    seeds: list[int] = []
    plain = axis_module.SequenceAxis.attention

    def attend(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("dropout_p"):
            seeds.append(int(kwargs["dropout_seed"]))
        return plain(*args, **kwargs)

    with patch.object(axis_module.SequenceAxis, "attention", attend):
        forward(model)
        forward(model)
        forward(model.eval())
    assert len(set(seeds)) == len(seeds) == 4
    everyone: list[Any] = [None] * 2
    dist.all_gather_object(everyone, seeds)
    assert everyone[0] == everyone[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("is_checkpointed", [pytest.param(False, marks=pytest.mark.repeats), True])
@on_ranks(2)
def test_compiled_models_drop_by_rank(backend: str, is_checkpointed: bool) -> None:
    """In one graph no dropout is left to the random state, which is the same on all ranks."""
    model = planned(opt(num_hidden_layers=1, attention_dropout=0.2))
    if is_checkpointed:
        model.activation_checkpointing_enable({"use_reentrant": False})
    targets: list[Any] = []

    def compile_graph(graph: Any, inputs: Any) -> Any:
        parts = [x for x in graph.modules() if hasattr(x, "graph")]
        targets.extend(node.target for part in parts for node in part.graph.nodes)
        return lookup_backend(backend)(graph, inputs)

    run = torch.compile(model, fullgraph=True, backend=compile_graph)
    torch.manual_seed(4)
    losses = [forward(run) for _ in range(2)]
    sum(losses).backward()
    assert losses[0].item() != losses[1].item()
    assert torch.randint in targets
    assert F.dropout not in targets
    _check_in_step()


@on_ranks(2)
def test_compiled_layers_drop_by_rank() -> None:
    """One graph serves all layers, whose numbers are its inputs; seeds come from the state."""
    # Dynamo looks for a gradient of what it compiles, be it a leaf or not.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    model = planned(opt(attention_dropout=0.2, num_hidden_layers=3))
    counter = CompileCounterWithBackend("aot_eager")
    for layer in model.model.decoder.layers:
        layer.compile(fullgraph=True, backend=counter)
    torch.manual_seed(4)
    losses = [forward(model) for _ in range(2)]
    sum(losses).backward()
    assert losses[0].item() != losses[1].item()
    assert counter.frame_count == 1
    _check_in_step()


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_in_graphs_is_that_of_a_rank(backend: str) -> None:
    def run(rank: int, x: Tensor) -> Tensor:
        with RankDropout(rank):
            return F.dropout(x, 0.5)

    compiled = torch.compile(run, fullgraph=True, backend=backend)
    x = torch.ones(2**20, requires_grad=True)
    kept = []
    for rank in (0, 1, 0, 5):
        torch.manual_seed(5)
        out = compiled(rank, x)
        (grad,) = torch.autograd.grad(out.sum(), x)
        assert torch.equal(grad, out)
        assert set(out.unique().tolist()) == {0.0, 2.0}
        kept.append(out != 0)
    torch.manual_seed(6)
    kept.append(compiled(0, x) != 0)
    first, other, again, third, another = kept
    assert torch.equal(first, again)
    assert largest(chi_square(first, y) for y in (other, third, another)) < 31


def test_the_state_is_that_of_before_and_goes_on() -> None:
    """After an error, too; and without a rank's own state a device is left alone."""
    torch.manual_seed(7)
    states = []
    for rank in (0, 1, 0):
        torch.manual_seed(7)
        with RankState(rank, torch.device("cpu")):
            inside = torch.rand(8)
        states.append((inside, torch.rand(8)))
    (one, after), (two, after_two), (again, _) = states
    assert torch.equal(one, again)
    assert torch.equal(after, after_two)
    assert not torch.equal(one, two)
    assert not torch.equal(one, after)
    torch.manual_seed(7)
    with pytest.raises(RuntimeError, match="uniform_"), RankState(1, torch.device("cpu")):
        torch.empty(3).uniform_(2, 1)
    assert torch.equal(torch.rand(8), after)


@on_ranks(2)
def test_refused() -> None:
    with pytest.raises(ValueError, match=r"layerdrop=0\.1 skips layers .* with layerdrop=0"):
        forward(planned(opt(layerdrop=0.1)))
    model = planned(llama(attention_dropout=0.3))
    cached = pytest.raises(ValueError, match=r"drops attention weights, 0\.3, in a forward with a")
    with torch.no_grad(), cached:
        model(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=True)
    model = planned(llama(attention_dropout=0.3))
    named = llama(attention_dropout=0.3)
    under_plan(named, "zigzag", kernel="cpu_flash")
    with pytest.raises(ValueError, match=r"'cpu_flash' cannot .* by the positions"):
        forward(named.train())
