"""Programs that users write around a planned model, as data; hypothesis draws them from `rules.py`.

A program is lines of Python. The same lines run on the stock model in one process, where a plan
does nothing, see `running.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from tests.border.models import LAYOUTS, MODELS
from tests.border.rules import RULES, WEIGHTS, Rule, holds

LENGTHS = (13, 12, 21, 8, 16, 5, 24, 3, 2, 1, 33)
OTHERWISE = "forward", "cast", "adapters", "saving", "change", "wrapper", "generation"
"""Families that seldom come while there is an output to work with."""
NUM_STEPS = (3, 4, 5, 6, 6, 6)
PREAMBLE = """\
# torchrun --nproc-per-node {ranks} program.py
import copy, io, tempfile
import torch, torch.distributed as dist, torch.nn.functional as F
import torch.distributed.checkpoint as dcp
from peft import IA3Config, LoraConfig, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer
from dtensor_ring import shard_sequence, unshard_sequence
from parallel_plans.huggingface import ContextParallelCache, context_parallel_plan
from parallel_plans.huggingface import restore_model, ring_checkpoint_contexts, stock_model
from tests.families import small_model

if not dist.is_initialized():
    dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))

def build():
    model = small_model({family!r}, {head!r}{changes}){dtype}
    model.set_attn_implementation({attention!r})
    return model

def average(model):
    for x in model.parameters():
        if x.grad is not None and not isinstance(x.grad, DTensor):  # FSDP averages
            dist.all_reduce(x.grad)
            x.grad.div_(dist.get_world_size())

def shard_weights(model):
    layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
    for module in (*layers, model):
        fully_shard(module, mesh=mesh)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no means

folders = []

def folder():
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    folders.append(names[0])
    return names[0]

B, S, features = {batch}, {length}, {features}
ids = torch.randint(2, 32, (B, S), generator=torch.Generator().manual_seed(5))
targets, rows = {targets}, torch.arange(B) % 2
packed = torch.cat([torch.arange(S // 2), torch.arange(S - S // 2)]).expand(B, S)
left, right = torch.ones_like(ids), torch.ones_like(ids)
left[0, : S // 3], right[0, S - S // 3 :] = 0, 0
left_targets = targets.masked_fill(left == 0, -100)
right_targets = targets.masked_fill(right == 0, -100)
left_targets[0, : S // 3 + 1] = -100  # padding would predict it
# What the lines use beside an output `x`.
labels = torch.arange(B * S).view(B, S) * 7 % min(features, S)
mask = torch.arange(B * S).view(B, S) % 3 != 1
index = torch.tensor([S - 1, 0, S // 2])
other = (torch.arange(B * S).view(B, S, 1) * 3 + torch.arange(features)).sin(){dtype}
weight = torch.arange(4.0 * features).view(4, features).cos(){dtype}
"""


@dataclass(frozen=True)
class Step:
    """Lines that a user writes at once.

    Attributes:
        rule: name of the family of rules that it comes from.
        code: the lines.
        compares: expressions whose values are those of one process afterwards.
    """

    rule: str
    code: str
    compares: tuple[str, ...] = ()


@dataclass(frozen=True)
class Program:
    """What a user writes, and on how many ranks it runs.

    Attributes:
        model: a name of `MODELS`.
        ranks: how many.
        batch: rows.
        length: tokens of a row.
        dtype: "double" or "float".
        steps: in their order; the first one builds the model.
    """

    model: str
    ranks: int
    batch: int
    length: int
    dtype: str
    steps: tuple[Step, ...]

    @property
    def preamble(self) -> str:
        """The lines before the steps: imports, the mesh, the batch."""
        model = MODELS[self.model]
        return PREAMBLE.format(
            ranks=self.ranks,
            family=model.family,
            head=model.head,
            changes=model.changes,
            attention=model.attention,
            batch=self.batch,
            length=self.length,
            features=model.features,
            targets=model.targets,
            dtype=f".{self.dtype}()",
        )

    def __str__(self) -> str:
        return self.preamble + "\n" + "\n".join(step.code for step in self.steps)

    def __repr__(self) -> str:
        return f"<program on {self.ranks} ranks>\n{self}\n"


BUILD = Step("build", "model = build()")


@st.composite
def programs(draw: st.DrawFn, ranks: int, compiles: bool = False) -> Program:
    """Programs of three to six steps after the first, of which one is a plan."""
    name = draw(st.sampled_from([x for x, model in MODELS.items() for _ in range(model.weight)]))
    batch, length = draw(st.sampled_from((2, 2, 2, 1, 3))), draw(st.sampled_from(LENGTHS))
    dtype = draw(st.sampled_from(MODELS[name].dtypes))
    facts = set(MODELS[name].facts.split()) | {f"rows{batch}", dtype}
    facts |= {"compiles"} if compiles else set()
    steps = [BUILD]
    num_steps = draw(st.sampled_from(NUM_STEPS))
    while len(steps) <= num_steps:
        families = _families(facts, len(steps), num_steps)
        if len(steps) >= 2 and "plan" not in {step.rule for step in steps}:
            families = ["plan"]
        family = draw(st.sampled_from(families))
        rule = draw(st.sampled_from([x for x in RULES[family] if holds(x.needs, facts)]))
        layout = draw(st.sampled_from(LAYOUTS if "hybrid" not in facts else LAYOUTS[:-1]))
        steps.append(Step(family, rule.code.replace("LAYOUT", layout), rule.compares))
        facts = _after(rule, facts)
    return Program(name, ranks, batch, length, dtype, tuple(steps))


def _families(facts: set[str], place: int, num_steps: int) -> list[str]:
    """Families of rules that may come next, each as often as it weighs."""
    possible = [x for x in RULES if any(holds(rule.needs, facts) for rule in RULES[x])]
    if place == num_steps:  # what yields nothing is no end
        ends = [x for x in possible if any(rule.compares for rule in RULES[x])]
        possible = ends or possible
    has_output = facts & {"x", "padded", "loss", "grads"}
    seldom = OTHERWISE if has_output else ()
    return [x for x in possible for _ in range(1 if x in seldom else WEIGHTS[x])]


def _after(rule: Rule, facts: set[str]) -> set[str]:
    """What is so after a step."""
    gives = rule.gives.split()
    gone = {x[1:] for x in gives if x.startswith("-")}
    come = {x for x in gives if not x.startswith("-")}
    if come & {"x", "padded"}:
        gone.add("sharded")
        if "planned" in facts and "whole" not in facts:
            come.add("sharded")
    return (facts - gone) | come
