"""A batch of a Hugging Face model: checks, padding, and the part of each rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_ring import next_token_labels
from dtensor_ring.extension import IGNORE_INDEX, Layout, check_strided, local_tokens
from parallel_plans.huggingface.language_model import has_axes

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
WHOLE = (*BOUNDARIES, "num_items_in_batch")
SHAPES = {"inputs_embeds": "(B, S, H)", "per_layer_inputs": "(B, S, num_layers, H)"}
# Positions of several axes have the sequence in the last dim; other inputs have it in dim 1.
POSITIONS, SHAPES_OF_AXES = "position_ids", ("(3, B, S)", "(4, B, S)")
LOGITS_TO_KEEP = "logits_to_keep"
NO_ALORA = (
    "adapters that begin at a token of the sequence, aLoRA, would begin on every rank; leave "
    "alora_invocation_tokens out"
)
SAME_BATCH = (
    "get the same batch (a sampler has to count, and random collators be seeded by, "
    "data-parallel ranks only) and have the same weights (seeded before the model is made, or "
    "loaded, and gradients averaged over them)"
)


def has_content(batch: dict[str, Any]) -> bool:
    """Return whether the tensors hold real data, which can be compared between ranks."""
    # A graph cannot raise, and tensors within transforms of torch.func have no memory to read.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    tensors = [x for x in batch.values() if isinstance(x, Tensor)]
    return detect_fake_mode(tensors) is None and not any(x.is_meta for x in tensors)


def described(batch: dict[str, Any]) -> dict[str, str]:
    """Describe the batch, so that ranks can tell whether they have the same one."""
    return {name: _described(x) for name, x in batch.items()}


def _described(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(_described, x))}]"
    if not isinstance(x, Tensor):
        return repr(x) if isinstance(x, (bool, int, float, str)) else type(x).__name__
    if x.layout is not torch.strided or x.is_nested:
        return f"{x.layout} {x.dtype}"  # no shape, or no dense content
    kind = f"{x.dtype} {tuple(x.shape)}"
    if isinstance(x, DTensor):
        return f"DTensor {kind}"
    if x.is_meta or x.is_quantized:  # no content to compare
        return f"{x.device.type} {kind}"
    if x.is_floating_point():  # computed values may differ in rounding
        return kind
    return f"{kind} of checksum {crc32(x.detach().cpu().contiguous().numpy().tobytes()):08x}"


def check_batch(model: Any, given: dict[str, Any]) -> int:
    """Refuse what would be computed wrongly; return the length of the sequence, in tokens.

    Raises:
        ValueError: naming the argument.
    """
    _check_model(model)
    if given.get("input_ids") is None and given.get("inputs_embeds") is None:
        raise ValueError("a context-parallel model needs input_ids or inputs_embeds, got none")
    for name in ("input_ids", "inputs_embeds", "labels", "position_ids", "attention_mask"):
        x = given.get(name)
        if x is not None and (not isinstance(x, Tensor) or isinstance(x, DTensor)):
            raise ValueError(
                f"{name} must be one tensor over a sharded sequence, plain and whole on every "
                f"rank, got {type(x).__name__}"
            )
        if x is not None:
            check_strided(name, x)
            _check_dtype(name, x)
    if given.get("output_attentions"):
        raise ValueError(
            "output_attentions is not supported over a sharded sequence, whose scores no rank has; "
            "leave it out"
        )
    _check_kept(given)
    if given.get("ignore_index", IGNORE_INDEX) != IGNORE_INDEX:
        raise ValueError(
            f"ignore_index is {IGNORE_INDEX} over a sharded sequence, got {given['ignore_index']}; "
            "give such labels that number"
        )
    seq_len = _check_lengths(given, has_axes(model))
    _check_range(model, given)
    return seq_len


def _check_model(model: Any) -> None:
    """Refuse an export, and adapters whose effect on a token depends on other tokens."""
    if torch.compiler.is_exporting():
        raise ValueError(
            "torch.export takes one process, and a context-parallel model sends messages; export "
            "within `with stock_model(model):`"
        )
    if has_alora(getattr(model, "peft_config", {}).values()):
        raise ValueError(NO_ALORA)


def has_alora(adapters: Iterable[Any]) -> bool:
    """Return whether one of these peft configs has adapters that begin at a token."""
    return any(getattr(adapter, "alora_invocation_tokens", None) for adapter in adapters)


def _check_kept(given: dict[str, Any]) -> None:
    """Refuse a `logits_to_keep` that is not a number of last tokens, or comes with labels."""
    kept = given.get(LOGITS_TO_KEEP, 0)
    if type(kept) is not int or kept < 0:
        what = f"a tensor {tuple(kept.shape)}" if isinstance(kept, Tensor) else repr(kept)
        raise ValueError(
            f"{LOGITS_TO_KEEP} must be a number of last tokens over a sharded sequence, got {what}"
        )
    if kept and given.get("labels") is not None:
        raise ValueError(
            f"labels need the logits of all tokens, and {LOGITS_TO_KEEP}={kept}; leave one out"
        )


def _check_dtype(name: str, x: Tensor) -> None:
    """Refuse dtypes that cannot be tokens, positions, labels, embeddings or masks."""
    is_float = x.is_floating_point()
    if name in ("input_ids", "labels", "position_ids") and x.dtype not in INTEGERS:
        raise ValueError(f"{name} must be integers, got {x.dtype}; use .long()")
    if name == "inputs_embeds" and not is_float:
        raise ValueError(f"{name} must be floating, got {x.dtype}; or pass them as input_ids")
    if name == "attention_mask" and (x.is_complex() or x.is_quantized):
        raise ValueError(f"{name} must be ones and zeros, got {x.dtype}; use .bool()")


def _check_range(model: Any, batch: dict[str, Any]) -> None:
    """Refuse tokens and labels that the model has no row for, on all ranks alike.

    Later, only the rank that holds the token would fail, and the others would wait for it. Tensors
    on a GPU are not checked, as reading them would synchronize.

    Raises:
        ValueError: naming the argument.
    """
    head = model.get_output_embeddings()
    num_labels = model.config.num_labels if head is None else _num_words(model, head)
    num_tokens = _num_words(model, model.get_input_embeddings())
    for name, count in (("input_ids", num_tokens), ("labels", num_labels)):
        x = batch.get(name)
        if x is None or x.device.type != "cpu" or torch.compiler.is_compiling():
            continue
        wrong = x[((x < 0) | (x >= count)) & ((x != IGNORE_INDEX) | (name != "labels"))]
        if wrong.numel():
            raise ValueError(
                f"{name} must be from 0 to {count - 1}, as the model has {count} of them, got "
                f"{wrong[0].item()}"
            )


def _num_words(model: Any, embeddings: nn.Module) -> int:
    """Return the number of rows of the weight, or the vocabulary size if a wrapper hides it."""
    weight = getattr(embeddings, "weight", None)
    return model.config.get_text_config().vocab_size if weight is None else weight.shape[0]


def _check_lengths(given: dict[str, Any], has_axes: bool) -> int:
    """Refuse inputs of wrong shape or different lengths; return the length."""
    lengths = {}
    for name, x in given.items():
        if x is None or name in WHOLE or not isinstance(x, Tensor):
            continue
        shapes = [SHAPES.get(name, "(B, S)")]
        if name == POSITIONS and has_axes:
            shapes += SHAPES_OF_AXES
        if not any(_fits(x, shape) for shape in shapes):
            raise ValueError(
                f"{name} must be {' or '.join(shapes)} over a sharded sequence, got "
                f"{tuple(x.shape)}"
            )
        if not x.numel():
            raise ValueError(f"{name} must hold at least one token, got shape {tuple(x.shape)}")
        lengths[name] = x.shape[_sequence_dim(name)]
    _check_rows(given)
    seq_len = next(iter(lengths.values()))
    if any(length != seq_len for length in lengths.values()):
        raise ValueError(f"the inputs of a model must have one length, got {lengths}")
    return seq_len


def _fits(x: Tensor, shape: str) -> bool:
    """Return whether the tensor has the dims of the shape, and the sizes where it gives numbers."""
    sizes = shape.strip("()").split(", ")
    if len(sizes) != x.ndim:
        return False
    return all(
        int(size) == number for size, number in zip(sizes, x.shape, strict=True) if size.isdigit()
    )


def _sequence_dim(name: str) -> int:
    """Return the dimension of an argument that holds the tokens."""
    return -1 if name == POSITIONS else 1


def _check_rows(given: dict[str, Any]) -> None:
    """Refuse wrong row counts: masks and positions may have one row for all, labels may not."""
    ids = given.get("input_ids")
    tokens = given["inputs_embeds"] if ids is None else ids
    for name, rows in (("attention_mask", 1), ("position_ids", 1), ("labels", len(tokens))):
        x = given.get(name)
        if x is not None and x.shape[_sequence_dim(name) - 1] not in (rows, len(tokens)):
            raise ValueError(
                f"{name} must have the {len(tokens)} rows of the tokens, got {tuple(x.shape)}"
            )


def pad(batch: dict[str, Any], by: int) -> dict[str, Any]:
    """Return the batch with `by` more tokens at its end, which have no labels."""
    padded = dict(batch)
    for name, x in batch.items() if by else ():
        if isinstance(x, Tensor) and name not in WHOLE:
            value = IGNORE_INDEX if name.endswith("labels") else 0
            after = (x.ndim - 1 - _sequence_dim(name)) % x.ndim
            padded[name] = nn.functional.pad(x, (0, 0) * after + (0, by), value=value)
    return padded


def local_batch(batch: dict[str, Any], mesh: DeviceMesh, layout: Layout) -> dict[str, Any]:
    """Return the batch with this rank's tokens of each tensor that is sharded."""
    return {
        name: local_tokens(x, mesh, _sequence_dim(name), layout)
        if isinstance(x, Tensor) and name not in WHOLE
        else x
        for name, x in batch.items()
    }


def next_tokens(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the labels, shifted to the next token before they are sharded, and their number."""
    targets = batch.get("shift_labels")
    if targets is None:
        targets = next_token_labels(batch["labels"])
    return {"shift_labels": targets, "num_items_in_batch": num_items(batch | {"labels": targets})}


def take_labels(batch: dict[str, Any]) -> Tensor | None:
    """Pop the labels, which the model must not see; prefer those that are shifted already."""
    labels = batch.pop("labels", None)
    batch.pop("num_items_in_batch", None)
    return batch.pop("shift_labels", labels)


def num_items(batch: dict[str, Any]) -> Any:
    """Return the divisor of the summed losses: as given, or the number of labels."""
    if "labels" not in batch or "num_items_in_batch" in batch:
        return batch.get("num_items_in_batch")
    return (batch["labels"] != IGNORE_INDEX).sum()
