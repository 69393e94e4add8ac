"""Ranks that decode, as data: what a rank does, how it does it, and what ranks may disagree in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring import (
    BlockPool,
    PagedBatch,
    PagedCache,
    ShardedCache,
    Slices,
    decode_attention,
    ring_attention,
)
from tests.dense import dense_attention, largest
from tests.faults.calls import CAUSAL, TOLERANCES, Ending, ending_of
from tests.faults.differences import SLIDING, Difference
from tests.faults.worlds import Log

NUM_SEQUENCES, NUM_TOKENS = 2, 32
"""Of the inputs, of which each rank takes what it asks for."""
ALL = Slices([(0, NUM_TOKENS)], [(0, NUM_TOKENS)], [(None, None)])
Result = tuple[Tensor, Tensor]
"""Which positions attended, and what came out."""


@dataclass(frozen=True)
class Decoding:
    """What one rank does in each step of its inference: a prompt, then a few tokens at a time.

    Attributes:
        how: a name in `CACHES`.
        prompt: its tokens.
        dealt: whether the layout shards them.
        layout: of the cache.
        block: of tokens in it.
        kept: of the prompt, by a crop; all by default.
        batch: sequences that are kept, by a selection.
        first: the number of the first of them.
        turns: how many come after the prompt.
        tokens: of each of them.
        token: the number of every token, in a pool.
        heads: of queries and of keys.
        head_dim: H.
        dtype: of all tensors.
        options: of the attention, tuples in place of tensors.
        lines: of the code that attends, one for each layer.
    """

    how: str = "sharded"
    prompt: int = 12
    dealt: bool = True
    layout: str = "zigzag"
    block: int = 2
    kv_dtype: str | None = None
    kept: int | None = None
    batch: int = NUM_SEQUENCES
    first: int = 0
    turns: int = 2
    tokens: int = 1
    token: int = 7
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 8
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    lines: tuple[str, ...] = ("first",)

    def inputs(self) -> list[Tensor]:
        """Query, key and value, of more positions than are used."""
        generator = torch.Generator().manual_seed(0)
        (heads, kv_heads), rest = self.heads, (NUM_TOKENS, self.head_dim)
        shapes = [(NUM_SEQUENCES, n, *rest) for n in (heads, kv_heads, kv_heads)]
        return [torch.randn(shape, generator=generator).to(self.dtype) for shape in shapes]

    def given(self) -> dict[str, Any]:
        """The options of the attention."""
        return {
            name: torch.tensor(x) if isinstance(x, tuple) else x for name, x in self.options.items()
        }

    @property
    def tolerance(self) -> float:
        """The error that rounding may cause."""
        return TOLERANCES[self.dtype]


def sharded(case: Decoding, mesh: DeviceMesh) -> Iterator[Result]:
    """Turns over a `ShardedCache`."""
    how = case.layout, case.block, case.kv_dtype
    tensors, cache = case.inputs(), ShardedCache(mesh, 1, *how)
    _append(cache, case.prompt, case.dealt, tensors)
    cache.crop(case.prompt if case.kept is None else case.kept)
    rows = torch.arange(case.first, case.first + case.batch) % NUM_SEQUENCES
    cache.select(rows)
    tensors = [x[rows] for x in tensors]
    for _ in range(case.turns):
        here, shards = _append(cache, case.tokens, False, tensors)
        for line in case.lines:
            yield here, attend(line, shards, mesh, {"key_runs": cache.key_runs} | case.given())


def _append(
    cache: ShardedCache, num_tokens: int, dealt: bool, tensors: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Positions of an append step's queries, these, and all keys and values of this rank."""
    begin = cache.seq_len
    cache.begin(num_tokens, dealt=dealt)
    here = cache.positions[cache.positions >= begin]
    here = here if dealt else torch.arange(begin, cache.seq_len)
    query, key, value = (x[:, :, here] for x in tensors)
    return here, [query, *cache[0].append(key, value)]


def attend(line: str, shards: list[Tensor], mesh: DeviceMesh, options: dict[str, Any]) -> Tensor:
    """On two lines: ranks whose calls differ in nothing else are told by it."""
    if line == "first":
        return decode_attention(*shards, mesh=mesh, **options)
    return decode_attention(*shards, mesh=mesh, **options)


def prefilled(case: Decoding, mesh: DeviceMesh) -> Iterator[Result]:
    """Sharded append steps, by the ring."""
    cache = ShardedCache(mesh, 1, case.layout, case.block)
    for num_tokens in [case.prompt] * case.turns:
        here, shards = _append(cache, num_tokens, True, case.inputs())
        runs = {"runs": cache.query_runs, "key_runs": cache.key_runs}
        yield here, ring_attention(*shards, mesh=mesh, **runs)


