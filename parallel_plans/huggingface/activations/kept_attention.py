"""Lets layers that are computed again in backward keep the results of their attention.

Selective checkpointing of torch keeps what an op returned beside the graph, where the hooks of
saved tensors do not see it: up to torch 2.14 never, from 2.15 on if the caller asks for it. Here
they do, as what an attention returned is as large as the input of a layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import dtensor_ring  # noqa: F401 - registers the op

OPS = torch.ops.dtensor_ring
KEPT = tuple(op.default for op in (OPS.ring_attention, OPS.select_keys, OPS.selected_attention))


def ring_checkpoint_contexts() -> tuple[Any, Any]:
    """Return contexts for `torch.utils.checkpoint` that recompute everything but attention.

    A layer runs ring attention once in forward and once in backward, as without checkpointing. It
    keeps the output of its attention, `(B, N, L, H)`, and its log-sum-exp, beside its input, and
    the positions of keys that its index chose. Hooks of saved tensors around the layer, as those
    of `context_parallel_plan(..., offload=True)` and `torch.autograd.graph.save_on_cpu`, get all.

    Example:
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> model.activation_checkpointing_enable(
        ...     {"use_reentrant": False, "context_fn": ring_checkpoint_contexts}
        ... )
    """
    # None while a graph is traced, too: compilers know the contexts of torch only.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return create_selective_checkpoint_contexts([*KEPT])
    pack, unpack = hooks
    kept: deque[Any] = deque()
    return _Keeping(kept, pack), _Kept(kept, unpack)


class _Keeping(TorchDispatchMode):
    """Keeps the results of attentions, in the order of their calls."""

    def __init__(self, kept: deque[Any], pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._kept, self._pack = kept, pack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **kwargs or {})
        if func in KEPT:
            # Detached: the results will refer to the graph, which keeps these.
            tensors, form = tree_flatten(results)
            self._kept.append(([self._pack(x.detach()) for x in tensors], form))
        return results


class _Kept(TorchDispatchMode):
    """Gives these results in place of attentions, in the same order."""

    def __init__(self, kept: deque[Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self._kept, self._unpack = kept, unpack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in KEPT:
            return func(*args, **kwargs or {})
        if not self._kept:
            raise RuntimeError(
                "a second backward of a layer that keeps the results of its attention for one: "
                "with retain_graph=True, checkpoint without ring_checkpoint_contexts"
            )
        packed, form = self._kept.popleft()
        return tree_unflatten([self._unpack(x) for x in packed], form)
