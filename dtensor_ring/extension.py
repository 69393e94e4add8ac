"""What plans for a library of models are made of, beside the names of `dtensor_ring` itself.

It is for those who bring context parallelism to a library whose models they did not write, as
`parallel_plans` does for transformers, torchtitan and diffusers, and for those who bring a block
kernel. A plan imports `dtensor_ring` and this module, and nothing else of the package. Users of
models need neither this module nor what it has. See docs/extension.md.

The axis of a mesh, and options that are refused before there is one:
    `axis_group`, `axis_group_options`, `check_axis_options`, `check_kernel`, `check_strategy`.
Layouts, and the tokens that they give to a rank:
    `Layout`, `as_layout`, `layout_names`, `layout_order`, `turn_runs`, `local_tokens`,
    `from_local_tokens`, `visible_pairs`.
Agreement of the ranks, on which an error of one is an error of all:
    `meeting`, `check_agreement`, `check_strided`.
Names of layers, by which errors and ranks tell calls apart:
    `name_layer`, `number_layer`, `within_layer`.
Messages between the ranks of an axis:
    `gathered`, `gather_rows`, `receive_state`, `send_state`.
Losses and ops of a plan's own:
    `IGNORE_INDEX`, `autocast_dtype`, `register_gradient`.
Caches, and attention of few tokens to them:
    `CacheUsage`, `MAX_QUERIES`.
Layouts for models of which some layers carry a state:
    `Hybrid`, `HybridComparison`, `compare_hybrid_layouts`.
A model without weights, for the command `estimate`:
    `ModelRequest`, `MetaModel`.
The contract of a block kernel:
    `Kernel`, `Launch`, `Problem`, `Saved`, `Scores`.
"""

from dtensor_ring.balanced.hybrid import Hybrid, HybridComparison, compare_hybrid_layouts
from dtensor_ring.balanced.work import visible_pairs
from dtensor_ring.compute.kernels import Kernel, Launch, Problem, Saved, Scores, check_kernel
from dtensor_ring.dtensor.agreement import check_agreement, meeting
from dtensor_ring.dtensor.annotation import axis_group
from dtensor_ring.dtensor.axis_config import check_axis_options
from dtensor_ring.dtensor.gather import gathered
from dtensor_ring.dtensor.labels import IGNORE_INDEX
from dtensor_ring.dtensor.layer import number_layer
from dtensor_ring.dtensor.meta_model import MetaModel, ModelRequest
from dtensor_ring.dtensor.rows import gather_rows
from dtensor_ring.dtensor.sequence import from_local_tokens, layout_order, local_tokens
from dtensor_ring.dtensor.states import receive_state, send_state
from dtensor_ring.inference.cache import CacheUsage
from dtensor_ring.ops.autocast import autocast_dtype
from dtensor_ring.ops.caller import name_layer, within_layer
from dtensor_ring.ops.check import check_strided
from dtensor_ring.ops.decode_options import MAX_QUERIES
from dtensor_ring.ops.transforms import register_gradient
from dtensor_ring.planning.cache_table import turn_runs
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.run_table import as_layout, layout_names
from dtensor_ring.planning.strategy import check_strategy
from dtensor_ring.transport.transport import axis_group_options

__all__ = [
    "IGNORE_INDEX",
    "MAX_QUERIES",
    "CacheUsage",
    "Hybrid",
    "HybridComparison",
    "Kernel",
    "Launch",
    "Layout",
    "MetaModel",
    "ModelRequest",
    "Problem",
    "Saved",
    "Scores",
    "as_layout",
    "autocast_dtype",
    "axis_group",
    "axis_group_options",
    "check_agreement",
    "check_axis_options",
    "check_kernel",
    "check_strategy",
    "check_strided",
    "compare_hybrid_layouts",
    "from_local_tokens",
    "gather_rows",
    "gathered",
    "layout_names",
    "layout_order",
    "local_tokens",
    "meeting",
    "name_layer",
    "number_layer",
    "receive_state",
    "register_gradient",
    "send_state",
    "turn_runs",
    "visible_pairs",
    "within_layer",
]
