"""What serving and sparse attention do on a GPU: pools, eight bits, selected keys, models."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring import BlockPool, Mask, select_keys, selected_attention
from dtensor_ring.compute.kernels import Problem
from dtensor_ring.paged.api import PagedBatch, PagedCache
from dtensor_ring.paged.kernels import PAGED
from gpu_steps.alone import median_seconds
from gpu_steps.by_processes import error_of
from gpu_steps.machine import Finding, Machine, compared, failed
from tests.dense import dense_attention

BLOCK, LENGTHS, HEADS, KV_HEADS = 64, (300, 64, 127, 1), 8, 2
LARGEST = {None: 2e-2, "int8": 4e-2, "fp8": 1e-1}
"""Error next to the largest entry, of 16 bits and of keys and values that are rounded to eight."""
REQUESTS, PROMPT = 16, 8192
AIM = 1.3
"""Times PyTorch on one contiguous tensor, for the attention of a decoded token."""
NUM_NEW, TOKENS, NUM_SELECTED = 8, 200, 32


def inference(machine: Machine) -> Iterator[Finding]:
    with machine.connected() as mesh:
        for kv_dtype, largest in LARGEST.items():
            for kernel in _kernels(machine, 64):
                way = partial(_pooled, machine, mesh, kv_dtype, kernel)
                yield compared(f"a pool in {kv_dtype or 'its dtype'}, {kernel}", way, largest)
        for name, way, largest in (
            ("selected keys", _selected, LARGEST[None]),
            ("a model's loss and gradients", _trained, LARGEST[None]),
            ("a model's generated tokens", _generated, 0.0),
            ("a model's served tokens", _served, 0.0),
        ):
            yield compared(name, partial(way, machine, mesh), largest)
        for number, kernel in enumerate(_kernels(machine, 128)):
            yield _speed_or_problem(machine, kernel, is_first=number == 0)


def _kernels(machine: Machine, head_dim: int) -> list[str]:
    """Those that read blocks here, the best first, but the one that defines what is right."""
    problem = Problem(machine.device, machine.dtype, head_dim, head_dim)
    able = [x.name for x in PAGED if not (x.supports(problem, BLOCK) or x.missing())]
    return [name for name in able if name != "gathered"]


def _error(x: Tensor, expected: Tensor) -> float:
    """The largest, next to the largest entry; NaN if there is one."""
    return error_of(*(y.detach().cpu().double() for y in (x, expected)))


def _filled(
    machine: Machine,
    lengths: tuple[int, ...],
    head_dim: int,
    heads: int,
    kv_dtype: str | None,
) -> tuple[PagedBatch, list[tuple[Tensor, Tensor]]]:
    """A step for the last token of each sequence, and keys and values `(1, Nkv, S, H)` of each."""
    blocks = sum(-(-x // BLOCK) for x in lengths)
    pool = BlockPool(blocks, BLOCK)
    how: dict[str, Any] = {"dtype": machine.dtype, "device": machine.device}
    cache = PagedCache(pool, heads, head_dim, 1, kv_dtype=kv_dtype, **how)
    sequences, pairs = [], []
    for number, length in enumerate(lengths):
        # Their first tokens differ, so nothing is shared.
        sequences.append(pool.add([number] * length))
        pairs.append(tuple(torch.randn(1, heads, length, head_dim, **how) for _ in range(2)))
        PagedBatch(cache, [sequences[-1]], length).write(0, *pairs[-1])
        pool.commit(sequences[-1])
    return PagedBatch(cache, sequences), pairs


def _pooled(machine: Machine, mesh: DeviceMesh, kv_dtype: str | None, kernel: str) -> float:
    torch.manual_seed(0)
    batch, pairs = _filled(machine, LENGTHS, 64, KV_HEADS, kv_dtype)
    shape = len(LENGTHS), HEADS, 1, 64
    query = torch.randn(shape, dtype=machine.dtype, device=machine.device)
    out, _ = batch.decode(0, query, mesh=mesh, kernel=kernel)
    dense = [
        dense_attention(*(x.cpu() for x in (row, *pair)), Mask.full()).out
        for row, pair in zip(query.split(1), pairs, strict=True)
    ]
    return _error(out, torch.cat(dense))


def decoded(machine: Machine, mesh: DeviceMesh) -> Callable[[], list[Tensor]]:
    """The attention of a decoded token of each request, by the kernel that is taken."""
    batch, _ = _filled(machine, LENGTHS, 64, KV_HEADS, None)
    shape = len(LENGTHS), HEADS, 1, 64
    query = torch.randn(shape, dtype=machine.dtype, device=machine.device)
    return lambda: list(batch.decode(0, query, mesh=mesh))


def _selected(machine: Machine, mesh: DeviceMesh) -> float:
    """Whole numbers have exact scores, so the same keys are best; then attention to them."""
    generator, how = torch.Generator().manual_seed(0), (machine.device, machine.dtype)
    shapes = (1, TOKENS, 4, 8), (1, TOKENS, 8), (1, TOKENS, 4)
    index = [torch.randint(-2, 3, shape, generator=generator) for shape in shapes]
    lists = select_keys(*(x.to(*how) for x in index), NUM_SELECTED, mesh=mesh)
    _check_lists(lists, *(x.double() for x in index))
    heads = 4, 1, 1, 4
    drawn = [torch.randn(1, n, TOKENS, 64, generator=generator).to(*how) for n in heads]
    leaves, grad_out = [x.requires_grad_() for x in drawn[:3]], drawn[3]
    out = selected_attention(*leaves, lists, mesh=mesh)
    found = [out, *torch.autograd.grad(out, leaves, grad_out)]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    scores = wide[0] @ wide[1].mT * 64**-0.5
    is_listed = torch.zeros(TOKENS, TOKENS + 1, dtype=torch.bool, device=machine.device)
    is_listed.scatter_(1, lists[0].long().masked_fill(lists[0] < 0, TOKENS), True)
    dense = scores.masked_fill(~is_listed[:, :TOKENS], -torch.inf).softmax(-1) @ wide[2]
    expected = [dense, *torch.autograd.grad(dense, wide, grad_out.double())]
    return max(_error(x, y) for x, y in zip(found, expected, strict=True))


def _check_lists(lists: Tensor, query: Tensor, key: Tensor, weights: Tensor) -> None:
    """Refuse lists that are not the best keys, of equal scores the lowest positions."""
    products = torch.einsum("bshd,btd->bhst", query, key).clamp(min=0)
    scores = (products * weights.permute(0, 2, 1).unsqueeze(-1)).sum(1)
    seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
    order = scores.masked_fill(~seen, -torch.inf).argsort(dim=-1, descending=True, stable=True)
    for row, (best, listed) in enumerate(zip(order[0], lists[0].cpu(), strict=True)):
        expected = sorted(best[: min(NUM_SELECTED, row + 1)].tolist())
        assert [x for x in listed.tolist() if x >= 0] == expected, f"keys of query {row}"


def _model(machine: Machine, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
    config = LlamaConfig(vocab_size=256, pad_token_id=0, **sizes, **heads)
    return LlamaForCausalLM(config).to(machine.device, dtype)


def _parallel(model: Any, mesh: DeviceMesh) -> Any:
    from parallel_plans.huggingface import context_parallel_plan

    return parallelize_module(model, mesh, context_parallel_plan(model))


def _tokens(machine: Machine, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 256, shape, generator=generator).to(machine.device)


def _trained(machine: Machine, mesh: DeviceMesh) -> float:
    """In 16 bits, next to the model without the plan."""
    tokens, found = _tokens(machine, 2, 128), []
    for model in (_model(machine, machine.dtype), _parallel(_model(machine, machine.dtype), mesh)):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        found.append([loss, *(x.grad for x in model.parameters())])
    return max(_error(x, y) for x, y in zip(found[1], found[0], strict=True))


def _differ(found: list[int], expected: list[int]) -> float:
    """How many tokens differ, as a part of all."""
    assert len(found) == len(expected), f"{len(found)} tokens in place of {len(expected)}"
    return sum(x != y for x, y in zip(found, expected, strict=True)) / len(expected)


def _generated(machine: Machine, mesh: DeviceMesh) -> float:
    """In float32, so that the same tokens are the likeliest."""
    tokens = _tokens(machine, 2, 100)
    how = {"max_new_tokens": NUM_NEW, "do_sample": False}
    stock, ours = (
        model.generate(tokens, attention_mask=torch.ones_like(tokens), **how)[:, tokens.shape[1] :]
        for model in (
            _model(machine, torch.float32).eval(),
            _parallel(_model(machine, torch.float32).eval(), mesh),
        )
    )
    return _differ(ours.flatten().tolist(), stock.flatten().tolist())


def _served(machine: Machine, mesh: DeviceMesh) -> float:
    from transformers import ContinuousBatchingConfig

    prompts = [_tokens(machine, 1, x)[0].tolist() for x in (100, 3, 65, 64)]
    stock, expected = _model(machine, torch.float32).eval(), []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=machine.device)
        how = {"max_new_tokens": NUM_NEW, "do_sample": False}
        out = stock.generate(ids, attention_mask=torch.ones_like(ids), **how)
        expected += out[0, len(prompt) :].tolist()
    model = _parallel(_model(machine, torch.float32).eval(), mesh)
    config = ContinuousBatchingConfig(page_size=16, num_blocks=64, max_requests_per_batch=4)
    batch, outputs = model.init_continuous_batching(None, config), {}
    numbers = batch.add_requests(prompts, max_new_tokens=NUM_NEW, do_sample=False)
    while batch.has_requests():
        outputs |= {x.request_id: x.generated_tokens for x in batch.step()}
    return _differ([token for x in numbers for token in outputs[x]], expected)


def _speed_or_problem(machine: Machine, kernel: str, is_first: bool) -> Finding:
    try:
        return _speed(machine, kernel, is_first)
    except Exception as problem:  # the other kernels are still worth a row
        return failed(f"a token of some requests, {kernel}", problem)


def _speed(machine: Machine, kernel: str, is_first: bool) -> Finding:
    """A layer's attention of one token for each of some requests, next to memory and to PyTorch.

    Only the first kernel has an aim: it is the one that is taken.
    """
    requests, length = (2, 128) if machine.is_dry else (REQUESTS, PROMPT)
    batch, pairs = _filled(machine, (length,) * requests, 128, 8, None)
    keys, values = (torch.cat(x) for x in zip(*pairs, strict=True))
    query = torch.randn(requests, 32, 1, 128, dtype=machine.dtype, device=machine.device)
    dense = partial(F.scaled_dot_product_attention, query, keys, values, enable_gqa=True)
    ours = partial(batch.decode, 0, query, kernel=kernel)
    seconds, of_torch = (median_seconds(run, machine.repeats) for run in (ours, dense))
    rate = 2 * keys.nbytes / seconds
    what = (
        f"a token of {requests} requests at {length:,} tokens, 8 key heads of 128, {kernel}, GB/s"
    )
    found = f"{rate / 1e9:.0f}; {1e6 * seconds:.0f} us, PyTorch on one tensor {1e6 * of_torch:.0f}"
    found += f" ({seconds / of_torch:.2f} times)"
    is_short = is_first and seconds > AIM * of_torch
    return Finding(what, found, f"{AIM} times PyTorch on one tensor" if is_short else "")
