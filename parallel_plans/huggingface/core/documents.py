"""Finds where the documents of a batch begin and end, by the rules of transformers' own masks.

Starts are found a block of tokens at a time. Nothing that is made for them grows with the sequence,
only with the number of documents. So it serves a rank that holds the whole batch, and a rank that
holds a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from dtensor_ring import Mask
from dtensor_ring.extension import refuse_capture
from parallel_plans.huggingface.core.patterns import AXES_WITH_TEXT, LayerMask
from parallel_plans.sequences import filled_boundaries, traced_boundaries

# Number of tokens of a row that are read at a time.
BLOCK = 8192
# Number of documents that boundaries have room for at least: few batches need another shape.
MIN_ROOM = 1024
# Positions of one document follow one another, and no two positions are this far apart.
FAR = 2**40
# What a CUDA graph can have: the documents of all its replays.
OF_HOST = "pass cu_seq_lens_q on the CPU, and neither of the others"


def has_content(*values: Any) -> bool:
    """Return whether the tensors among these hold real data, which can be read and compared."""
    # A graph cannot raise, and tensors within transforms of torch.func have no memory to read.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    tensors = [x for x in values if isinstance(x, Tensor)]
    if any(map(attrgetter("is_meta"), tensors)):
        return False
    # Outside of any mode, plain tensors are real: to look for fake ones takes far longer.
    is_plain = not torch._C._len_torch_dispatch_stack() and {Tensor}.issuperset(map(type, tensors))
    return is_plain or detect_fake_mode(tensors) is None


def blocks(x: Tensor) -> Sequence[Tensor]:
    """Return views of blocks of tokens of `(..., S)`; the whole of it in a compiled graph."""
    return (x,) if torch.compiler.is_compiling() or x.shape[-1] <= BLOCK else x.split(BLOCK, -1)


class Starts(NamedTuple):
    """Where the documents of a batch start.

    Attributes:
        table: row, position and value of the first token of each document, `(D, 3)`, int64 on the
            CPU, in the order of rows and positions. The value is its position id, or by padding 1
            for a token and 0 for padding.
        num_rows: number of rows B; one row may serve all.
        by_positions: whether documents were found by position ids, not by padding.
    """

    table: Tensor
    num_rows: int
    by_positions: bool

    def has_one_stretch(self) -> bool:
        """Return whether each row has at most one document of tokens, beside its padding."""
        rows = self.table[self.table[:, 2] != 0, 0]
        return len(rows) == len(rows.unique())

    def of_pools(self, bounds: Tensor, seq_len: int) -> Tensor | None:
        """Return, of boundaries, those without padding, see `DocumentBounds.pools`."""
        if self.by_positions:
            return None if len(self.table) == self.num_rows else bounds
        tokens = self.table[self.table[:, 2] != 0]
        # Padding after the tokens is seen by none of them, so it may be in their document.
        first = torch.full((self.num_rows,), seq_len).scatter(0, tokens[:, 0], tokens[:, 1])
        bounds = torch.stack([first, torch.full_like(first, seq_len)], 1).int()
        return bounds if first.any() else None

    def boundaries(self, seq_len: int) -> Tensor:
        """Return `cu_seqlens`, int32 on the CPU, `(D+1,)` for one row, else `(B, D+1)`.

        They are padded by empty documents, so that most batches have one shape.

        Example:
            >>> find_starts(torch.tensor([[0, 1, 2, 0]]), by_positions=True).boundaries(4).tolist()
            [0, 3, 4, 4, 4]
        """
        return filled_boundaries(self.table[:, :2], self.num_rows, seq_len, MIN_ROOM)

    def chunk_boundaries(self, chunks: Iterable[int], seq_len: int) -> dict[int, Tensor]:
        """Return `boundaries` of documents and of chunks within them, by the size of the chunks."""
        return {x: self.of_chunks(x, seq_len).boundaries(seq_len) for x in chunks}

    def of_chunks(self, chunk: int, seq_len: int) -> Starts:
        """Return where documents and chunks of `chunk` tokens in them start.

        Chunks count from the start of a document, or by the position ids of packed documents.
        """
        rows, begins, values = self.table.unbind(1)
        # The table is sorted by rows, so the next start ends a document, or the end of the row
        # does.
        is_last = rows.diff(append=rows.new_tensor([-1])) != 0
        ends = begins.roll(-1).masked_fill(is_last, seq_len)
        # A single document may begin at any position; its chunks count from its first token.
        # `numbered_positions` moves documents by multiples of FAR. Chunks start where a position
        # in its document is a multiple of theirs: with chunks of 4, a document that begins at
        # position 6 has the first such start -6 % 4 = 2 tokens on.
        is_packed = self.by_positions and len(rows) > self.num_rows
        firsts = begins + (-(values % FAR) % chunk if is_packed else 0)
        # Documents have different numbers of chunks: count them, then write all starts at once.
        counts = (ends - firsts + chunk - 1).clamp(min=0) // chunk
        # With counts 2 and 3: 0 1 2 3 4 less 0 0 2 2 2 is 0 1 0 1 2, the number in its document.
        numbers = torch.arange(int(counts.sum()))
        numbers = numbers - (counts.cumsum(0) - counts).repeat_interleave(counts)
        positions = firsts.repeat_interleave(counts) + chunk * numbers
        more = torch.stack([rows.repeat_interleave(counts), positions], 1)
        both = torch.cat([self.table[:, :2], more]).unique(dim=0)
        return self._replace(table=torch.nn.functional.pad(both, (0, 1)))


def find_starts(
    values: Tensor, by_positions: bool, begin: int = 0, before: Tensor | None = None
) -> Starts:
    """Return where documents start: where positions do not continue, or padding begins or ends.

    Args:
        values: position ids or an attention mask of consecutive tokens, `(B, L)`.
        by_positions: whether they are position ids.
        begin: position in the sequence of the first of these tokens.
        before: the values of the tokens before them, `(B, 1)`; without it, documents start here.

    Raises:
        RuntimeError: if a CUDA graph is captured, and they are on its GPU.
    """
    name = "position_ids" if by_positions else "attention_mask"
    refuse_capture(values.device, f"the host reads documents from {name}", OF_HOST)
    step, tables = int(by_positions), []
    for block in _values(values, by_positions):
        # Without a token before it, the first token gets one that it does not follow.
        last = block[:, :1] + 1 - step if before is None else before
        # Positions 0 1 2 0 1 have starts at 0 and 3; padding 0 0 1 1, whose step is 0, at 0 and 2.
        is_start = block != torch.cat([last, block[:, :-1]], 1) + step
        rows, columns = is_start.nonzero(as_tuple=True)
        tables.append(torch.stack([rows, begin + columns, block[rows, columns]], 1))
        # A view would keep the block's memory.
        before, begin = block[:, -1:].clone(), begin + block.shape[1]
    # A copy to the CPU for each block would wait for the device each time.
    return joined([torch.cat(tables).cpu()], len(values), by_positions)


def _values(values: Tensor, by_positions: bool) -> Iterator[Tensor]:
    """Yield blocks of position ids, or of 1 for tokens and 0 for padding, int64."""
    for block in values.split(BLOCK, 1):
        yield (block if by_positions else block.bool()).long()


def joined(tables: Sequence[Tensor], num_rows: int, by_positions: bool) -> Starts:
    """Join the tables of parts of the sequence, which are in its order."""
    table = torch.cat([*tables])
    return Starts(table[table[:, 0].argsort(stable=True)], num_rows, by_positions)


def _starts_of_boundaries(cu_seqlens: Tensor, seq_len: int) -> Starts:
    """Return the starts of documents with given boundaries, `(D+1,)`, in one row."""
    begins = cu_seqlens.cpu().long().unique()
    begins = begins[begins < seq_len]
    zeros = torch.zeros_like(begins)
    return Starts(torch.stack([zeros, begins, zeros], 1), 1, False)


ONE_STRETCH = (
    "attention_mask must be one stretch of tokens in each row, with padding before or after "
    "it; for packed documents leave it out, and give position_ids that start again"
)


@dataclass(frozen=True)
class DocumentBounds:
    """Boundaries for attention, int32 on the CPU, `(D+1,)` or `(B, D+1)`; `None` for one document.

    This is not a tuple: fully_shard moves the tensors in a layer's tuples to the device.

    Attributes:
        packed: boundaries for layers whose masks restart where positions do, see `LayerMask`.
        others: boundaries for all other layers.
        chunks: boundaries of chunks, by chunk size; chunks count from the start of a document.
        runs: the runs of each rank, see `sequence_runs`, if the layout belongs to the batch.
        has_axes: whether the documents were found in positions of several axes.
        pools: boundaries of the documents with which pools begin, without padding; `None` if each
            row is one document from its first token on.
    """

    packed: Tensor | None = None
    others: Tensor | None = None
    chunks: dict[int, Tensor] = field(default_factory=dict)
    runs: Tensor | None = None
    has_axes: bool = False
    pools: Tensor | None = None

    def of(self, layer_mask: LayerMask) -> tuple[Tensor | None, Mask]:
        """Return boundaries and mask for a layer."""
        mask = layer_mask.mask
        # These boundaries separate the chunks already, so the mask must not do it again.
        if mask.chunk in self.chunks:
            return self.chunks[mask.chunk], Mask(mask.left, mask.right)
        return (self.packed if layer_mask.restarts(self.has_axes) else self.others), mask

    def bounded(self, seq_len: int) -> DocumentBounds:
        """Return the documents of a batch that was padded after `seq_len` tokens."""
        # Tokens after the last boundary see nothing, as padding should.
        whole = torch.tensor([0, seq_len], dtype=torch.int32)
        packed, others = (whole if x is None else x for x in (self.packed, self.others))
        return replace(self, packed=packed, others=others)


def find_documents(
    seq_len: int,
    chunks: Set[int],
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    seq_idx: Tensor | None = None,
    starts: Starts | None = None,
    for_all: bool = False,
) -> DocumentBounds:
    """Return the documents of a batch of `seq_len` tokens, by its arguments.

    `cu_seq_lens_q` holds for all layers, as in flash attention. Without it, an `attention_mask`
    makes padding a document of its own. Without both, documents begin where `position_ids` do not
    continue, in layers whose own masks follow positions. With `seq_idx`, they also begin where that
    changes, in all layers.

    Args:
        seq_len: tokens of a row.
        chunks: sizes of the chunks that layers see.
        attention_mask: `(B, S)`.
        position_ids: `(B, S)`, or of several axes.
        cu_seq_lens_q: boundaries, `(D+1,)`.
        cu_seq_lens_k: the same boundaries for keys.
        seq_idx: the number of each token's document, `(B, S)`.
        starts: where documents start by the mask or the positions, if the ranks found it together:
            then the tensors are those of this rank's tokens.
        for_all: whether positions separate documents in all layers, whatever their own masks do.

    Raises:
        ValueError: if an attention mask has more than one stretch of tokens in a row, or the
            boundaries are not one row.
    """
    positions, has_axes = text_positions(position_ids)
    if seq_idx is not None:
        if attention_mask is not None and starts is None:
            _check_no_padding("seq_idx", attention_mask)
        attention_mask = None  # without padding it says nothing
        positions, for_all = numbered_positions(positions, seq_idx), True
    is_given = cu_seq_lens_q is not None
    values = positions if attention_mask is None and not is_given else attention_mask
    if starts is None and values is not None and has_content(values):
        starts = find_starts(values, attention_mask is None)
    if cu_seq_lens_q is not None:
        if attention_mask is not None:
            is_token = attention_mask if starts is None else starts.table[:, 2]
            _check_no_padding("cu_seq_lens_q", is_token)
        return _by_boundaries(cu_seq_lens_q, cu_seq_lens_k, seq_len, chunks)
    if starts is not None:
        return _by_starts(starts, seq_len, chunks, has_axes, for_all)
    return _traced(seq_len, chunks, attention_mask, positions, has_axes, for_all)


def _check_no_padding(name: str, is_token: Tensor) -> None:
    """Refuse padding beside an argument that says where documents are."""
    require(
        is_token.bool().all(),
        f"{name} and an attention_mask with padding both say where documents are; leave one of "
        "them out",
    )


def numbered_positions(positions: Tensor | None, seq_idx: Tensor, begin: int = 0) -> Tensor:
    """Return positions, `(B, L)`, that also jump where the number of the document changes.

    Args:
        positions: position ids of consecutive tokens, `(B, L)`; `None` counts from `begin`.
        seq_idx: the number of each token's document, `(B, L)`.
        begin: the position in the sequence of the first of these tokens.
    """
    if positions is None:
        positions = torch.arange(begin, begin + seq_idx.shape[1], device=seq_idx.device)
    # Another number moves a token so far that its position cannot follow the one before.
    return positions + FAR * seq_idx.long()


def _by_starts(
    starts: Starts, seq_len: int, chunks: Set[int], has_axes: bool, for_all: bool
) -> DocumentBounds:
    """Return the documents that start there."""
    require(starts.by_positions or starts.has_one_stretch(), ONE_STRETCH)
    bounds = starts.boundaries(seq_len)
    # Masks by padding hold in all layers, masks by positions in some.
    others = None if starts.by_positions and not for_all else bounds
    within = starts.chunk_boundaries(chunks, seq_len)
    pools = starts.of_pools(bounds, seq_len)
    return DocumentBounds(bounds, others, within, has_axes=has_axes, pools=pools)


def _traced(
    seq_len: int,
    chunks: Set[int],
    attention_mask: Tensor | None,
    positions: Tensor | None,
    has_axes: bool,
    for_all: bool,
) -> DocumentBounds:
    """Return the documents of a batch whose content is unknown, in tensors of fixed shapes."""
    if attention_mask is not None:
        starts = _starts_by_padding(attention_mask)
    elif positions is not None:
        starts = _starts_by_positions(positions)
    else:
        return DocumentBounds()
    bounds = traced_boundaries(starts)
    # Masks by padding hold in all layers, masks by positions in some.
    by_positions = attention_mask is None
    counted = positions % FAR if by_positions and positions is not None else None
    within = _within(starts, chunks, counted)
    others = None if by_positions and not for_all else bounds
    return DocumentBounds(bounds, others, within, has_axes=has_axes)


def text_positions(positions: Tensor | None) -> tuple[Tensor | None, bool]:
    """Return positions that count tokens, `(B, S)`, and whether `positions` has several axes."""
    has_axes = positions is not None and positions.ndim > 2
    if positions is None or not has_axes:
        return positions, False
    return (positions[0] if len(positions) == AXES_WITH_TEXT else None), True


def cached_documents(
    left_padding: Tensor | None, begin: int, end: int, chunks: Set[int]
) -> DocumentBounds:
    """Return the documents of positions `begin ... end - 1` of a cache, counted from `begin`.

    Args:
        left_padding: number of padding tokens before each row, `(B,)`, `None` without padding.
        begin: the first position that is kept.
        end: the end of the positions; later ones see nothing.
        chunks: sizes of chunks, which count from the first token of a row.
    """
    # Without padding one row serves all.
    padding = torch.zeros((), dtype=torch.int64) if left_padding is None else left_padding
    padding = padding.unsqueeze(-1)

    def bounded(*starts: Tensor) -> Tensor:
        ends = [torch.full_like(padding, x) for x in (0, end - begin)]
        found = torch.cat([ends[0], *(x - begin for x in starts), ends[1]], -1)
        return found.clamp(0, end - begin).int()

    bounds = bounded(padding)
    pools = None if left_padding is None else bounds[..., 1:]
    # Chunks count from the first token, after the padding.
    steps = {chunk: chunk * torch.arange(-(-end // chunk) + 1) for chunk in chunks}
    within = {chunk: bounded(padding + x) for chunk, x in steps.items()}
    return DocumentBounds(bounds, bounds, within, pools=pools)


def _by_boundaries(
    cu_seqlens: Tensor, of_keys: Tensor | None, seq_len: int, chunks: Set[int]
) -> DocumentBounds:
    """Return the given boundaries; tokens after the last one become a document, too."""
    for name, x in (("cu_seq_lens_q", cu_seqlens), ("cu_seq_lens_k", of_keys)):
        if x is not None and (not isinstance(x, Tensor) or x.is_floating_point()):
            what = f"{x.dtype} numbers" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a tensor of whole numbers, got {what}")
    if cu_seqlens.ndim != 1 or (of_keys is not None and of_keys.shape != cu_seqlens.shape):
        raise ValueError(
            f"cu_seq_lens_q and cu_seq_lens_k must be one row of boundaries, got "
            f"{tuple(cu_seqlens.shape)} and {None if of_keys is None else tuple(of_keys.shape)}"
        )
    refuse_capture(cu_seqlens.device, "the host reads documents from cu_seq_lens_q", OF_HOST)
    require(
        (cu_seqlens[0] == 0) & (cu_seqlens[-1] <= seq_len) & (cu_seqlens.diff() >= 0).all(),
        f"cu_seq_lens_q must start at 0, never decrease and end at or before {seq_len} tokens",
    )
    if of_keys is not None:
        require((of_keys == cu_seqlens).all(), "cu_seq_lens_q and cu_seq_lens_k must be the same")
    # One more boundary makes tokens after the last one a document.
    bounds = torch.nn.functional.pad(cu_seqlens, (0, 1), value=seq_len).int().cpu()
    within = {}
    if chunks and has_content(cu_seqlens):
        within = _starts_of_boundaries(cu_seqlens, seq_len).chunk_boundaries(chunks, seq_len)
    elif chunks:
        # One longer than the batch: the last boundary may be its end.
        starts = torch.zeros(seq_len + 1, dtype=torch.bool, device=cu_seqlens.device)
        starts = starts.index_fill(0, cu_seqlens.long(), True)[:seq_len].unsqueeze(0)
        within = _within(starts, chunks, None)
    return DocumentBounds(bounds, bounds, within, pools=bounds)


def _within(starts: Tensor, chunks: Set[int], positions: Tensor | None) -> dict[int, Tensor]:
    """Return boundaries of documents and of chunks within them, by the size of the chunks."""
    return {
        chunk: traced_boundaries(_starts_of_chunks(starts, chunk, positions)) for chunk in chunks
    }


def _starts_by_padding(attention_mask: Tensor) -> Tensor:
    is_token = attention_mask.bool()
    before = torch.nn.functional.pad(is_token, (1, 0))[:, :-1]
    require(((is_token & ~before).sum(-1) <= 1).all(), ONE_STRETCH)
    return _with_first(is_token[:, 1:] != is_token[:, :-1])


def _starts_by_positions(position_ids: Tensor) -> Tensor:
    return _with_first(position_ids[:, 1:] != position_ids[:, :-1] + 1)


def _with_first(changes: Tensor) -> Tensor:
    """Prepend the first token of each row, which always starts a document."""
    return torch.nn.functional.pad(changes, (1, 0), value=True)


def _starts_of_chunks(starts: Tensor, chunk: int, position_ids: Tensor | None) -> Tensor:
    """Return where chunks start: they count from a document's start, or by packed positions."""
    index = torch.arange(starts.shape[1], device=starts.device)
    # The start of a token's document is the last start up to it.
    position = index - torch.where(starts, index, 0).cummax(-1).values
    if position_ids is not None:
        # A single document may begin at any position; its chunks count from its first token.
        is_packed = (starts.sum(-1) > 1).any()
        position = torch.where(is_packed, position_ids, position)
    # Every multiple of the chunk in a document starts one.
    return starts | (position % chunk == 0)


def require(condition: Any, message: str) -> None:
    """Raise unless the condition holds; a compiled graph asserts it when it runs."""
    if torch.compiler.is_compiling():
        torch._assert_async(condition, message)
    elif not condition:
        raise ValueError(message)
