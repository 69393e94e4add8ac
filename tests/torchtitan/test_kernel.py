"""The ring as a kernel of the transform that later versions of torchtitan have."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import Mask, RingError, SequenceAxis
from tests.dense import dense_attention, largest
from tests.forced import machine_for, taken
from tests.pool import on_ranks
from tests.torchtitan.test_torchtitan_parts import _on_cpu

pytestmark = pytest.mark.skipif(not find_spec("torchtitan"), reason="needs torchtitan")

SEQ_LEN, HEADS, KEY_HEADS, HEAD_DIM = 16, 4, 2, 8
CU_SEQLENS = [0, 5, 6, 13, 16, 16]
WINDOW = 3
BY_KIND = {"sliding": "ring", "full": "ulysses:2"}


def _kernel(later: bool) -> Any:
    """A kernel of one of the two versions, for attention of variable lengths."""
    from torchtitan.models.common.attention import VarlenAttention

    from parallel_plans.torchtitan import ring_kernel
    from tests.titan_seam import ContextParallelKernel, CPAttention

    return ring_kernel(VarlenAttention, CPAttention if later else ContextParallelKernel)


def _transformed(later: bool, **overrides: Any) -> Any:
    """A model of sliding and full layers with the ring in them."""
    from torchtitan.models.gpt_oss import model_registry

    from tests.titan_seam import ContextParallelKernel, ContextParallelTransform, CPAttention

    transform = ContextParallelTransform(
        kernel=_kernel(later),
        kernel_config_overrides=overrides,
        capability=CPAttention if later else ContextParallelKernel,
    )
    return transform.transform(model_registry("debugmodel").model)


@pytest.mark.parametrize("later", [False, True])
@on_ranks(1, around=_on_cpu)
def test_the_transform_keeps_what_layers_are(later: bool) -> None:
    from torchtitan.models.common.attention import VarlenAttention
    from torchtitan.models.gpt_oss import model_registry

    from parallel_plans.torchtitan import ring_strategy, use_ring
    from tests.titan_seam import check_parallel

    stock = [x.attention.inner_attention for x in model_registry("debugmodel").model.layers]
    model = _transformed(later, strategy=BY_KIND, grad_dtype="bfloat16", kv_dtype="fp8")
    rings = [x.attention.inner_attention for x in model.layers]
    assert len({ring.window_size for ring in rings}) == 2
    for ring, old in zip(rings, stock, strict=True):
        assert isinstance(ring, VarlenAttention.Config)
        assert (ring.window_size, ring.grad_dtype) == (old.window_size, "bfloat16")
        kind = "full" if ring.window_size[0] == -1 else "sliding"
        assert ring.build().strategy == BY_KIND[kind]
    # Not even the heads of a rank of the tensor-parallel axis need to divide.
    check_parallel(model, context=6, tensor=2, load_balancer=None)
    with pytest.raises(ValueError, match="order of positions"):
        check_parallel(model, context=2, tensor=1, load_balancer="headtail")
    changed = ring_strategy(model, strategy={"sliding": "direct", "full": "all_gather"})
    found = [x.attention.inner_attention.build().strategy for x in changed.layers]
    assert set(found) == {"direct", "all_gather"}
    with pytest.raises(ValueError, match="got chunked; the layers of this model have full, slid"):
        ring_strategy(model, strategy={"chunked": "ring"})
    other = model_registry("debugmodel").model
    with pytest.raises(ValueError, match="no attention of this model is a ring"):
        ring_strategy(other, strategy="ring")
    use_ring(other, "zigzag")
    assert ring_strategy(other, strategy="direct").layers[0].attention.inner_attention.strategy
    with pytest.raises(ValueError, match="unknown strategy 'tree'"):
        _transformed(later, strategy="tree").layers[0].attention.inner_attention.build()


def _metadata() -> Any:
    from torchtitan.models.common.attention import VarlenMetadata

    bounds = torch.tensor(CU_SEQLENS, dtype=torch.int32)
    return VarlenMetadata(bounds, bounds, 7, 7)


@pytest.mark.parametrize("later", [False, True])
@on_ranks(2, around=_on_cpu)
def test_as_dense(later: bool) -> None:
    """Windows, sinks, documents, by the strategy of each kind, also compiled."""
    from torchtitan.distributed.spmd_types import set_current_spmd_mesh
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.models.gpt_oss.model import Attention

    set_spmd_backend("spmd_types")
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "cp"))
    dims: Any = SimpleNamespace(get_optional_mesh=lambda name, **_: mesh[name])
    own = slice(rank * SEQ_LEN // size, (rank + 1) * SEQ_LEN // size)
    torch.manual_seed(0)
    whole = [torch.randn(SEQ_LEN, n, HEAD_DIM) for n in (HEADS, KEY_HEADS, KEY_HEADS)]
    grad, sinks = torch.randn(SEQ_LEN, HEADS, HEAD_DIM), torch.randn(HEADS)
    metadata: Any = _metadata()
    if later:
        metadata = _kernel(later).prepare_cp_metadata(metadata, permutation=None)
    found = []
    for window, has_sinks, compiles in (
        ((-1, 0), False, True),
        ((-1, 0), True, False),
        ((WINDOW, 0), True, False),
        ((-1, -1), False, False),
    ):
        kernel = _kernel(later).Config(window_size=window, strategy=BY_KIND).build()
        layer = SimpleNamespace(sinks=sinks.clone().requires_grad_())
        options = {"attention_metadata" if later else "attention_masks": metadata}
        if has_sinks:
            options["out_transform"] = MethodType(Attention._apply_sinks, layer)
        inputs = [x[own].clone().requires_grad_() for x in whole]
        attend: Any = kernel
        if compiles:
            kernel.parallelize(dims)
            attend = torch.compile(kernel, backend="aot_eager", fullgraph=True)
        with set_current_spmd_mesh(mesh):
            out = attend(*inputs, scale=0.3, enable_gqa=True, **options)
        grads = torch.autograd.grad(out, inputs, grad[own])
        dense = dense_attention(
            *(x.transpose(0, 1).unsqueeze(0) for x in whole),
            Mask(*(None if x == -1 else x for x in window)),
            cu_seqlens=torch.tensor(CU_SEQLENS),
            sinks=sinks if has_sinks else None,
            scale=0.3,
        )
        expected = [dense.out, *dense.backward(grad.transpose(0, 1).unsqueeze(0))[:3]]
        for x, y in zip((out, *grads), expected, strict=True):
            found.append((x - y[0].transpose(0, 1)[own]).abs().max().item())
    assert largest(found) < 1e-5


@pytest.mark.parametrize("is_kernel", [False, True])
@on_ranks(2, around=_on_cpu)
def test_the_fastest_strategy(is_kernel: bool, tmp_path: Path) -> None:
    """A layer with the strategy "auto" takes it, and its record names the machine."""
    from parallel_plans.torchtitan import Documents, RingAttention

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    dims: Any = SimpleNamespace(get_optional_mesh=lambda name, **_: mesh[name])
    path, label = tmp_path / "machine.json", machine_for("ulysses").label
    if dist.get_rank() == 0:
        path.write_text(machine_for("ulysses").to_json())
    dist.barrier()
    options = {"strategy": "auto", "machine": str(path)}
    config = _kernel(False).Config(**options) if is_kernel else RingAttention.Config(**options)
    layer, q = config.build(), torch.randn(8, 2, 8)
    layer.parallelize(dims)
    given = Documents(torch.tensor([0, 16], dtype=torch.int32))
    with taken() as found:
        layer(*(q if is_kernel else q[None],) * 3, attention_masks=given)
    assert [x[1:] for x in found] == [("ulysses:2", label)]


@pytest.mark.parametrize("is_kernel", [False, True])
@on_ranks(2, around=_on_cpu)
def test_another_order_of_layers(is_kernel: bool) -> None:
    from parallel_plans.torchtitan import Documents, RingAttention

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    dims: Any = SimpleNamespace(get_optional_mesh=lambda name, **_: mesh[name])
    config = _kernel(False).Config() if is_kernel else RingAttention.Config(layout="contiguous")
    layers, q = [config.build() for _ in range(2)], torch.randn(8, 2, 8)
    for layer in layers:
        layer.parallelize(dims)
    given = _metadata() if is_kernel else Documents(torch.tensor([0, 16], dtype=torch.int32))
    inputs = (q if is_kernel else q[None],) * 3
    order = layers if dist.get_rank() else layers[::-1]
    told = r"layer: \w+ (0 on rank 1, \w+ 1 on rank 0|1 on rank 0, \w+ 0)"
    with pytest.raises(RingError, match=told):
        [layer(*inputs, attention_masks=given) for layer in order]


@on_ranks(1, around=_on_cpu)
def test_refusals() -> None:
    kernel = _kernel(False).Config().build()
    q, metadata = torch.randn(4, 2, 8), _metadata()
    with pytest.raises(ValueError, match="has no ranks: it was not parallelized, and there"):
        kernel(q, q, q, attention_masks=metadata)
    with pytest.raises(ValueError, match="unknown grad_dtype 'int32'; known dtypes: float16, flo"):
        _kernel(True).Config(grad_dtype="int32").build()
    kernel.axis = SequenceAxis(init_device_mesh("cpu", (1,)), "contiguous")

    def call(**options: Any) -> Callable[[], Tensor]:
        return lambda: kernel(q, q, q, **({"attention_masks": metadata} | options))

    shuffled = torch.arange(4).flip(0)[None]
    for wrong, match in (
        (call(attention_masks=None), r'off cu_seq_q, .* got NoneType; .* attn_backend="varlen"'),
        (call(attention_masks=metadata._replace(max_k=9)), "this kernel is for self-attention"),
        (call(score_mod=torch.add), "does not take score_mod"),
        (call(out_transform=torch.add), "cannot run .*add, which transforms the output"),
        (call(), "cu_seqlens must start at 0, never decrease and end at or before"),
        (lambda: kernel.prepare_cp_metadata(metadata, permutation=shuffled), "has permuted"),
    ):
        with pytest.raises(ValueError, match=match):
            wrong()
