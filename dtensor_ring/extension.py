"""The names for plans of model libraries and for block kernels, besides those of `dtensor_ring`.

A plan brings context parallelism to a library whose models its author did not write, as
`parallel_plans` does for transformers, torchtitan and diffusers. A plan imports `dtensor_ring` and
this module, and nothing else of the package. Users of models do not need this module. See
docs/extension.md.

The axis of a mesh, and checks of options before there is an axis:
    `axis_group`, `axis_group_options`, `check_axis_options`, `check_kernel`, `check_strategy`.
What "auto" simulates:
    `AnyMachine`, `machine_on`.
Layouts, and the tokens of a rank:
    `Layout`, `Padded`, `as_layout`, `layout_names`, `append_runs`, `positions_of`, `visible_pairs`.
Sharded sequences, and what their meshes know of the order:
    `from_local_tokens`, `output_mesh`, `tokens_of`, `axis_mesh`.
Agreement of the ranks, so that an error on one rank is raised on all:
    `checked_barrier`, `check_agreement`, `check_strided`.
Names of layers, which identify calls in errors and between ranks:
    `name_layer`, `number_layer`, `within_layer`.
Messages between the ranks of an axis:
    `attached`, `gathered`, `gather_rows`, `receive_state`, `send_state`.
What a CUDA graph captures, and what is refused there:
    `is_capturing`, `refuse_capture`.
Dropout by counters, the same however tokens are sharded:
    `draw_seed`, `dropout_factors`, `numbered`, `Dropout`.
Losses, and ops that a plan defines:
    `IGNORE_INDEX`, `autocast_dtype`, `register_op`.
Caches, and attention of a few tokens to a cache:
    `CacheUsage`, `MAX_QUERIES`, `SharedDecode`.
What is saved of a cache, and what cannot be pickled:
    `NotPickled`, `check_same_state`.
Keys and values that a plan keeps by itself, as they are or in eight bits:
    `KeptTokens`, `format_named`, `no_tokens`.
Sequences of a paged pool, prompts of some that are prefilled by the ring, and how many of their
tokens are rounded together:
    `BlockCopy`, `PagedPrefill`, `PooledSequence`, `prompt_layout`, `unit_of`.
Blocks that move from a pool to another one, on other ranks:
    `MovedTokens`, `PagedHandOver`, `moving_blocks`, `group_beside`, `end_calls`.
Tensors that some ranks have alike, for others:
    `copy_whole`.
Pools of tokens, as an index over windows of them has for keys:
    `pool_tokens`, `whole_pools`, `pools_before`, `pool_runs`.
Layouts for models with layers that carry a state:
    `Hybrid`, `HybridComparison`, `compare_hybrid_layouts`, `stays_from`.
A model without weights, for the command `estimate`:
    `ModelRequest`, `MetaModel`.
The contract of a block kernel:
    `Kernel`, `Launch`, `Problem`, `Saved`, `Scores`.
"""

from dtensor_ring.balanced.work import visible_pairs
from dtensor_ring.compute.capture import is_capturing, refuse_capture
from dtensor_ring.compute.dropout import Dropout, draw_seed, dropout_factors, numbered
from dtensor_ring.compute.kernels import Kernel, Launch, Problem, Saved, Scores, check_kernel
from dtensor_ring.compute.memory import positions_of
from dtensor_ring.decode.cache import CacheUsage
from dtensor_ring.decode.call import MAX_QUERIES
from dtensor_ring.decode.plan import append_runs
from dtensor_ring.decode.shared import SharedDecode
from dtensor_ring.decode.whole import check_same_state
from dtensor_ring.dtensor.annotation import axis_group, axis_mesh, tokens_of
from dtensor_ring.dtensor.axis import machine_on, output_mesh
from dtensor_ring.dtensor.axis_config import check_axis_options
from dtensor_ring.dtensor.call_check import check_agreement, checked_barrier
from dtensor_ring.dtensor.gather import gather_rows, gathered, receive_state, send_state
from dtensor_ring.dtensor.laboratory import AnyMachine
from dtensor_ring.dtensor.meta_model import MetaModel, ModelRequest
from dtensor_ring.dtensor.sequence import IGNORE_INDEX
from dtensor_ring.dtensor.sequence_tensor import from_local_tokens
from dtensor_ring.dtensor.style import number_layer
from dtensor_ring.handover.call import end_calls, group_beside
from dtensor_ring.handover.pages import PagedHandOver, moving_blocks
from dtensor_ring.handover.plan import MovedTokens
from dtensor_ring.handover.whole import copy_whole
from dtensor_ring.ops.axis_ops import attached
from dtensor_ring.ops.checks import NotPickled, check_strided, name_layer, within_layer
from dtensor_ring.ops.nodes import autocast_dtype, register_op
from dtensor_ring.paged.blocks import BlockCopy, PooledSequence
from dtensor_ring.paged.page_memory import unit_of
from dtensor_ring.paged.prefill import PagedPrefill, prompt_layout
from dtensor_ring.planning.layout import Layout, Padded
from dtensor_ring.planning.run_table import as_layout, layout_names
from dtensor_ring.planning.strategy import check_strategy
from dtensor_ring.quantised.kept_tokens import KeptTokens, format_named, no_tokens
from dtensor_ring.selected.pools import pool_runs, pool_tokens, pools_before, whole_pools
from dtensor_ring.states.hybrid import Hybrid, HybridComparison, compare_hybrid_layouts, stays_from
from dtensor_ring.transport.transport import axis_group_options

__all__ = [
    "IGNORE_INDEX",
    "MAX_QUERIES",
    "AnyMachine",
    "BlockCopy",
    "CacheUsage",
    "Dropout",
    "Hybrid",
    "HybridComparison",
    "KeptTokens",
    "Kernel",
    "Launch",
    "Layout",
    "MetaModel",
    "ModelRequest",
    "MovedTokens",
    "NotPickled",
    "Padded",
    "PagedHandOver",
    "PagedPrefill",
    "PooledSequence",
    "Problem",
    "Saved",
    "Scores",
    "SharedDecode",
    "append_runs",
    "as_layout",
    "attached",
    "autocast_dtype",
    "axis_group",
    "axis_group_options",
    "axis_mesh",
    "check_agreement",
    "check_axis_options",
    "check_kernel",
    "check_same_state",
    "check_strategy",
    "check_strided",
    "checked_barrier",
    "compare_hybrid_layouts",
    "copy_whole",
    "draw_seed",
    "dropout_factors",
    "end_calls",
    "format_named",
    "from_local_tokens",
    "gather_rows",
    "gathered",
    "group_beside",
    "is_capturing",
    "layout_names",
    "machine_on",
    "moving_blocks",
    "name_layer",
    "no_tokens",
    "number_layer",
    "numbered",
    "output_mesh",
    "pool_runs",
    "pool_tokens",
    "pools_before",
    "positions_of",
    "prompt_layout",
    "receive_state",
    "refuse_capture",
    "register_op",
    "send_state",
    "stays_from",
    "tokens_of",
    "unit_of",
    "visible_pairs",
    "whole_pools",
    "within_layer",
]
