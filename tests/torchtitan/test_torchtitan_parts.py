"""The parts of the torchtitan plan that need no training run: documents, configs, refusals."""

from __future__ import annotations

import doctest
import importlib
import inspect
import io
import pkgutil
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.utils import _to_kwargs

from dtensor_ring import SequenceAxis, TransferPolicy
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.transport import transport
from dtensor_ring.transport.transport import BufferPool
from examples.torchtitan_cpu import use_cpu
from tests.layouts import LAYOUTS
from tests.pool import Pool, on_ranks
from tests.rings import fake_group
from tests.test_public import ROOT
from tests.traced_bytes import Peak, peak_of, slope_of

pytestmark = pytest.mark.skipif(not find_spec("torchtitan"), reason="needs torchtitan")

POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 6], [*range(16)]])
NAMES = [layout.spec for layout in LAYOUTS]
CU_SEQLENS = [[0, 5, 8, 9, *[16] * 13], [0, *[16] * 16]]


def _on_cpu(function: Callable[..., Any], *args: Any) -> Any:
    """Call what imports torchtitan, which has to be set to the CPU before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchtitan's own, as it is imported
        use_cpu()
        return function(*args)


@on_ranks(1, around=_on_cpu)
def test_documents_stay_on_the_cpu() -> None:
    """fully_shard moves what a model is called with to the device, on a GPU, by this function."""
    from parallel_plans.torchtitan import Documents

    bounds = torch.tensor([0, 4], dtype=torch.int32)
    given = {"positions": POSITIONS, "attention_masks": Documents(bounds, bounds)}
    _, (moved,) = _to_kwargs((), given, torch.device("meta"), False)
    assert moved["positions"].is_meta
    assert moved["attention_masks"].cu_seqlens is bounds
    assert moved["attention_masks"].runs is bounds


def same_order(one: str, other: str, world_size: int) -> bool:
    """Short sequences are sharded alike by some layouts."""
    if "balanced" in (one, other):
        return False
    positions = (
        [as_layout(name).positions(rank, world_size, 16) for rank in range(world_size)]
        for name in (one, other)
    )
    return next(positions) == next(positions)


def _own_tokens(layout: str) -> list[list[int]]:
    """The places of this rank's tokens, by row."""
    from parallel_plans.torchtitan.inner_attention import gather_documents, own_tokens

    rank, world_size, mesh = dist.get_rank(), dist.get_world_size(), init_device_mesh("cpu", (2,))
    batch = {"input": 10 * POSITIONS, "positions": POSITIONS}
    own = own_tokens(batch, layout, rank, world_size)
    assert own.documents.cu_seqlens.tolist() == CU_SEQLENS
    assert torch.equal(own.of(batch["input"]), 10 * own.of(POSITIONS))
    assert (own.documents.runs is None) == (layout != "balanced")
    local = own.of(POSITIONS)
    for other in NAMES:
        if same_order(other, layout, world_size):
            found = gather_documents(local, as_layout(other), mesh)
            assert found.cu_seqlens.tolist() == CU_SEQLENS
        else:
            with pytest.raises(ValueError, match=f"were not sharded {other}"):
                gather_documents(local, as_layout(other), mesh)
    with pytest.raises(ValueError, match="were not sharded balanced"):
        gather_documents(local, as_layout("balanced"), mesh)
    return own.of(torch.arange(16).expand(2, -1)).tolist()


@pytest.mark.parametrize("layout", [*NAMES, "balanced"])
def test_documents(pool: Pool, layout: str) -> None:
    held = pool.run(2, _on_cpu, _own_tokens, layout)
    for first, second in zip(*held, strict=True):
        assert sorted(first + second) == [*range(16)]
        if layout != "balanced":
            assert first == as_layout(layout).positions(0, 2, 16)


