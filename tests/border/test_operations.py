"""What users do with the outputs of planned models is right, or refused; so are their gradients."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._pytree import tree_leaves

from dtensor_ring import shard_sequence, unshard_sequence
from parallel_plans.huggingface import context_parallel_plan
from tests import families
from tests.border.operations import OPERATIONS, REFUSED, SHARDED, WHOLE
from tests.border.trying import HINTS, Answer, attempt, compiled_function_of, said
from tests.pool import Pool, on_ranks

MODELS = {
    "Llama": ("Llama", "ForCausalLM"),
    "hybrid": ("LFM2", "ForCausalLM"),
    "classifier": ("Llama", "ForTokenClassification"),
    "encoder": ("ModernBERT", "Model"),
}
"""Logits, those of layers with a state, classes of tokens, and hidden states."""
DERIVED: dict[str, Callable[[Any], Any]] = {
    "": lambda x: x,
    "x * 2": lambda x: x * 2,
    "x.float().double()": lambda x: x.float().double(),
    "x.log_softmax(-1)": lambda x: x.log_softmax(-1),
}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "gradients": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "compiled": nullcontext,
    "hook": nullcontext,
}


@dataclass(frozen=True)
class Cell:
    """A model that is called once, and where lines run on its output.

    Attributes:
        model: a name of `MODELS`.
        ranks: how many.
        length: of the sequence.
        layout: of the plan; `None` for its own.
        mode: a name of `MODES`.
        derived: what is made of the output first.
    """

    model: str
    ranks: int
    length: int
    layout: str | None
    mode: str = "gradients"
    derived: str = ""

    def __str__(self) -> str:
        parts = self.model, f"{self.length} on {self.ranks}", self.layout, self.mode, self.derived
        return ", ".join(str(part) for part in parts if part != "")


CELLS = [
    Cell("Llama", 3, 21, "zigzag"),
    Cell("hybrid", 2, 13, None),  # shards of other lengths than DTensor computes
    Cell("classifier", 3, 7, "contiguous", "inference", "x * 2"),
    Cell("encoder", 2, 12, "balanced", "hook"),
    Cell("classifier", 3, 2, "contiguous", "inference", "x * 2"),  # a rank has no token
    Cell("encoder", 2, 12, "striped", "compiled"),
]
"""Each model, number of ranks and layout once."""


def combinations() -> Iterator[Cell]:
    """All of them; a mode and a tensor that is derived for each, in turn."""
    count = 0
    for model in MODELS:
        for ranks in (2, 3):
            for length in (12, 13, 1, 2):
                for layout in ("zigzag", "striped", "contiguous", "balanced"):
                    if model == "hybrid" and layout == "balanced":
                        continue  # the plan refuses it
                    mode = list(MODES)[count % len(MODES)]
                    if mode == "compiled" and layout == "balanced":
                        mode = "no_grad"  # no graph shards a batch by its documents
                    derived = list(DERIVED)[count // len(MODES) % len(DERIVED)]
                    if length < ranks:
                        derived = ""  # it may be refused, see `_wrong`
                    yield Cell(model, ranks, length, layout, mode, derived)
                    count += 1


@pytest.mark.parametrize(("number", "cell"), [*enumerate(CELLS)], ids=str)
def test_each_line_is_right_or_refused(pool: Pool, number: int, cell: Cell) -> None:
    """The first has all lines; of the others one on 2 and one on 3 ranks has each of them."""
    lines = list(OPERATIONS)[number // 2 % 2 :: 2] if number else list(OPERATIONS)
    # What a graph returns is a sharded sequence as any other.
    assert_right(pool, cell, SOME if cell.mode == "compiled" else lines)


@pytest.mark.repeats
@pytest.mark.parametrize("cell", list(combinations()), ids=str)
def test_all_combinations(pool: Pool, cell: Cell) -> None:
    assert_right(pool, cell, list(OPERATIONS))


EXPRESSIONS = [line for line in OPERATIONS if not re.search(r" [-+*/]?= ", line)]
SOME = [
    *("x * 2", "x * mask[..., None]", "x.log_softmax(-1)", "x.transpose(0, 1)", "x.full_tensor()"),
    *("x[:, -1]", "x[:, index]", "x.mean(1)", "x.max()", "x.flip(1)", "x.unflatten(1, (1, -1))"),
    *("F.cross_entropy(x[:, :-1].flatten(0, 1), labels[:, 1:].flatten())", "F.mse_loss(x, other)"),
    *("x.repeat_interleave(2, 1)", "x.argmax(1)", "F.linear(x, weight)", "(x > 0).any(1)"),
]
"""Lines of each kind: right, right after a break of the graph, refused."""


def test_some_lines_within_a_graph(pool: Pool) -> None:
    for found in pool.run(2, verdicts_in_graphs, SOME):
        assert set(found.values()) == {SHARDED, WHOLE, REFUSED}, found


@pytest.mark.repeats
def test_no_line_within_a_graph_is_silent(pool: Pool) -> None:
    """PyTorch refuses some in its own words: of subclasses, no two outputs may be one memory."""
    for found in pool.run(2, verdicts_in_graphs, EXPRESSIONS):
        silent = {line: text for line, text in found.items() if text.startswith("silent")}
        assert not silent


@torch.no_grad()
def verdicts_in_graphs(lines: list[str]) -> dict[str, str]:
    """What came of compiled lines."""
    stock = torch.arange(2 * 13 * 8.0, dtype=torch.float64).view(2, 13, 8).sin()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    x = shard_sequence(stock, mesh, 1, layout="zigzag")
    return {line: attempt(line, x, stock, compiled_function_of).verdict for line in lines}


def assert_right(pool: Pool, cell: Cell, lines: list[str]) -> None:
    by_rank = pool.run(cell.ranks, wrong_lines, cell, lines)
    wrong = [(rank, *one) for rank, found in enumerate(by_rank) for one in found.items()]
    assert not wrong, "\n".join(f"rank {rank}: {line}: {text}" for rank, line, text in wrong)


def wrong_lines(cell: Cell, lines: list[str]) -> dict[str, str]:
    """What came of lines that are neither right nor refused as the table says, on this rank."""
    with MODES[cell.mode](), warnings.catch_warnings():
        # PyTorch warns of the variance of no elements, which a rank without tokens has, and of one.
        warnings.filterwarnings("ignore", r"var\(\): degrees of freedom is <= 0")
        warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1")
        # Dynamo looks for a gradient of what it compiles, be it a leaf or not.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        x, stock, weights = outputs(cell)
        answers = {line: attempt(line, x, stock) for line in lines}
        may_refuse = cell.length < cell.ranks or cell.mode == "inference"
        wrong = {line: _wrong(line, answer, may_refuse) for line, answer in answers.items()}
        if cell.mode in ("gradients", "compiled"):
            wrong |= {
                line: _wrong_gradient(answer, *weights, may_refuse=cell.length < cell.ranks)
                for line, answer in answers.items()
                if answer.is_right and not wrong[line]
            }
    return {line: text for line, text in wrong.items() if text}


def outputs(cell: Cell) -> tuple[Any, Tensor, tuple[Tensor, Tensor]]:
    """The output of the planned model, that of the stock model, and a weight of each."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    # In double: what is not rounded alike would sort, and round, otherwise.
    # One layer makes an output like that of many; a hybrid has one of each kind.
    few = {} if cell.model == "hybrid" else {"num_hidden_layers": 1}
    ours, stock = (families.small_model(*MODELS[cell.model], **few).double() for _ in range(2))
    parallelize_module(ours, mesh, context_parallel_plan(ours, cell.layout))
    tokens = torch.arange(2 * cell.length).view(2, cell.length) % 29 + 2
    derive, kept = DERIVED[cell.derived], []
    if cell.mode == "hook":
        ours.register_forward_hook(lambda module, args, output: kept.append(derive(output[0])))
    called = torch.compile(ours, backend="aot_eager") if cell.mode == "compiled" else ours
    output = called(input_ids=tokens, use_cache=False)[0]
    x = kept[0] if kept else derive(output)
    expected = derive(stock(input_ids=tokens, use_cache=False)[0])
    weights = [model.get_input_embeddings().weight for model in (ours, stock)]
    return x, expected, (weights[0], weights[1])


