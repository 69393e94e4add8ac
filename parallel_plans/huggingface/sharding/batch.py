"""A batch of a Hugging Face model: checks, padding, and the part of each rank."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtensor_ring.extension import IGNORE_INDEX, Layout, check_strided
from parallel_plans.huggingface.core import whole_rows
from parallel_plans.huggingface.core.adapters import adapters_of, check_adapters
from parallel_plans.huggingface.core.attention_function import RingInputs
from parallel_plans.huggingface.core.documents import DocumentBounds, blocks, has_content
from parallel_plans.huggingface.core.layer_inputs import ScanChunks
from parallel_plans.huggingface.core.model_masks import (
    PrecomputedMask,
    is_precomputed,
    precomputed_masks,
)
from parallel_plans.huggingface.core.modules import NO_CROSS_ATTENTION, has_axes
from parallel_plans.huggingface.core.padding import check_ones_and_zeros
from parallel_plans.huggingface.losses.loss import LossFunction

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
# The number of each token's document, `(B, S)`, for kernels of Mamba.
DOCUMENT_NUMBERS = "seq_idx"
# Positions of several axes have the sequence in the last dim; other inputs have it in dim 1.
POSITIONS, NUM_AXES = "position_ids", (1, 3, 4)
SHAPES = {"inputs_embeds": "(B, S, H)", "per_layer_inputs": "(B, S, num_layers, H)"}
LOGITS_TO_KEEP = "logits_to_keep"
OF_ENCODERS = ("encoder_hidden_states", "cross_attention_states")


@dataclass(frozen=True)
class ModelBatch:
    """The arguments of a call, about all tokens or about those of this rank.

    Attributes:
        name: the argument that holds the tokens, `input_ids` or `inputs_embeds`.
        tokens: ids, `(B, S)`, or embeddings, `(B, S, H)`.
        positions: `(B, S)`, or with several axes `(3, B, S)` or `(4, B, S)`, `(1, B, S)` if
            these are equal.
        mask: 1 for tokens and 0 for padding, `(B, S)`.
        seen: what tokens see if the outer model made their masks: one, or one per layer type.
        labels: what each token should predict, `(B, S)`.
        label_shift: how many tokens later in `labels` that is.
        num_items: divisor of the loss, the number of labels of the whole batch.
        cu_seq_lens_q: boundaries of documents in the whole batch, `(D+1,)`.
        cu_seq_lens_k: the same boundaries for keys.
        seq_idx: the number of each token's document, `(B, S)`.
        others: the other arguments, passed on by name; tensors have the tokens in dim 1.
    """

    name: str
    tokens: Tensor
    positions: Tensor | None = None
    mask: Tensor | None = None
    seen: Any = None
    labels: Tensor | None = None
    label_shift: int = 0
    num_items: Any = None
    cu_seq_lens_q: Tensor | None = None
    cu_seq_lens_k: Tensor | None = None
    seq_idx: Tensor | None = None
    others: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchPlan:
    """How a batch is sharded over the ranks of an axis.

    Attributes:
        seq_len: tokens of a row, without padding.
        sharded_length: tokens of a row, with the padding of the layout.
        layout: the layout of this batch.
        documents: where documents begin and end.
        indices: which tokens of a padded row this rank has, `(L,)`.
        scan_chunks: chunks of the sequence, for layers with a state.
    """

    seq_len: int
    sharded_length: int
    layout: Layout
    documents: DocumentBounds
    indices: Tensor
    scan_chunks: ScanChunks | None


def parse(model: Any, arguments: dict[str, Any], loss: LossFunction) -> ModelBatch:
    """Check the arguments of a call, and return them as a batch.

    Nothing is copied: `shard` takes the tokens of a rank, and shifts their labels.

    Raises:
        ValueError: naming the argument that would be computed wrongly.
    """
    others = dict(arguments)
    seen = others.pop("attention_mask") if is_precomputed(others.get("attention_mask")) else None
    cu_seq_lens_q, cu_seq_lens_k, *_ = [others.pop(name, None) for name in BOUNDARIES]
    num_items = others.pop("num_items_in_batch", None)
    seq_len = check_batch(model, others)
    labels, shifted = others.pop("labels", None), others.pop("shift_labels", None)
    shift = 0
    if labels is not None:
        loss.check(model)
        shift = int(loss.predicts_next and shifted is None)
        labels = labels if shifted is None else shifted
    seq_idx = others.pop(DOCUMENT_NUMBERS, None)
    if seen is not None:
        if cu_seq_lens_q is not None or seq_idx is not None:
            name = DOCUMENT_NUMBERS if cu_seq_lens_q is None else BOUNDARIES[0]
            raise ValueError(
                f"{name} say where documents are, and the model has made its masks without "
                "them; give position_ids that start again instead"
            )
        seen = precomputed_masks(seen, seq_len)
    others.pop("ignore_index", None)  # it is the only one that labels may have, see `check_batch`
    name = "input_ids" if "input_ids" in others else "inputs_embeds"
    return ModelBatch(
        name=name,
        tokens=others.pop(name),
        positions=others.pop(POSITIONS, None),
        mask=others.pop("attention_mask", None),
        seen=seen,
        labels=labels,
        label_shift=shift,
        num_items=num_items,
        cu_seq_lens_q=cu_seq_lens_q,
        cu_seq_lens_k=cu_seq_lens_k,
        seq_idx=seq_idx,
        others=others,
    )


def check_places(batch: ModelBatch, counted: str) -> None:
    """Refuse a batch of all tokens whose rows are divided in another way than layers count places.

    Args:
        batch: the batch.
        counted: from where on they count: `ROW`, `TOKENS` or `DOCUMENTS`.

    Raises:
        ValueError: saying why.
    """
    is_compiling = torch.compiler.is_compiling()
    if counted == whole_rows.DOCUMENTS and not is_compiling and batch.seen is None:
        return  # boundaries say all
    check_undivided(batch)
    if counted == whole_rows.TOKENS and not is_compiling:
        if has_content(batch.mask, batch.positions):
            whole_rows.check_one_document(batch.mask, batch.positions)
    elif is_compiling or has_content(batch.mask, batch.positions):
        whole_rows.check_whole_rows(batch.mask, batch.positions)


def check_undivided(batch: ModelBatch) -> None:
    """Refuse a batch that names documents, or what tokens see.

    Raises:
        ValueError: naming the argument.
    """
    named = {BOUNDARIES[0]: batch.cu_seq_lens_q, DOCUMENT_NUMBERS: batch.seq_idx}
    for name, x in (named | {"a mask of the model's own": batch.seen}).items():
        if x is not None:
            raise ValueError(f"{name} says where documents are, and {whole_rows.WHOLE_ROWS}")


def num_labels(batch: ModelBatch) -> Tensor:
    """Return the number of tokens of a batch that have a label."""
    assert batch.labels is not None
    labels = batch.labels[:, batch.label_shift :]
    return torch.stack([(x != IGNORE_INDEX).sum() for x in blocks(labels)]).sum()


# Which tokens belong to images, `(B, S)`, and what early layers add to these, by layer, `(T, H)`.
IS_IMAGE, FEATURES = "visual_pos_masks", "deepstack_visual_embeds"


def shard(batch: ModelBatch, indices: Tensor, sharded_length: int, past: int = 0) -> ModelBatch:
    """Return the tokens at `indices`, `(L,)`, of a batch that is padded to `sharded_length`.

    Positions that are not given count from `past`. The label of a token may be on another rank, so
    labels are shifted here, where all are known.
    """
    seq_len = batch.tokens.shape[1]
    is_padded = sharded_length > seq_len

    def local(x: Tensor | None, dim: int = 1, value: int = 0, shift: int = 0) -> Any:
        if x is None:
            return None
        # Labels shift where the whole batch is. In zigzag over two ranks, rank 0 of 8 tokens has:
        #     tokens   0 1 6 7
        #     labels   1 2 7 8    8 is past the end, so it is ignored
        where = (indices + shift if shift else indices).to(x.device)
        if not (is_padded or shift):
            return x.index_select(dim, where)
        # Indices past the end are padding: they read the last token, and get `value` in its place.
        is_after = (where >= seq_len).view((-1, *(1,) * ((x.ndim - 1 - dim) % x.ndim)))
        return x.index_select(dim, where.clamp(max=seq_len - 1)).masked_fill(is_after, value)

    if batch.positions is None:
        counted = (indices + past).masked_fill(indices >= seq_len, 0).unsqueeze(0)
        positions = counted if is_padded else (indices + past).unsqueeze(0)
    else:
        positions = local(batch.positions, dim=-1)
    others = {name: local(x) if isinstance(x, Tensor) else x for name, x in batch.others.items()}
    if FEATURES in others:
        # Features have a row for each image token of the batch, in order. A rank takes the rows
        # of its own tokens: the number of such tokens before one is its row.
        is_image = batch.others[IS_IMAGE]
        # Features are those of the whole batch, a row for each token of an image: that of a token
        # is how many such tokens come before it.
        rows = local(is_image.flatten().cumsum(0).view(is_image.shape) - 1)[others[IS_IMAGE]]
        others[FEATURES] = [x.index_select(0, rows.to(x.device)) for x in others[FEATURES]]
    return replace(
        batch,
        tokens=local(batch.tokens),
        positions=positions,
        mask=local(batch.mask),
        labels=local(batch.labels, value=IGNORE_INDEX, shift=batch.label_shift),
        label_shift=0,
        others=others,
    )


def keywords(
    batch: ModelBatch, ring: RingInputs, mask: Tensor | None = None, use_cache: bool = False
) -> dict[str, Any]:
    """Return the keywords of the model's forward on these tokens.

    Note [A mask of ones]: without an attention mask, transformers takes jumps in positions for
    packed documents, but the positions of a shard jump anyway. We pass a mask of ones, and find the
    documents in the whole batch. `mask`, `(B, L)`, replaces the ones. Models read whether all are
    ones, so they have content where tokens have none.
    """
    if mask is None:
        device = "cpu" if batch.tokens.is_meta else batch.tokens.device
        mask = torch.ones(batch.tokens.shape[:2], dtype=torch.bool, device=device)
    seen = batch.seen
    # Layers look up their mask in a dict by type; the model would take a single one for a tensor.
    return batch.others | {
        batch.name: batch.tokens,
        POSITIONS: batch.positions,
        "attention_mask": seen if isinstance(seen, dict) else mask,
        "ring": ring._replace(precomputed=seen) if isinstance(seen, PrecomputedMask) else ring,
        "use_cache": use_cache,
    }


_OF_INTEGERS = ("input_ids", "labels", POSITIONS, DOCUMENT_NUMBERS)
_OF_TOKENS = ("inputs_embeds", "attention_mask", *_OF_INTEGERS)


def check_batch(model: Any, arguments: dict[str, Any]) -> int:
    """Refuse what would be computed wrongly; return the length of the sequence, in tokens.

    Raises:
        ValueError: naming the argument.
    """
    given = {x: arguments[x] for x in _OF_TOKENS if arguments.get(x) is not None}
    _check_model(model)
    if arguments.get("input_ids") is None and arguments.get("inputs_embeds") is None:
        raise ValueError("a context-parallel model needs input_ids or inputs_embeds, got none")
    for name, x in given.items():
        if not isinstance(x, Tensor) or isinstance(x, DTensor):
            raise ValueError(
                f"{name} must be one tensor over a sharded sequence, plain and whole on every "
                f"rank, got {type(x).__name__}"
            )
        check_strided(name, x)
    for name, x in given.items():
        _check_dtype(name, x)
    if arguments.get("output_attentions"):
        raise ValueError(
            "output_attentions is not supported over a sharded sequence, whose scores no rank has; "
            "leave it out"
        )
    _check_kept(arguments)
    if arguments.get("ignore_index", IGNORE_INDEX) != IGNORE_INDEX:
        raise ValueError(
            f"ignore_index is {IGNORE_INDEX} over a sharded sequence, got "
            f"{arguments['ignore_index']}; set the labels to ignore to it"
        )
    seq_len = _check_lengths(model, arguments)
    if "attention_mask" in given:
        check_ones_and_zeros(given["attention_mask"])
    _check_range(model, given)
    return seq_len


def _check_model(model: Any) -> None:
    """Refuse an export, and adapters whose effect on a token depends on other tokens."""
    if torch.compiler._is_exporting_flag:  # torch 2.11 compiles `is_exporting()` as true
        raise ValueError(
            "torch.export takes one process, and a context-parallel model sends messages; export "
            "within `with stock_model(model):`"
        )
    if adapters := adapters_of(model):
        check_adapters(adapters)


def _check_kept(arguments: dict[str, Any]) -> None:
    """Refuse a `logits_to_keep` that is not a number of last tokens, or comes with labels."""
    kept = arguments.get(LOGITS_TO_KEEP, 0)
    if type(kept) is not int or kept < 0:
        what = f"a tensor {tuple(kept.shape)}" if isinstance(kept, Tensor) else repr(kept)
        raise ValueError(
            f"{LOGITS_TO_KEEP} must be a number of last tokens over a sharded sequence, got {what}"
        )
    if kept and arguments.get("labels") is not None:
        raise ValueError(
            f"labels need the logits of all tokens, and {LOGITS_TO_KEEP}={kept}; leave one out"
        )


def _check_dtype(name: str, x: Tensor) -> None:
    """Refuse dtypes that cannot be tokens, positions, labels, embeddings or masks."""
    is_float = x.is_floating_point()
    if name in _OF_INTEGERS and x.dtype not in INTEGERS:
        raise ValueError(f"{name} must be integers, got {x.dtype}; use .long()")
    if name == "labels" and x.dtype == torch.uint8:
        raise ValueError(f"labels must be able to hold {IGNORE_INDEX}, got {x.dtype}; use .long()")
    if name == "inputs_embeds" and not is_float:
        raise ValueError(f"{name} must be floating, got {x.dtype}; or pass them as input_ids")
    if name == "attention_mask" and (x.is_complex() or x.is_quantized):
        raise ValueError(f"{name} must be ones and zeros, got {x.dtype}; use .bool()")


def _check_range(model: Any, given: dict[str, Tensor]) -> None:
    """Refuse tokens and labels that the model has no row for, on all ranks alike.

    Raises:
        ValueError: naming the argument.
    """
    # Later, only the rank that holds the token would fail, and the others would wait for it.
    # Tensors on a GPU are not checked, as reading them would synchronize.
    sides = {"input_ids": model.get_input_embeddings, "labels": model.get_output_embeddings}
    read = {name: x for name, x in given.items() if name in sides and x.is_cpu}
    if not has_content(*read.values()):
        return
    for name, x in read.items():
        count = _num_entries(model, sides[name]())
        if _are_few_and_within(x, count):
            continue
        for part in blocks(x):
            is_wrong = (part < 0) | (part >= count)
            wrong = part[is_wrong & ((part != IGNORE_INDEX) | (name != "labels"))]
            if wrong.numel():
                raise ValueError(
                    f"{name} must be from 0 to {count - 1}, as the model has {count} of them, got "
                    f"{wrong[0].item()}"
                )


# Numbers that are read one by one faster than all at once.
FEW = 64


def _are_few_and_within(x: Tensor, count: int) -> bool:
    """Return whether numbers are few, which Python reads faster, and from 0 to `count - 1`."""
    if x.numel() > FEW:
        return False
    numbers = x.reshape(-1).tolist()
    return not numbers or (min(numbers) >= 0 and max(numbers) < count)


def _num_entries(model: Any, embeddings: nn.Module | None) -> int:
    """Return the number of rows of the weight, or the vocabulary size if a wrapper hides it.

    A model without a head over the vocabulary has one entry for each of its labels.
    """
    if embeddings is None:
        return model.config.num_labels
    weight = getattr(embeddings, "weight", None)
    return model.config.get_text_config().vocab_size if weight is None else weight.shape[0]


def _check_lengths(model: Any, arguments: dict[str, Any]) -> int:
    """Refuse inputs of wrong shape or different lengths; return the length."""
    lengths = {}
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            continue
        _check_shape(model, name, x)
        lengths[name] = x.shape[-1 if name == POSITIONS else 1]
    _check_rows(arguments)
    seq_len, *others = lengths.values()
    # A set would make a compiler's symbols numbers.
    if others.count(seq_len) < len(others):
        raise ValueError(f"the inputs of a model must have one length, got {lengths}")
    return seq_len


def _check_shape(model: Any, name: str, x: Tensor) -> None:
    """Refuse an input with other dims than those of its name, no tokens, or an encoder's tokens."""
    if name in OF_ENCODERS:
        raise ValueError(f"{name} is what an encoder makes, and {NO_CROSS_ATTENTION}; leave it out")
    shape = SHAPES.get(name, "(B, S)")
    fits = x.ndim == len(shape.split(","))
    if not fits and name == POSITIONS and has_axes(model):
        shape = " or ".join([shape, *(f"({number}, B, S)" for number in NUM_AXES)])
        fits = x.ndim == 3 and len(x) in NUM_AXES
    if not fits:
        raise ValueError(f"{name} must be {shape} over a sharded sequence, got {tuple(x.shape)}")
    if not x.numel():
        raise ValueError(f"{name} must hold at least one token, got shape {tuple(x.shape)}")


def _check_rows(arguments: dict[str, Any]) -> None:
    """Refuse wrong row counts: masks and positions may have one row for all, labels may not."""
    tokens = arguments["input_ids"] if "input_ids" in arguments else arguments["inputs_embeds"]
    num_rows = tokens.shape[0]
    for name in ("attention_mask", POSITIONS, DOCUMENT_NUMBERS, "labels"):
        x = arguments.get(name)
        least = num_rows if name == "labels" else 1
        if x is not None and x.shape[-2] not in (least, num_rows):
            raise ValueError(
                f"{name} must have the {num_rows} rows of the tokens, got {tuple(x.shape)}"
            )
