"""Finds where documents start in a batch, a block of tokens at a time.

Nothing that is made here grows with the sequence, only with the number of documents. So it serves a
rank that holds the whole batch, and a rank that holds a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

from parallel_plans.cu_seqlens import filled_boundaries

# Number of tokens of a row that are read at a time.
BLOCK = 8192
# Number of documents that boundaries have room for at least: few batches need another shape.
MIN_ROOM = 1024


def has_content(*values: Any) -> bool:
    """Return whether the tensors among these hold real data, which can be read and compared."""
    # A graph cannot raise, and tensors within transforms of torch.func have no memory to read.
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    tensors = [x for x in values if isinstance(x, Tensor)]
    return detect_fake_mode(tensors) is None and not any(x.is_meta for x in tensors)


def blocks(x: Tensor) -> Sequence[Tensor]:
    """Return views of blocks of tokens of `(..., S)`; the whole of it in a compiled graph."""
    return (x,) if torch.compiler.is_compiling() else x.split(BLOCK, -1)


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
        is_last = rows.diff(append=rows.new_tensor([-1])) != 0
        ends = begins.roll(-1).masked_fill(is_last, seq_len)
        # A single document may begin at any position; its chunks count from its first token.
        is_packed = self.by_positions and len(rows) > self.num_rows
        firsts = begins + (-values % chunk if is_packed else 0)
        counts = (ends - firsts + chunk - 1).clamp(min=0) // chunk
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
    """
    step, tables = int(by_positions), []
    for block in _values(values, by_positions):
        # Without a token before it, the first token gets one that it does not follow.
        last = block[:, :1] + 1 - step if before is None else before
        is_start = block != torch.cat([last, block[:, :-1]], 1) + step
        rows, columns = is_start.nonzero(as_tuple=True)
        tables.append(torch.stack([rows, begin + columns, block[rows, columns]], 1))
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


def starts_of_boundaries(cu_seqlens: Tensor, seq_len: int) -> Starts:
    """Return the starts of documents with given boundaries, `(D+1,)`, in one row."""
    begins = cu_seqlens.cpu().long().unique()
    begins = begins[begins < seq_len]
    zeros = torch.zeros_like(begins)
    return Starts(torch.stack([zeros, begins, zeros], 1), 1, False)