def paged(case: Decoding, mesh: DeviceMesh) -> Iterator[Result]:
    """Turns of one sequence of a pool."""
    pool = BlockPool(NUM_TOKENS, case.block, mesh.size())
    rank, kv_heads = mesh.get_local_rank(), case.heads[1]
    how = {"dtype": case.dtype, "kv_dtype": case.kv_dtype}
    cache = PagedCache(pool, kv_heads, case.head_dim, 1, rank, **how)
    query, key, value = (x[:1] for x in case.inputs())
    sequence = pool.add([])
    for number, num_tokens in enumerate([case.prompt] + [case.tokens] * case.turns):
        here = torch.arange(len(sequence), len(sequence) + num_tokens)
        pool.append(sequence, [case.token] * num_tokens)
        batch = PagedBatch(cache, [sequence], num_tokens)
        batch.write(0, key[:, :, here], value[:, :, here])
        if number:
            yield here, batch.decode(0, query[:, :, here], mesh=mesh, **case.given())[0]
        pool.commit(sequence)


CACHES: dict[str, Callable[[Decoding, DeviceMesh], Iterator[Result]]] = {
    "sharded": sharded,
    "prefilled": prefilled,
    "paged": paged,
}


def decode(case: Decoding, mesh: DeviceMesh) -> float:
    """The step of a rank; returns the largest error of causal attention."""
    whole = dense_attention(*case.inputs(), CAUSAL).out
    results = CACHES[case.how](case, mesh)
    return largest(
        (out.double() - whole[: len(out), :, here]).abs().max().item() for here, out in results
    )


def decode_as(log: Log, cases: tuple[Decoding, ...]) -> Ending:
    """Decode as this rank does; `cases` has what all do, by rank."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return ending_of(log, lambda: decode(cases[dist.get_rank()], mesh))


def _options(reported: str, odd: dict[str, Any], usual: dict[str, Any] | None = None) -> Difference:
    return Difference(reported, {"options": odd}, {"options": usual or {}})


PAGED, RING = {"how": "paged"}, {"how": "prefilled"}
DECODED = {
    "mask": _options("mask", {"mask": SLIDING}),
    "documents": _options("cu_seqlens", {"cu_seqlens": (0, 20)}, {"cu_seqlens": (0, 21)}),
    "slices": _options("slices", {"mask": None, "slices": ALL}),
    "scale": _options("scale", {"scale": 0.5}),
    "softcap": _options("softcap", {"softcap": 2.0}),
    "sinks": _options("sinks", {"sinks": (0.5, -1.0, 2.0, 0.0)}),
    "kernel": _options("kernel", {"kernel": "reference"}),
    "merge": _options("merge", {"merge": "one_shot"}, {"merge": "two_shot"}),
    "positions of queries": _options("query_starts", {"query_starts": (9,)}),
    "sampled tokens": _options("tokens given as agree", {"agree": (4, 5)}, {"agree": (4, 6)}),
    "sampled tokens: some, none": _options("tokens given as agree", {"agree": (4, 5)}),
    "dtype": Difference("dtype", {"dtype": torch.bfloat16}),
    "heads": Difference("query heads", {"heads": (2, 2)}),
    "head dim": Difference("head dim", {"head_dim": 16}),
    "tokens at once": Difference("tokens of queries", {"tokens": 2}),
    "batch": Difference("batch", {"batch": 1}),
    "batch: 600": Difference("batch", {"batch": 600}),  # more than one message takes
    "cache: a shorter prompt": Difference("key_runs", {"prompt": 11}),
    "cache: a prompt that is not sharded": Difference("key_runs", {"dealt": False}),
    "cache: layout": Difference("key_runs", {"layout": "contiguous"}),
    "cache: block": Difference("key_runs", {"block": 1}),
    "cache: a crop": Difference("key_runs", {"kept": 0}),
    "cache: another order": Difference("key_runs: .* selected", {"first": 1}),
    "cache: kv_dtype": Difference("key_runs: .* kv_dtype", {"kv_dtype": "int8"}),
    "pool: kv_dtype": Difference("key_runs: .* kv_dtype", PAGED | {"kv_dtype": "int8"}, PAGED),
    "pool: another token": Difference("tokens given as agree", PAGED | {"token": 8}, PAGED),
    "pool: a shorter prompt": Difference("tokens given as agree", PAGED | {"prompt": 11}, PAGED),
    "pool, cache": Difference("tokens given as agree", PAGED),
    "a ring over another cache": Difference("key_runs", RING | {"prompt": 11}, RING),
    "a ring": Difference("direction", RING),
    "a call of another line": Difference("call site", {"lines": ("second",)}),
    "a call less": Difference("closed", {"turns": 1}, spares_rank_0=True),
}
"""What the odd rank and the others decode."""