def _wrong(line: str, answer: Answer, may_refuse: bool) -> str:
    """What came of a line, if it is wrong.

    DTensor takes a dimension shorter than the ranks for one that cannot be sharded, and `one_hot`
    is computed otherwise in inference mode: there a line may be refused that is right otherwise.
    """
    allowed = {OPERATIONS[line]}
    if may_refuse or isinstance(answer.expected, Exception):
        allowed.add(REFUSED)
    return "" if answer.verdict in allowed else f"{answer.verdict}, not {OPERATIONS[line]}"


def _wrong_gradient(answer: Answer, weight: Tensor, stock_weight: Tensor, may_refuse: bool) -> str:
    """Whether a loss by the result has another gradient than on one process."""
    loss, expected = _loss(answer.value), _loss(answer.expected)
    if expected is None or loss is None:
        return "" if loss is expected else "it has no gradient"
    try:
        (found,) = torch.autograd.grad(loss, weight, retain_graph=True)
    except Exception as error:
        return "" if may_refuse and HINTS.search(said(error)) else f"gradient: {said(error)[:200]}"
    (gradient,) = torch.autograd.grad(expected, stock_weight, retain_graph=True)
    dist.all_reduce(found)
    leaves = [x for x in tree_leaves(answer.value) if isinstance(x, Tensor)]
    tolerance = 5e-2 if any(x.dtype == torch.bfloat16 for x in leaves) else 1e-4
    error = (found / dist.get_world_size() - gradient).abs().max()
    is_near = error <= tolerance * (1e-6 + gradient.abs().max())
    return "" if is_near else f"gradient: off by {error:.2g} of {gradient.abs().max():.2g}"


