"""What users see: the surface and its docstrings, and what importing it loads."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import expecttest

import dtensor_ring

ROOT = Path(__file__).parent.parent
PUBLIC = {name: getattr(dtensor_ring, name) for name in dtensor_ring.__all__}


class TestSurface(expecttest.TestCase):
    def test_signatures(self) -> None:
        lines = []
        for name, thing in PUBLIC.items():
            lines.append(f"{name}{inspect.signature(thing)}")
            lines += [f"    .{member}{shown}" for member, shown in members(thing)]
        wrapped = [textwrap.fill(line, 96, subsequent_indent=" " * 8) for line in lines]
        self.assertExpectedInline(
            "\n".join(wrapped),
            """\
Balanced(mask: 'Mask | None', seq_len: 'int', world_size: 'int', cu_seqlens: 'Boundaries | None'
        = None, block: 'int | None' = None, slices: 'Slices | None' = None) -> None
    .block
    .block_length
    .cu_seqlens
    .dealt_length(self, seq_len: 'int', world_size: 'int') -> 'int'
    .documents
    .max_runs
    .name
    .num_tokens(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'int'
    .padded_length(self, seq_len: 'int', world_size: 'int') -> 'int'
    .parameters
    .per_batch
    .positions(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'list[int]'
    .runs(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'tuple[Run, ...]'
    .slices
    .spec
BlockCyclic(block: 'int') -> None
    .dealt_length(self, seq_len: 'int', world_size: 'int') -> 'int'
    .name
    .num_tokens(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'int'
    .padded_length(self, seq_len: 'int', world_size: 'int') -> 'int'
    .parameters
    .per_batch
    .positions(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'list[int]'
    .runs(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'tuple[Run, ...]'
    .spec
BlockPool(num_blocks: 'int', block: 'int' = 256, world_size: 'int' = 1) -> 'None'
    .add(self, tokens: 'Any') -> 'PooledSequence'
    .append(self, sequence: 'PooledSequence', tokens: 'Any') -> 'tuple[BlockCopy, ...]'
    .block_table(self, sequence: 'PooledSequence', rank: 'int') -> 'np.ndarray'
    .check(self, sequence: 'Any') -> 'None'
    .commit(self, sequence: 'PooledSequence', length: 'int | None' = None) -> 'None'
    .crop(self, sequence: 'PooledSequence', length: 'int') -> 'None'
    .dealing
    .fork(self, sequence: 'PooledSequence') -> 'PooledSequence'
    .free(self, sequence: 'PooledSequence') -> 'None'
    .num_blocks
    .runs(self, sequence: 'PooledSequence', begin: 'int' = 0) -> 'np.ndarray'
    .usage(self) -> 'PoolUsage'
ContextParallel(layout: 'Layout | str' = 'zigzag', *, strategy: 'str | None' = None, kernel:
        'str | None' = None, policy: 'TransferPolicy | None' = None, inputs: 'tuple[str, ...]' =
        ('query', 'key', 'value')) -> 'None'
Contiguous() -> None
    .dealt_length(self, seq_len: 'int', world_size: 'int') -> 'int'
    .name
    .num_tokens(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'int'
    .padded_length(self, seq_len: 'int', world_size: 'int') -> 'int'
    .parameters
    .per_batch
    .positions(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'list[int]'
    .runs(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'tuple[Run, ...]'
    .spec
Mask(left: 'int | None', right: 'int | None', chunk: 'int | None' = None, prefix: 'int | None' =
        None) -> None
    .causal() -> 'Mask'
    .chunk
    .chunked(chunk: 'int') -> 'Mask'
    .full() -> 'Mask'
    .left
    .local(left: 'int | None', right: 'int | None') -> 'Mask'
    .prefix
    .prefix_causal(prefix: 'int') -> 'Mask'
    .right
    .sees(self, query: 'int', key: 'int') -> 'bool'
    .sliding(window: 'int') -> 'Mask'
OutOfBlocks(message: 'str', *, need: 'tuple[int, ...]' = (), free: 'tuple[int, ...]' = (),
        cached: 'tuple[int, ...]' = ()) -> 'None'
PagedBatch(cache: 'PagedCache', sequences: 'Sequence[PooledSequence]', num_tokens: 'int' = 1) ->
        'None'
    .attend(self, layer: 'int', query: 'Tensor', *, mask: 'Mask' = Mask(left=None, right=0,
        chunk=None, prefix=None), scale: 'float | None' = None, softcap: 'float' = 0.0, kernel:
        'str | None' = None) -> 'tuple[Tensor, Tensor]'
    .decode(self, layer: 'int', query: 'Tensor', *, mesh: 'DeviceMesh | None' = None, mask:
        'Mask' = Mask(left=None, right=0, chunk=None, prefix=None), sinks: 'Tensor | None' =
        None, scale: 'float | None' = None, softcap: 'float' = 0.0, kernel: 'str | None' = None,
        merge: 'str | None' = None) -> 'tuple[Tensor, Tensor]'
    .write(self, layer: 'int', key: 'Tensor', value: 'Tensor', *, dealt: 'bool' = False) ->
        'None'
PagedCache(pool: 'BlockPool', num_kv_heads: 'int', head_dim: 'int', num_layers: 'int', rank:
        'int' = 0, value_head_dim: 'int | None' = None, dtype: 'torch.dtype | None' = None,
        device: 'torch.device | str | None' = None) -> 'None'
    .copy(self, copies: 'Iterable[BlockCopy]') -> 'None'
    .gather(self, layer: 'int', sequence: 'PooledSequence') -> 'tuple[Tensor, Tensor]'
    .layer(self, layer: 'int') -> 'tuple[Tensor, Tensor]'
    .num_bytes
    .num_layers
RingError(message: 'str', *, ring: 'tuple[int, ...]' = (), direction: 'str' = '', step: 'int |
        None' = None, source: 'int | None' = None, peer: 'int | None' = None, seconds: 'float' =
        0.0) -> 'None'
SequenceAxis(mesh: 'DeviceMesh', layout: 'Layout | str' = 'zigzag', *, strategy: 'str | None' =
        None, kernel: 'str | None' = None, policy: 'TransferPolicy | None' = None, transport:
        'Transport | None' = None) -> 'None'
    .attention(self, query: 'Tensor', key: 'Tensor', value: 'Tensor', *, mask: 'Mask | None' =
        None, cu_seqlens: 'Tensor | None' = None, sinks: 'Tensor | None' = None, scale: 'float |
        None' = None, softcap: 'float' = 0.0, key_cu_seqlens: 'Tensor | None' = None, runs:
        'Tensor | None' = None, slices: 'Slices | Tensor | None' = None, seq_len: 'int | None' =
        None, key_runs: 'Tensor | None' = None, strategy: 'str | None' = None) -> 'Tensor'
    .kernel
    .layout
    .policy
    .positions(self, seq_len: 'int') -> 'Tensor'
    .prepare(self, seq_len: 'int', *, mask: 'Mask | None' = None, cu_seqlens: 'Tensor | None' =
        None, runs: 'Tensor | None' = None, slices: 'Slices | Tensor | None' = None, strategy:
        'str | None' = None) -> 'None'
    .shard(self, tensor: 'Tensor', dim: 'int', layout: 'Balanced | None' = None) -> 'DTensor'
    .strategy
    .sum(self, local: 'Tensor') -> 'Tensor'
    .unshard(self, dtensor: 'DTensor', dim: 'int', layout: 'Balanced | None' = None) -> 'Tensor'
ShardedCache(mesh: 'DeviceMesh', num_layers: 'int', layout: 'Layout | str | None' = None, block:
        'int' = 256) -> 'None'
    .batch
    .begin(self, num_tokens: 'int', *, dealt: 'bool') -> 'None'
    .crop(self, seq_len: 'int') -> 'None'
    .key_runs
    .positions
    .query_runs
    .reorder(self, rows: 'Tensor') -> 'None'
    .repeat(self, times: 'int') -> 'None'
    .reset(self) -> 'None'
    .select(self, rows: 'Tensor') -> 'None'
    .seq_len
    .table
    .usage(self) -> 'CacheUsage'
Slices(query_ranges: 'Ranges', key_ranges: 'Ranges', bands: 'Bands') -> 'None'
    .UNBOUNDED
    .are_windowed
    .batched(parts: 'Sequence[Slices]') -> 'Self'
    .block_causal(lengths: 'Integers', num_earlier: 'int | None' = None) -> 'Self'
    .block_diffusion(lengths: 'Integers') -> 'Self'
    .blocks(cu_seqlens: 'Integers', begins: 'Integers', ends: 'Integers', mask: 'Mask' =
        Mask(left=None, right=0, chunk=None, prefix=None)) -> 'Self'
    .bottom_right(cu_seqlens: 'Integers', key_cu_seqlens: 'Integers', mask: 'Mask' =
        Mask(left=None, right=0, chunk=None, prefix=None)) -> 'Self'
    .check(self, seq_len: 'int', key_seq_len: 'int') -> 'None'
    .documents(cu_seqlens: 'Integers', mask: 'Mask | Sequence[Mask] | Sequence[Sequence[Mask]]'
        = Mask(left=None, right=0, chunk=None, prefix=None)) -> 'Self'
    .global_tokens(cu_seqlens: 'Integers', num_global: 'int | Integers', window: 'int') ->
        'Self'
    .num_bytes
    .numbers
    .of_numbers(content: 'np.ndarray') -> 'Slices'
    .of_tables(tables: 'Any') -> 'Self'
    .per_query(begins: 'Integers', ends: 'Integers') -> 'Self'
    .prefix(cu_seqlens: 'Integers', prefix_lengths: 'int | Integers') -> 'Self'
    .sees(self, query: 'int', key: 'int', row: 'int' = 0) -> 'bool'
    .shared_prefix(prefix_lengths: 'int | Integers', answer_lengths: 'Integers') -> 'Self'
    .shifted(self, by: 'int', key_by: 'int | None' = None) -> 'Slices'
    .tree(parents: 'Integers', lengths: 'Integers') -> 'Self'
Striped() -> None
    .dealt_length(self, seq_len: 'int', world_size: 'int') -> 'int'
    .name
    .num_tokens(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'int'
    .padded_length(self, seq_len: 'int', world_size: 'int') -> 'int'
    .parameters
    .per_batch
    .positions(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'list[int]'
    .runs(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'tuple[Run, ...]'
    .spec
TransferPolicy(kv_dtype: 'torch.dtype | None' = None, grad_dtype: 'torch.dtype' = torch.float32,
        num_parts: 'int | None' = None) -> None
    .grad_dtype
    .kv_dtype
    .num_parts
    .sum_dtype(self, dtype: 'torch.dtype') -> 'torch.dtype'
Transport()
    .abort(self) -> 'None'
    .allocate(self, num_bytes: 'int', device: 'torch.device') -> 'Tensor'
    .at(self, label: 'Label') -> 'None'
    .free(self, buffer: 'Tensor') -> 'None'
    .keeps_tags(self, device: 'torch.device') -> 'bool'
    .prepare(self, device: 'torch.device') -> 'None'
    .start(self, receives: 'list[P2P]', sends: 'list[P2P]') -> 'Sequence[Work]'
ZigZag() -> None
    .dealt_length(self, seq_len: 'int', world_size: 'int') -> 'int'
    .name
    .num_tokens(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'int'
    .padded_length(self, seq_len: 'int', world_size: 'int') -> 'int'
    .parameters
    .per_batch
    .positions(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'list[int]'
    .runs(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'tuple[Run, ...]'
    .spec
available_kernels() -> 'dict[str, str | None]'
compare_layouts(mask: 'Mask | None', seq_len: 'int', world_size: 'int', cu_seqlens: 'Boundaries
        | None' = None, slices: 'Slices | None' = None) -> 'LayoutComparison'
compare_strategies(mask: 'Mask | None', seq_len: 'int', world_size: 'int', heads: 'tuple[int,
        int]' = (32, 8), head_dim: 'int' = 128, cu_seqlens: 'Boundaries | None' = None, *,
        slices: 'Slices | None' = None, layout: 'Layout | str' = 'zigzag', batch: 'int' = 1,
        dtype: 'torch.dtype' = torch.bfloat16, policy: 'TransferPolicy' =
        TransferPolicy(kv_dtype=None, grad_dtype=torch.float32, num_parts=None), strategies:
        'Sequence[str] | None' = None, max_held: 'int | None' = None) -> 'StrategyComparison'
decode_attention(query: 'Tensor', key: 'Tensor', value: 'Tensor', *, mask: 'Mask | None' = None,
        cu_seqlens: 'Tensor | None' = None, slices: 'Slices | Tensor | None' = None, key_runs:
        'Tensor | None' = None, query_starts: 'Tensor | None' = None, sinks: 'Tensor | None' =
        None, scale: 'float | None' = None, softcap: 'float' = 0.0, kernel: 'str | None' = None,
        mesh: 'DeviceMesh | None' = None, return_lse: 'bool' = False, merge: 'str | None' =
        None, agree: 'Tensor | None' = None) -> 'Tensor | tuple[Tensor, Tensor]'
describe_schedule(layout: 'Layout | str', mask: 'Mask | None', seq_len: 'int', world_size:
        'int', cu_seqlens: 'Boundaries | None' = None, slices: 'Slices | None' = None, strategy:
        'str' = 'ring') -> 'Schedule'
exchange(tensors: 'Sequence[Tensor]', mesh: 'DeviceMesh', *, to: "Literal['heads', 'tokens']" =
        'heads', heads: 'int | None' = None, num_heads: 'Sequence[int] | None' = None,
        num_key_heads: 'int | None' = None, seq_len: 'int | None' = None, runs: 'Tensor | None'
        = None) -> 'list[Tensor]'
merge_attention(parts: 'Sequence[tuple[Tensor, Tensor]]') -> 'tuple[Tensor, Tensor]'
next_token_labels(tokens: 'Tensor', cu_seqlens: 'Tensor | None' = None, ignore_index: 'int' =
        -100) -> 'Tensor'
register_kernel(kernel: 'Kernel', *, before: 'str | None' = None) -> 'None'
relayout(tensor: 'Tensor', mesh: 'DeviceMesh', dim: 'int', to: 'Layout | str' = 'contiguous', *,
        layout: 'Layout | str | None' = None, seq_len: 'int | None' = None) -> 'Tensor'
ring_attention(query: 'Tensor', key: 'Tensor', value: 'Tensor', *, mask: 'Mask | None' = None,
        cu_seqlens: 'Tensor | None' = None, sinks: 'Tensor | None' = None, scale: 'float | None'
        = None, softcap: 'float' = 0.0, kernel: 'str | None' = None, mesh: 'DeviceMesh | None' =
        None, return_lse: 'bool' = False, key_cu_seqlens: 'Tensor | None' = None, runs: 'Tensor
        | None' = None, slices: 'Slices | Tensor | None' = None, key_runs: 'Tensor | None' =
        None, strategy: 'str | None' = None, validate: 'bool' = False) -> 'Tensor |
        tuple[Tensor, Tensor]'
sequence_layout(mesh: 'DeviceMesh') -> 'Layout | None'
sequence_runs(layout: 'Balanced') -> 'Tensor'
sequence_slices(slices: 'Slices', num_slices: 'int | None' = None) -> 'Tensor'
shard_sequence(tensor: 'Tensor', mesh: 'DeviceMesh', dim: 'int', layout: 'Layout | str | None' =
        None) -> 'DTensor'
slices_of_block_mask(block_mask: 'BlockMask') -> 'Slices'
sum_over_sequence(local: 'Tensor', mesh: 'DeviceMesh') -> 'Tensor'
unshard_sequence(dtensor: 'DTensor', dim: 'int', layout: 'Balanced | None' = None) -> 'Tensor'""",
        )


def members(thing: Any) -> list[tuple[str, str]]:
    """Public attributes of a class of ours, with signatures of those that are called."""
    if not inspect.isclass(thing):
        return []
    found = []
    bases = [base for base in thing.__mro__ if base.__module__.startswith("dtensor_ring")]
    for name in sorted({name for base in bases for name in vars(base)}):
        if not name.startswith("_"):
            member = getattr(thing, name)
            found.append((name, str(inspect.signature(member)) if callable(member) else ""))
    return found


IMPORTS = """
import sys, torch.distributed.tensor.parallel, torch.utils.flop_counter
before = set(sys.modules)
import dtensor_ring
packages = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(packages - set(sys.stdlib_module_names) - {"torch"}))
print(*{"torch._dynamo"} & set(sys.modules))  # which takes twice the time of all of ours
"""


def test_import_loads_nothing_else() -> None:
    command = [sys.executable, "-W", "error", "-c", IMPORTS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["dtensor_ring"]
    assert not run.stderr
