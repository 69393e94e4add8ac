"""What ranks may disagree in, as data: what rank 0 does, what the others do, what all raise."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dtensor_ring import Mask
from tests.faults.calls import CAUSAL, Call


@dataclass(frozen=True)
class Difference:
    """A way in which rank 0 differs from all others.

    Attributes:
        reported: a pattern in the message that names the difference; `None` if all are right.
        reported_in_inference: likewise, where inference differs; "" if it does not.
        odd: what rank 0 does, as fields of `Call`.
        usual: what the others do.
        spares_rank_0: whether rank 0 asks nothing of the others, and is told nothing.
    """

    reported: str | None
    odd: dict[str, Any] = field(default_factory=dict)
    usual: dict[str, Any] = field(default_factory=dict)
    reported_in_inference: str | None = ""
    spares_rank_0: bool = False

    @property
    def suits_sdpa(self) -> bool:
        """Whether `F.scaled_dot_product_attention` takes all of it."""
        beyond = {"cu_seqlens", "block", "runs_of", "num_keys_of_rank_0"}
        beyond = (beyond | {"softcap", "kernel", "sinks"}) & {
            *self.odd,
            *self.usual,
        }
        masks = [fields.get("mask", CAUSAL) for fields in (self.odd, self.usual)]
        return not beyond and all(mask in (CAUSAL, Mask.full()) for mask in masks)

    def calls(self, layout: str, world_size: int) -> tuple[Call, ...]:
        """By rank; `layout` is that of all, unless they differ in it."""
        other = {"contiguous": "zigzag", "zigzag": "contiguous"}[layout]
        named = [
            {name: other if x == OTHER else x for name, x in fields.items()}
            for fields in (self.odd, self.usual)
        ]
        return Difference(None, *named).by_rank(Call(layout=layout), world_size)

    def by_rank(self, base: Any, world_size: int, odd: int = 0) -> tuple[Any, ...]:
        """`base`, a dataclass, as each rank has it, of which one is odd."""
        fields = [self.odd if rank == odd else self.usual for rank in range(world_size)]
        return tuple(replace(base, **here) for here in fields)

    def expected(self, training: bool) -> str | None:
        """The pattern of what ranks raise."""
        same = training or self.reported_in_inference == ""
        return self.reported if same else self.reported_in_inference


OTHER = "the other layout"
SLIDING = Mask.sliding(4)
F16, BF16 = torch.float16, torch.bfloat16
LINE = "call site: calls.py"
"""What names the line of code that makes a call."""
BOTH = ("first", "second")

DIFFERENCES = {
    "mask: full, causal": Difference("mask", {"mask": Mask.full()}),
    "mask: sliding 4, causal": Difference("mask", {"mask": SLIDING}),
    "mask: sliding 4, 30": Difference("mask", {"mask": SLIDING}, {"mask": Mask.sliding(30)}),
    "mask: sliding 40, 30": Difference(
        "mask", {"mask": Mask.sliding(40)}, {"mask": Mask.sliding(30)}
    ),
    "documents: other boundaries": Difference(
        "cu_seqlens", {"cu_seqlens": (0, 20, 48)}, {"cu_seqlens": (0, 28, 48)}
    ),
    "documents: some, none": Difference("cu_seqlens", {"cu_seqlens": (0, 20, 48)}),
    "documents: other padding": Difference(
        "cu_seqlens", {"cu_seqlens": (0, 10)}, {"cu_seqlens": (0, 13)}
    ),
    "documents beyond the end, tokens for heads": Difference(
        "cu_seqlens",
        {"cu_seqlens": (0, 10, 49), "strategy": "ulysses"},
        {"cu_seqlens": (0, 10, 48), "strategy": "ulysses"},
    ),
    "slices: another block": Difference("slices", {"block": (4, 20)}, {"block": (4, 30)}),
    "dtype: bfloat16, float32": Difference("dtype", {"dtype": BF16}),
    "dtype: autocast, none": Difference("dtype", {"autocast": True}),
    "dtype: bfloat16, float16": Difference("dtype", {"dtype": BF16}, {"dtype": F16}),
    "batch": Difference("batch", {"batch": 1}),
    "heads": Difference("query heads", {"heads": (2, 2)}),
    "key heads": Difference("key heads", {"heads": (4, 1)}),
    "head dim": Difference("head dim", {"head_dim": 4}),
    "local length": Difference("tokens", {"seq_len": 24}),
    "heads and key heads": Difference("key heads", {"heads": (4, 4)}, {"heads": (2, 2)}),
    "heads of another size": Difference(
        "head dim", {"heads": (4, 4), "head_dim": 8}, {"heads": (2, 2), "head_dim": 16}
    ),
    "layout": Difference("layout", {"layout": OTHER}),
    "layout: striped": Difference("layout", {"layout": "striped"}),
    "kernel": Difference("kernel", {"kernel": "reference"}),
    "scale": Difference("scale", {"scale": 0.5}, {"scale": 0.25}),
    "softcap": Difference("softcap", {"softcap": 2.0}),
    "sinks": Difference("sinks", {"sinks": (0.5, -1.0, 2.0, 0.0)}),
    "strategy": Difference("strategy", {"strategy": "direct"}, {"strategy": "around"}),
    "strategy: tokens for heads": Difference("direction", {"strategy": "ulysses"}),
    "machine": Difference(
        "machine: for ring",
        {"strategy": "auto", "machine": "2026-11-01"},
        {"strategy": "auto", "machine": "2026-11-02"},
    ),
    "kv_dtype": Difference("kv_dtype", {"kv_dtype": BF16}),
    "kv_dtype: eight bits, their own": Difference("kv_dtype", {"kv_dtype": "int8"}),
    "grad_dtype": Difference("grad_dtype", {"grad_dtype": BF16}),
    "num_parts": Difference("num_parts", {"num_parts": 2}),
    "transport": Difference("transport='symmetric'", {"transport": "symmetric"}),
    "runs of other documents": Difference(
        "runs", {"runs_of": (0, 4, 48)}, {"runs_of": (0, 44, 48)}
    ),
    "runs of other keys": Difference(
        "key_runs", {"num_keys_of_rank_0": 8}, {"num_keys_of_rank_0": 12}
    ),
    "one ring more": Difference(LINE, {"lines": ("second", "first")}),
    "backward skipped": Difference("direction", {"backward": ()}, reported_in_inference=None),
    "no_grad": Difference("direction", {"records": False}, reported_in_inference=None),
    "frozen": Difference("direction", {"frozen": True}, reported_in_inference=None),
    "other order, one shape": Difference(LINE, {"lines": ("second", "first")}, {"lines": BOTH}),
    "other order, two shapes": Difference(
        "head dim",
        {"lines": ("second", "first"), "second_head_dim": 16},
        {"lines": BOTH, "second_head_dim": 16},
    ),
    "no call": Difference("rank 0", {"lines": ()}, spares_rank_0=True),
}