def _loss(value: Any) -> Any:
    """The sum of all cubes, which no normalization makes constant; it weighs tokens by number."""
    leaves = [x for x in tree_leaves(value) if isinstance(x, Tensor) and x.requires_grad]
    if not leaves:
        return None
    if any(isinstance(x, DTensor) for x in leaves):
        return sum((x * x * x).sum() for x in leaves)
    return sum(x.double().pow(3).sum() for x in leaves)


TOKENS = torch.arange(26).view(2, 13) % 29 + 2
GRADIENT = torch.arange(2 * 13 * 32.0).view(2, 13, 32).sin().double()


def loss_of(x: Any) -> Tensor:
    return F.cross_entropy(x.transpose(1, 2), TOKENS * 7 % 32)


def kept(x: Any, weight: Tensor) -> list[Any]:
    x.retain_grad()
    loss_of(x).backward()
    return [x.grad, weight.grad]


def asked_for(x: Any, weight: Tensor) -> list[Any]:
    (of_output,) = torch.autograd.grad(loss_of(x), x, retain_graph=True)
    (of_weight,) = torch.autograd.grad(x, weight, GRADIENT)
    return [of_output, of_weight]


def given(x: Any, weight: Tensor) -> list[Any]:
    torch.autograd.backward([x], [GRADIENT])
    return [weight.grad]


def cached(x: Any, weight: Tensor) -> list[Any]:
    """Cut the graph at the output, as caches of gradients do."""
    cut = x.detach().requires_grad_()
    loss_of(cut).backward()
    x.backward(cut.grad)
    return [cut.grad, weight.grad]


@pytest.mark.parametrize("way", [kept, asked_for, given, cached])
@on_ranks(2)
def test_gradients(way: Callable[[Any, Tensor], list[Any]]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    ours, stock = (families.small_model("Llama", "ForCausalLM").double() for _ in range(2))
    parallelize_module(ours, mesh, context_parallel_plan(ours, "zigzag"))
    found, expected = (
        way(model(input_ids=TOKENS, use_cache=False)[0], model.get_input_embeddings().weight)
        for model in (ours, stock)
    )
    for one, other in zip(found, expected, strict=True):
        # Sums in the head are float32.
        torch.testing.assert_close(_whole(one), other, rtol=1e-5, atol=1e-6 * other.abs().max())


def _whole(gradient: Any) -> Tensor:
    """A gradient of tokens as a whole; one of a weight, averaged over the ranks."""
    if isinstance(gradient, DTensor):
        return unshard_sequence(gradient.detach(), 1)
    total = gradient.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
