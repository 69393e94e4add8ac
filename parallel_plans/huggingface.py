"""Context parallelism of Hugging Face models, without editing them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import wraps
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ParallelStyle

from dtensor_ring.annotation import axis_group
from dtensor_ring.layout import Layout, as_layout, shard_length
from dtensor_ring.mask import Mask
from dtensor_ring.op import Options, default_scale, ring_op
from dtensor_ring.sdpa import set_sequence_layout
from dtensor_ring.sequence import from_local_tokens, local_tokens

IMPLEMENTATION = "ring"
MODEL_TYPES = ("llama",)
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
IGNORE_INDEX = -100
PER_TOKEN = ("input_ids", "inputs_embeds", "position_ids", "labels", "shift_labels")


def context_parallel_plan(model: nn.Module, layout: Layout | str = "zigzag") -> dict[str, Any]:
    """A plan for `parallelize_module` that shards the model's sequence over a mesh axis.

    The model is called as before, with the **whole** batch on every rank of the axis. Inside,
    tokens, positions and next-token labels are dealt to the ranks in layout order, and attention
    is a ring. Of the outputs, `loss` is the mean over all valid tokens, the same number on every
    rank, and `logits` and hidden states are DTensors with `Shard(1)`, which `unshard_sequence`
    makes whole; under `torch.compile` they carry no gradient where `labels` ask for a loss.

    Gradients: each rank gets the share of its own tokens, so that their **sum** over the axis is
    the gradient of one process. Data parallelism *averages* over its ranks. Under FSDP2 over the
    flattened (dp, cp) mesh, call `set_gradient_divide_factor(dp_size)` on each FSDP module, so that
    it divides by the data-parallel ranks only; under DDP over all ranks, call
    `(cp_size * loss).backward()`. Without either, sum `param.grad` over the axis.

    Args:
        model: a Llama of transformers 5.x (`LlamaModel` or `LlamaForCausalLM`).
        layout: order in which tokens are dealt; "zigzag" balances causal attention.

    Returns:
        A plan of one entry for the model itself.

    Raises:
        ValueError: if the model is of another family, or the layout is unknown.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> model = parallelize_module(model, mesh, context_parallel_plan(model))
        >>> tokens = torch.arange(8).unsqueeze(0)
        >>> output = model(input_ids=tokens, labels=tokens)
        >>> output.loss.shape, unshard_sequence(output.logits, 1).shape
        (torch.Size([]), torch.Size([1, 8, 8]))
    """
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if family not in MODEL_TYPES:
        raise ValueError(
            f"no context-parallel plan for {family!r} yet; supported: {', '.join(MODEL_TYPES)}. "
            "dtensor_ring.ContextParallel serves any module that takes query, key and value"
        )
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in LENGTH_DEPENDENT_ROPE:
        raise ValueError(
            f"rotary embeddings of type {rope['rope_type']!r} depend on the largest position, "
            "which a rank that holds a part of the sequence does not see; default, linear, llama3 "
            "and yarn are supported"
        )
    return {"": ShardedModel(layout)}


class Dealt(NamedTuple):
    """What attention has to know of the batch; travels down as the keyword `ring`."""

    group_name: str
    layout: str
    seq_len: int


class ShardedModel(ParallelStyle):
    """Shards what goes into a model along the sequence, and puts together what comes out."""

    def __init__(self, layout: Layout | str) -> None:
        super().__init__()
        self.layout = as_layout(layout)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        from transformers import AttentionInterface

        AttentionInterface.register(IMPLEMENTATION, _attention)
        set_sequence_layout(device_mesh, self.layout)
        model: Any = module
        if "forward" in vars(model):
            raise ValueError("this model is context-parallel already; apply the plan once")
        _own_config(model)
        model.set_attn_implementation(IMPLEMENTATION)
        model.forward = MethodType(_sharded_forward(model, device_mesh, self.layout), model)
        return model


def _own_config(model: Any) -> None:
    """A config of its own, so that other models of the same config keep their attention."""
    shared = model.config
    own = deepcopy(shared)
    for module in model.modules():
        if getattr(module, "config", None) is shared:
            module.config = own


def _sharded_forward(model: nn.Module, mesh: DeviceMesh, layout: Layout) -> Callable[..., Any]:
    """The model's forward between the two halves of the sharding.

    A method of the instance, not hooks: torch.compile runs the hooks of the module that it
    compiles outside of the graph.
    """
    plain, sharding = type(model).forward, _Sharding(model, mesh, layout)

    @wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        batch = sharding.inputs(args, kwargs)
        return sharding.outputs(plain(self, **batch), batch["ring"].seq_len)

    return forward


class _Sharding:
    """What happens to a model's inputs and outputs.

    Note [Gradients of compiled outputs]: the backward of a compiled graph needs a gradient for each
    of its outputs that is a DTensor, and autograd has none for those that nobody used. Who asks for
    a loss uses the loss, so the other outputs are detached then.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh, layout: Layout) -> None:
        self._names = list(signature(model.forward).parameters)
        self._mesh, self._layout = mesh, layout
        self._group_name = axis_group(mesh).group_name

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """This rank's part of the batch, all by keyword."""
        given = dict(zip(self._names, args, strict=False)) | kwargs
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            raise ValueError("a context-parallel model needs input_ids or inputs_embeds, got none")
        seq_len = _check_lengths(given, self._mesh.size())
        _refuse(given)
        batch = {name: x for name, x in given.items() if x is not None and name != "attention_mask"}
        batch.setdefault("position_ids", torch.arange(seq_len, device=tokens.device).unsqueeze(0))
        if "labels" in batch:
            batch |= _next_tokens(batch)
        for name in PER_TOKEN:
            if name in batch:
                batch[name] = local_tokens(batch[name], self._mesh, 1, self._layout)
        dealt = Dealt(self._group_name, self._layout.name, seq_len)
        return batch | {"use_cache": False, "ring": dealt}

    def outputs(self, output: Any, seq_len: int) -> Any:
        """The loss of all ranks, and the rest as sharded DTensors."""
        has_loss = "loss" in output
        whole = {name: self._output(name, x, seq_len, has_loss) for name, x in output.items()}
        return type(output)(**whole)

    def _output(self, name: str, x: Any, seq_len: int, has_loss: bool) -> Any:
        if isinstance(x, tuple):
            return tuple(self._output(name, part, seq_len, has_loss) for part in x)
        if not isinstance(x, Tensor):
            return x
        if name == "loss":
            return DTensor.from_local(x, self._mesh, [Partial()], run_check=False).full_tensor()
        if has_loss and torch.compiler.is_compiling():
            x = x.detach()  # see Note [Gradients of compiled outputs]
        return from_local_tokens(x, self._mesh, 1, seq_len)