@on_ranks(1, around=_on_cpu)
def test_documents_are_all_that_grows_with_the_sequence() -> None:
    """A rank keeps 4 bytes for each token of all ranks, as graphs want boundaries of one shape."""
    from parallel_plans.torchtitan import RingAttention
    from parallel_plans.torchtitan.inner_attention import own_tokens

    def peak(num_tokens: int, world_size: int) -> Peak:
        seq_len = num_tokens * world_size
        tokens = torch.arange(seq_len).unsqueeze(0)
        batch = {"input": tokens, "positions": tokens % (seq_len // 2)}
        # Without messages of the batch before, whose memory would be used again.
        messages = patch.multiple(transport, BUFFERS=BufferPool())
        with messages, fake_group(world_size, rank=world_size // 2):
            ring = RingAttention.Config().build()
            ring.axis = SequenceAxis(init_device_mesh("cpu", (world_size,)), "zigzag")

            def step() -> None:
                own = own_tokens(batch, "zigzag", world_size // 2, world_size)
                held = [own.of(x) for x in (*batch.values(), tokens)]
                q = torch.randn(1, held[0].shape[1], 1, 8, requires_grad=True)
                ring(q, q, q, attention_masks=own.documents).sum().backward()

            return peak_of(step)

    slope = slope_of(peak, (256, 512), (8, 16))
    assert 4 <= slope.tensors + max(0, slope.objects) <= 16


@on_ranks(1, around=_on_cpu)
def test_configs() -> None:
    """Each is one that torchtitan accepts, with rings in all layers."""
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.common.rope import RoPE

    from parallel_plans.torchtitan import RingSelectiveAC, RingTrainer, RingValidator
    from parallel_plans.torchtitan import config_registry as registry
    from parallel_plans.torchtitan.training import check_experts, ring_layout

    for ep in (3, 16):  # of 8 experts
        refused = f"expert_parallel_degree={ep} does not divide the 8 experts of layers.*divisor"
        with pytest.raises(ValueError, match=refused):
            check_experts(registry.gpt_oss_debugmodel_ring().model_spec.model, ep)
    found = {}
    for name in [name for name in vars(registry) if "model_ring" in name or "b_ring" in name]:
        config = getattr(registry, name)()
        assert isinstance(config, RingTrainer.Config)
        assert isinstance(config.validator, RingValidator.Config)
        kept = config.activation_checkpoint
        assert kept is None or isinstance(kept, (RingSelectiveAC.Config, FullAC.Config))
        assert config.training.disable_cuda_graphs
        parallelism, model = config.parallelism, config.model_spec.model
        model.update_from_config(config=config)
        assert ring_layout(model) == "zigzag"
        ranks = parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
        assert ranks % parallelism.expert_parallel_degree == 0
        check_experts(model, parallelism.expert_parallel_degree)
        assert config.training.seq_len % (2 * ranks) == 0
        bases = {rope.theta for _, rope, *_ in model.traverse(RoPE.Config)}
        found[name] = config.training.seq_len, parallelism.context_parallel_degree, bases
    assert len(found) == 10
    page = (ROOT / "docs" / "torchtitan.md").read_text()
    rows = re.findall(r"^\| `(\w+_ring_\w+)` \| ([\d,]+) \| (\d+) \|", page, re.MULTILINE)
    assert len(rows) == 5
    for name, tokens, ranks in rows:
        assert found[name][:2] == (int(tokens.replace(",", "")), int(ranks)), name
    assert found["llama3_8b_ring_128k"][2] == {5e5}, "what Llama 3.1 has"
    assert list(found["llama3_70b_ring_1m"][2]) == pytest.approx([5e5 * 8 ** (128 / 126)])


def _refuse_configs() -> None:
    from torchtitan.config.override import derive
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import Llama3Model
    from torchtitan.models.llama3 import config_registry as llama3

    from parallel_plans.torchtitan import RingAttention, RingTrainer, use_ring
    from parallel_plans.torchtitan.config_registry import llama3_debugmodel_ring, with_ring
    from parallel_plans.torchtitan.inner_attention import own_tokens
    from parallel_plans.torchtitan.training import ring_layout

    class Masking(Llama3Model):
        @dataclass(kw_only=True, slots=True)
        class Config(Llama3Model.Config):
            pass

        def get_attention_masks(self, positions: torch.Tensor) -> Any:
            raise NotImplementedError

    def model() -> Any:
        return llama3.llama3_debugmodel().model_spec.model

    with pytest.raises(ValueError, match="unknown layout 'zagzig'; known layouts: contig"):
        use_ring(model(), "zagzig")
    with pytest.raises(ValueError, match="unknown kernel 'flesh'; known kernels: flash_attn3"):
        use_ring(model(), "zigzag", "flesh")
    with pytest.raises(ValueError, match="unknown strategy 'tree'; known strategies: ring"):
        use_ring(model(), "zigzag", strategy="tree")
    with pytest.raises(ValueError, match="got sliding; the layers of this model have full"):
        use_ring(model(), "zigzag", strategy={"sliding": "ring"})
    with pytest.raises(ValueError, match="got no ring"):
        ring_layout(model())
    mixed = model()
    use_ring(mixed, "striped")
    mixed.layers[0].attention.inner_attention = RingAttention.Config()
    with pytest.raises(ValueError, match=r"share one layout .* \['striped', 'zigzag'\]"):
        ring_layout(mixed)
    other = model()
    other.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    with pytest.raises(ValueError, match=r"a layer of Llama3Model has ScaledDotProductAttention"):
        use_ring(other, "zigzag")
    with pytest.raises(ValueError, match=r'makes masks of its own .* attn_backend="varlen"'):
        use_ring(derive(model(), Masking.Config), "zigzag")
    with pytest.raises(ValueError, match=r"brings a Trainer of its own.* got RingTrainer\.Config"):
        with_ring(llama3_debugmodel_ring())
    captured = llama3_debugmodel_ring()
    captured.training.disable_cuda_graphs = False
    on_gpus = patch("parallel_plans.torchtitan.training.device_type", "cuda")
    with on_gpus, pytest.raises(ValueError, match=r"give --training\.disable_cuda_graphs"):
        RingTrainer(captured)
    for names in (["input"], ["input", "pixels", "positions"]):
        with pytest.raises(ValueError, match=f"the batch holds {re.escape(str(names))}"):
            own_tokens(dict.fromkeys(names, POSITIONS), "zigzag", 0, 1)


def _refuse_calls() -> None:
    from torchtitan.models.llama3 import config_registry as llama3

    from parallel_plans.torchtitan import Documents, RingAttention
    from parallel_plans.torchtitan.config_registry import with_ring

    config = with_ring(llama3.llama3_debugmodel(), "striped", "flash_attn3", "int32")
    settings: Any = config.model_spec.model.layers[0].attention.inner_attention
    with pytest.raises(ValueError, match="unknown grad_dtype 'int32'; known dtypes: float16, flo"):
        settings.build()
    ring = RingAttention.Config().build()
    q = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match="was not parallelized"):
        ring(q, q, q, attention_masks=None)
    mesh = init_device_mesh("cpu", (1,))
    ring.axis = SequenceAxis(mesh, "zigzag")
    with pytest.raises(ValueError, match=r"takes the documents of the batch .* got NoneType"):
        ring(q, q, q, attention_masks=None)
    documents = Documents(torch.tensor([0, 4], dtype=torch.int32))
    with pytest.raises(ValueError, match="does not take score_mod"):
        ring(q, q, q, attention_masks=documents, score_mod=torch.add)
    with pytest.raises(ValueError, match=r"cannot run .*add, which transforms the output"):
        ring(q, q, q, attention_masks=documents, out_transform=torch.add)
    elsewhere = replace(settings, grad_dtype="bfloat16").build()
    assert elsewhere.policy == TransferPolicy(grad_dtype=torch.bfloat16)
    eight = replace(settings, grad_dtype=None, kv_dtype="int8").build()
    assert eight.policy == TransferPolicy(kv_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"unknown kv_dtype 'int4'; known dtypes: .*, int8, fp8"):
        replace(settings, grad_dtype=None, kv_dtype="int4").build()
    assert SequenceAxis(mesh, "zigzag", policy=elsewhere.policy).policy == elsewhere.policy


def _refuse_kernels() -> None:
    from parallel_plans.torchtitan import Documents, RingAttention

    ring = RingAttention.Config(kernel="flash_attn3").build()
    ring.axis = SequenceAxis(init_device_mesh("cpu", (1,)), ring.layout, kernel=ring.kernel)
    q, documents = torch.randn(1, 4, 2, 8), Documents(torch.tensor([0, 4], dtype=torch.int32))
    with pytest.raises(ValueError, match="kernel 'flash_attn3' cannot serve this attention"):
        ring(q, q, q, attention_masks=documents)


@pytest.mark.parametrize("refuse", [_refuse_configs, _refuse_calls, _refuse_kernels])
@on_ranks(1, around=_on_cpu)
def test_refusals(refuse: Callable[[], None]) -> None:
    refuse()


@on_ranks(1, around=_on_cpu)
def test_docstrings() -> None:
    """What the package offers is documented, and its examples run."""
    package = importlib.import_module("parallel_plans.torchtitan")
    modules = [importlib.import_module(package.__name__)]
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        modules.append(importlib.import_module(info.name))
    examples = 0
    for module in modules:
        assert module.__doc__, module.__name__
        for test in doctest.DocTestFinder(exclude_empty=True).find(module):
            output = io.StringIO()
            assert not doctest.DocTestRunner().run(test, out=output.write).failed, output.getvalue()
            examples += bool(test.examples)
    for name in package.__all__:
        assert inspect.getdoc(getattr(package, name)), name
    assert examples == 3


LENGTHS = (5, 1, 2, 8)
"""Of the documents in a row."""
IGNORED = -100


def _batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Two rows of the same documents, whose tokens all differ, and labels one after the tokens."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)
    tokens = torch.arange(100, 132).view(2, 16)
    return {"input": tokens, "positions": positions}, tokens + 1


@pytest.mark.parametrize("layout", ["zigzag", "striped", "balanced"])
@on_ranks(1, around=_on_cpu)
def test_tokens_and_labels_ahead(layout: str) -> None:
    for num_heads in (1, 3, 9, 16):
        _check_ahead(layout, num_heads)


def _check_ahead(layout: str, num_heads: int) -> None:
    """Against a loop over tokens; also with more heads than a document has tokens."""
    from parallel_plans.torchtitan.inner_attention import own_tokens
    from parallel_plans.torchtitan.multi_token import Ahead

    batch, labels = _batch()
    document = [i for i, n in enumerate(LENGTHS) for _ in range(n)]
    seen = torch.zeros(16)
    for rank in range(2):
        own = own_tokens(batch, layout, rank, 2)
        ahead: Any = Ahead.of(batch, labels, own, num_heads)
        assert len(ahead.tokens) == len(ahead.is_token) == len(ahead.labels) == num_heads
        for shift in range(1, num_heads + 1):
            for column, index in enumerate(own.indices.tolist()):
                there = index + shift
                is_there = there < 16 and document[there] == document[index]
                expected = (100 + there, True, 101 + there) if is_there else (0, False, IGNORED)
                found = tuple(
                    side[shift - 1][0, column].item()
                    for side in (ahead.tokens, ahead.is_token, ahead.labels)
                )
                assert found == expected, (rank, shift, index)
        seen[own.indices] += 1
    assert seen.tolist() == [1] * 16


@on_ranks(1, around=_on_cpu)
def test_refused() -> None:
    from torchtitan.models.deepseek_v3.mtp import MTPLoss

    from parallel_plans.torchtitan.inner_attention import own_tokens
    from parallel_plans.torchtitan.multi_token import Ahead, check_heads, give_ahead, num_heads_of

    batch, labels = _batch()
    own = own_tokens(batch, "zigzag", 0, 2)
    with pytest.raises(ValueError, match=r"MTP roll shift must be in \[1, 16\], got 17"):
        Ahead.of(batch, labels, own, 17)
    assert Ahead.of(batch, labels, own, 0) is None
    assert give_ahead(own.documents, None, labels, None) is own.documents
    ahead, loss = Ahead.of(batch, labels, own, 2), MTPLoss(MTPLoss.Config())
    with pytest.raises(ValueError, match=r"with 2 heads .* needs the loss RingMTPLoss, .* MTPLoss"):
        give_ahead(own.documents, ahead, labels, loss)
    assert num_heads_of(SimpleNamespace()) == 0
    heads = SimpleNamespace(mtp_layers=[None])
    with pytest.raises(ValueError, match="not served with tensor parallelism over 2 ranks"):
        check_heads(heads, 2)
    for config, tp in ((heads, 1), (SimpleNamespace(), 2), (None, 2)):
        check_heads(config, tp)


@on_ranks(2, around=_on_cpu)
def test_without_the_trainer() -> None:
    """A ring of several ranks needs what is ahead."""
    from torchtitan.models.deepseek_v3 import model_registry

    from parallel_plans.torchtitan import RingAttention, use_ring

    config: Any = model_registry("debugmodel", num_mtp_layers=1).model
    use_ring(config, "contiguous")
    with torch.device("meta"):
        model = config.build()
    mesh = init_device_mesh("cpu", (2,))
    for part in model.modules():
        if isinstance(part, RingAttention):
            part.axis = part.axis_of(mesh)
    tokens, documents = torch.zeros(1, 8, dtype=torch.long), torch.tensor([0, 16])
    with pytest.raises(ValueError, match="only RingTrainer and RingValidator take them"):
        model(tokens, positions=tokens, attention_masks=documents)