def _refuse(given: dict[str, Any]) -> None:
    """Errors for what would be computed wrongly over a sharded sequence."""
    for name in ("past_key_values", "use_cache", "output_attentions", "logits_to_keep"):
        if isinstance(given.get(name), Tensor) or given.get(name) not in (None, False, 0):
            raise ValueError(f"{name} is not supported over a sharded sequence; leave it out")
    if given.get("return_dict") is False:
        raise ValueError("return_dict=False is not supported over a sharded sequence")
    for name, is_plain in (("attention_mask", _is_ones), ("position_ids", _is_arange)):
        x = given.get(name)
        if x is not None and (torch.compiler.is_compiling() or not is_plain(x)):
            raise ValueError(
                f"{name} with padding, packing or a pattern of its own is not supported yet; leave "
                f"{name} out where all rows are whole sequences (under torch.compile always)"
            )


def _is_ones(attention_mask: Tensor) -> bool:
    return attention_mask.ndim == 2 and bool((attention_mask == 1).all())


def _is_arange(position_ids: Tensor) -> bool:
    return bool((position_ids == torch.arange(position_ids.shape[-1]).to(position_ids)).all())


def _check_lengths(given: dict[str, Any], world_size: int) -> int:
    """The length of the sequence, in tokens, which all inputs must have."""
    for name in (*PER_TOKEN, "attention_mask"):
        x = given.get(name)
        if x is not None and not (isinstance(x, Tensor) and x.ndim >= 2):
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor (B, S) or (B, S, H), got {got}")
    lengths = {
        name: given[name].shape[1]
        for name in (*PER_TOKEN, "attention_mask")
        if given.get(name) is not None
    }
    seq_len = next(iter(lengths.values()))
    if any(length != seq_len for length in lengths.values()):
        raise ValueError(f"the inputs of a model must have one length, got {lengths}")
    if not shard_length(world_size - 1, world_size, seq_len):
        raise ValueError(
            f"{seq_len} tokens are too short for {world_size} ranks: the last one would hold none, "
            "which transformers' layers do not take"
        )
    return seq_len


def _next_tokens(batch: dict[str, Any]) -> dict[str, Any]:
    """Labels shifted before they are dealt, and the number of valid ones of all ranks."""
    targets = batch.get("shift_labels")
    if targets is None:
        targets = nn.functional.pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:]
    count = batch.get("num_items_in_batch")
    if count is None:
        count = (targets != IGNORE_INDEX).sum()
    return {"shift_labels": targets, "num_items_in_batch": count}


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    ring: Dealt | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention implementation named `ring`: local shards `(B, N, L, H)` to `(B, L, N, H)`."""
    if ring is None:
        raise ValueError(
            'attention "ring" needs the model to be called as a whole: parallelize_module with '
            "context_parallel_plan on the module that you call"
        )
    if dropout:
        raise ValueError(f"a ring has no attention dropout, got {dropout}; set attention_dropout=0")
    if attention_mask is not None:
        raise ValueError(f"a ring takes no attention mask, got {tuple(attention_mask.shape)}")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask = Mask.causal() if causal else Mask.full()
    scale = default_scale(query.shape[-1]) if scaling is None else scaling
    options = Options(
        seq_len=ring.seq_len,
        key_seq_len=ring.seq_len,
        layout=ring.layout,
        left=mask.left,
        right=mask.right,
        scale=scale,
        group_name=ring.group_name,
    )
    out, _lse = ring_op(query, key, value, *options)
    return out.transpose(1, 2), None
