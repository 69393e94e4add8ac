"""Builds slices for well-known masks over packed documents and over sequences made of parts.

Arguments that hold integers are tensors on the CPU, arrays or sequences: one row for the whole
batch, or one for each batch row. Rows may differ in length. To pad them, repeat the last boundary,
or add parts without tokens. Positions are global.

Parts are given by their lengths and follow one another from position 0 on. For parts of several
documents, see `Slices.shifted` and `|`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from dtensor_ring.planning import builder_inputs, slice_tables
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import Integers, as_count, broadcast

CAUSAL = Mask.causal()


class Builders:
    """Builds slices for packed documents."""

    @classmethod
    def of_tables(cls, tables: Any) -> Self:
        """Build slices from one table `(N, 6)` for the whole batch, or one for each batch row."""
        raise NotImplementedError

    @classmethod
    def _of_rows(cls, make: Callable[..., np.ndarray], **sides: Sequence[Any]) -> Self:
        """Build slices from the tables that `make` returns for each batch row of the sides."""
        return cls.of_tables([make(*row) for row in broadcast(**sides)])

    @classmethod
    def _of_counts(
        cls, make: Callable[..., np.ndarray], cu_seqlens: Integers, name: str, counts: Any
    ) -> Self:
        """Build slices from boundaries and one count for each document."""

        def of_row(bounds: np.ndarray, row: np.ndarray) -> np.ndarray:
            return make(bounds, builder_inputs.of_each(name, row, len(bounds) - 1, "documents"))

        bounds = builder_inputs.boundaries("cu_seqlens", cu_seqlens)
        return cls._of_rows(
            of_row, cu_seqlens=bounds, **{name: builder_inputs.counts(name, counts)}
        )

    @classmethod
    def documents(
        cls, cu_seqlens: Integers, mask: Mask | Sequence[Mask] | Sequence[Sequence[Mask]] = CAUSAL
    ) -> Self:
        """Build documents with a mask each: full, causal and windowed ones can be mixed.

        q sees k iff both are in one document and its mask allows it. A prefix counts from the start
        of its document, chunks count from position 0 of the row.

        Args:
            cu_seqlens: boundaries, `(D+1,)` or `(B, D+1)`.
            mask: one for all documents; or a list of D; or a list of D for each batch row.

        Raises:
            ValueError: if boundaries decrease, or the number of masks differs from D.
            TypeError: if arguments hold something else.

        >>> print(Slices.documents([0, 2, 5], [Mask.full(), Mask.sliding(1)]))
        ##...
        ##...
        ..#..
        ..##.
        ...##
        """

        def make(bounds: np.ndarray, masks: np.ndarray) -> np.ndarray:
            of_each = builder_inputs.of_each(
                "mask", masks, len(bounds) - 1, "documents in cu_seqlens"
            )
            return slice_tables.document_table(bounds, of_each)

        return cls._of_rows(
            make,
            cu_seqlens=builder_inputs.boundaries("cu_seqlens", cu_seqlens),
            mask=builder_inputs.masks("mask", mask),
        )

    @classmethod
    def prefix(cls, cu_seqlens: Integers, prefix_lengths: int | Integers) -> Self:
        """Build the mask of prefix language models: a bidirectional prompt, then causal text.

        In a document that starts at b and has prefix length p, q sees k iff k <= q or k < b + p
        (Raffel et al., 2020, arXiv 1910.10683, section 3.2.1; UL2, PaliGemma).

        Args:
            cu_seqlens: boundaries, `(D+1,)` or `(B, D+1)`.
            prefix_lengths: an integer for all documents, `(D,)` or `(B, D)`.

        Raises:
            ValueError: if boundaries decrease, a length is negative, or there are not D of them.
            TypeError: if arguments do not hold integers.

        >>> print(Slices.prefix([0, 4], prefix_lengths=2))
        ##..
        ##..
        ###.
        ####
        """

        def make(bounds: np.ndarray, lengths: np.ndarray) -> np.ndarray:
            ranges = slice_tables.beginnings(bounds, lengths)
            return slice_tables.block_table(bounds, ranges, slice_tables.UNBOUNDED)

        return cls._of_counts(make, cu_seqlens, "prefix_lengths", prefix_lengths)

    @classmethod
    def blocks(
        cls, cu_seqlens: Integers, begins: Integers, ends: Integers, mask: Mask = CAUSAL
    ) -> Self:
        """Build bidirectional blocks in causal text, such as images.

        q sees k iff both are in one document, and either the mask allows it or both are in one
        block (Gemma 3, arXiv 2503.19786, in layers of both kinds; Molmo).

        Args:
            cu_seqlens: boundaries, `(D+1,)` or `(B, D+1)`; `[0, S]` is one document.
            begins: first position of each block, `(M,)` or `(B, M)`.
            ends: one after its last position. Blocks do not overlap, and each is in one document.
            mask: `Mask.causal()`, or `Mask.sliding(window)`.

        Raises:
            ValueError: if blocks or boundaries are impossible, or the mask is of another kind.
            TypeError: if arguments hold something else.

        >>> print(Slices.blocks([0, 5], begins=[1], ends=[3], mask=Mask.sliding(1)))
        #....
        ###..
        .##..
        ..##.
        ...##
        """
        if builder_inputs.plain("mask", mask).right != 0:
            raise ValueError(f"mask must be Mask.causal() or Mask.sliding(window), got {mask}")

        def make(bounds: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
            builder_inputs.check_blocks(bounds, begins, ends)
            return slice_tables.block_table(bounds, (begins, ends), slice_tables.band_of(mask)[0])

        return cls._of_rows(
            make,
            cu_seqlens=builder_inputs.boundaries("cu_seqlens", cu_seqlens),
            begins=builder_inputs.integers("begins", begins, "M"),
            ends=builder_inputs.integers("ends", ends, "M"),
        )

    @classmethod
    def global_tokens(cls, cu_seqlens: Integers, num_global: int | Integers, window: int) -> Self:
        """Build a causal window plus first tokens of a document that all its later tokens see.

        In a document that starts at b, q sees k iff k <= q and (q - k <= window or
        k < b + num_global) (StreamingLLM, Xiao et al., 2023, arXiv 2309.17453).

        Args:
            cu_seqlens: boundaries, `(D+1,)` or `(B, D+1)`; `[0, S]` is one document.
            num_global: number of such first tokens: an integer for all documents, `(D,)` or
                `(B, D)`.
            window: number of tokens before itself that a query sees, as in `Mask.sliding`.

        Raises:
            ValueError: if boundaries decrease, a number is negative, or there are not D of them.
            TypeError: if arguments do not hold integers.

        >>> print(Slices.global_tokens([0, 5], num_global=1, window=1))
        #....
        ##...
        ###..
        #.##.
        #..##
        """
        window = as_count("window", window)

        def make(bounds: np.ndarray, counts: np.ndarray) -> np.ndarray:
            return slice_tables.global_table(bounds, counts, window)

        return cls._of_counts(make, cu_seqlens, "num_global", num_global)

    @classmethod
    def bottom_right(
        cls, cu_seqlens: Integers, key_cu_seqlens: Integers, mask: Mask = CAUSAL
    ) -> Self:
        """Build masks aligned at the last query and key, as flash-attn aligns them.

        In a document whose queries end at e and whose keys end at f, q sees k iff the mask shows
        key k to query q + f - e (queries that continue a sequence, or causal cross attention).

        Args:
            cu_seqlens: boundaries of the queries, `(D+1,)` or `(B, D+1)`; `[0, S]` is one document.
            key_cu_seqlens: boundaries of the keys, for the same number of documents.
            mask: a band, without chunk or prefix.

        Raises:
            ValueError: if boundaries decrease or differ in number, or the mask is of another kind.
            TypeError: if arguments hold something else.

        >>> print(Slices.bottom_right([0, 2], [0, 5]))
        ####.
        #####
        """
        builder_inputs.plain("mask", mask)

        def make(bounds: np.ndarray, key_bounds: np.ndarray) -> np.ndarray:
            builder_inputs.of_each(
                "key_cu_seqlens", key_bounds, len(bounds), "boundaries in cu_seqlens"
            )
            return slice_tables.aligned_table(bounds, key_bounds, mask)

        return cls._of_rows(
            make,
            cu_seqlens=builder_inputs.boundaries("cu_seqlens", cu_seqlens),
            key_cu_seqlens=builder_inputs.boundaries("key_cu_seqlens", key_cu_seqlens),
        )

    @classmethod
    def per_query(cls, begins: Integers, ends: Integers) -> Self:
        """Build slices from any ranges of keys for each query.

        q sees k iff begins[q] <= k < ends[q] for one of its ranges. Examples are text that sees its
        last image, and streaming speech. Consecutive queries form one slice while each end of
        their ranges stays in place or moves along with them.

        Args:
            begins: the first key of each query, `(S,)` or `(B, S)`; or `(B, S, R)` for R ranges
                that have no key in common.
            ends: one after its last key; at most `begins` where a range is empty.

        Raises:
            ValueError: if a position is negative, or `begins` and `ends` differ in shape.
            TypeError: if arguments do not hold integers.

        >>> print(Slices.per_query(begins=[0, 0, 3, 3], ends=[3, 3, 5, 5]))
        ###..
        ###..
        ...##
        ...##
        """

        def make(begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
            if begins.shape != ends.shape:
                shapes = begins.T.shape, ends.T.shape
                raise ValueError(f"begins and ends must be of one shape, got rows {shapes}")
            of_each = zip(begins, ends, strict=True)
            return slice_tables.stacked([slice_tables.query_table(x, y) for x, y in of_each])

        return cls._of_rows(
            make,
            begins=builder_inputs.edges("begins", begins),
            ends=builder_inputs.edges("ends", ends),
        )

    @classmethod
    def pools(cls, num_tokens: int, size: int) -> Self:
        """Build what tokens see of keys that are pools of `size` tokens each.

        Key k is a pool of the tokens from `k * size` on. q sees k iff the pool ends at or before q.
        Tokens after the last whole pool are in none (DeepSeek-V4's heavily compressed layers).

        Args:
            num_tokens: tokens of the sequence, in which queries have their positions.
            size: tokens of a pool.

        Raises:
            ValueError: if a number is negative, `size` is 0, or there are too many pools.
            TypeError: if one is not an integer.

        >>> print(Slices.pools(5, size=2))
        ..
        #.
        #.
        ##
        ##
        """
        size = as_count("size", size, 1)
        return cls.of_tables(slice_tables.pool_table(as_count("num_tokens", num_tokens), size))


class PartBuilders:
    """Builds slices for sequences that consist of parts."""

    @classmethod
    def _of_rows(cls, make: Callable[..., np.ndarray], **sides: Sequence[Any]) -> Self:
        """Build slices from the tables that `make` returns for each batch row of the sides."""
        raise NotImplementedError

    @classmethod
    def block_causal(cls, lengths: Integers, num_earlier: int | None = None) -> Self:
        """Build bidirectional blocks that also see earlier blocks (video, streaming speech).

        q of block i sees k of block j iff i - num_earlier <= j <= i (MAGI-1, arXiv 2505.13211).

        Args:
            lengths: lengths of the blocks, in tokens, `(N,)` or `(B, N)`.
            num_earlier: number of earlier blocks that are seen; `None` is all.

        Raises:
            ValueError: if a number is negative.
            TypeError: if arguments do not hold integers.

        >>> print(Slices.block_causal([2, 1, 2], num_earlier=1))
        ##...
        ##...
        ###..
        ..###
        ..###
        """
        reach = None if num_earlier is None else as_count("num_earlier", num_earlier)
        parts = builder_inputs.part_lengths("lengths", lengths)
        return cls._of_rows(lambda row: slice_tables.block_causal_table(row, reach), lengths=parts)

    @classmethod
    def block_diffusion(cls, lengths: Integers) -> Self:
        """Build the training mask of block diffusion: all noisy blocks, then all clean ones.

        Block i, noisy or clean, sees all of itself and each clean block j < i (BD3-LM, Arriola et
        al., 2025, arXiv 2503.09573).

        Args:
            lengths: lengths of the blocks of one half, in tokens, `(N,)` or `(B, N)`.

        Raises:
            ValueError: if a length is negative.
            TypeError: if lengths are not integers.

        >>> print(Slices.block_diffusion([1, 2]))
        #.....
        .###..
        .###..
        ...#..
        ...###
        ...###
        """
        parts = builder_inputs.part_lengths("lengths", lengths)
        return cls._of_rows(slice_tables.block_diffusion_table, lengths=parts)

    @classmethod
    def tree(cls, parents: Integers, lengths: Integers) -> Self:
        """Build a tree of texts: each node sees itself causally, and all of its ancestors.

        q of node i sees k of node j iff j is an ancestor of i, or i = j and k <= q (drafts of
        Medusa, arXiv 2401.10774, and EAGLE; rollouts and conversations that branch).

        Args:
            parents: the node that each node continues, -1 for a root, `(N,)` or `(B, N)`. A parent
                comes before its children.
            lengths: lengths of the nodes, in tokens, in the same shape.

        Raises:
            ValueError: if a parent comes too late, a length is negative, or the shapes differ.
            TypeError: if arguments do not hold integers.

        >>> print(Slices.tree(parents=[-1, 0, 0], lengths=[2, 2, 1]))
        #....
        ##...
        ###..
        ####.
        ##..#
        """

        def make(parents: np.ndarray, lengths: np.ndarray) -> np.ndarray:
            builder_inputs.check_parents(parents, lengths)
            return slice_tables.tree_table(parents, lengths)

        return cls._of_rows(
            make,
            parents=builder_inputs.integers("parents", parents, "N", smallest=-1),
            lengths=builder_inputs.part_lengths("lengths", lengths),
        )

    @classmethod
    def shared_prefix(cls, prefix_lengths: int | Integers, answer_lengths: Integers) -> Self:
        """Build answers that share a question: each sees it and itself, not the other answers.

        It is a tree of a root and its leaves, or several in a row (DPO and reward models with
        shared prompts, FlashMask, arXiv 2410.01359; GRPO).

        Args:
            prefix_lengths: length of the question; or `(G,)` for G groups that do not see one
                another.
            answer_lengths: lengths of its answers; or one sequence of lengths for each group.

        Raises:
            ValueError: if a length is negative, or questions and groups differ in number.
            TypeError: if arguments do not hold integers.

        >>> print(Slices.shared_prefix(2, [2, 1]))
        #....
        ##...
        ###..
        ####.
        ##..#
        """
        answers = builder_inputs.integers("answer_lengths", answer_lengths, "A")
        questions = builder_inputs.one_row(
            "prefix_lengths", builder_inputs.counts("prefix_lengths", prefix_lengths)
        )
        groups = builder_inputs.of_each(
            "prefix_lengths", questions, len(answers), "rows of answer_lengths"
        )
        # Each question is a root and its answers are its children: siblings do not see each other.
        parents, lengths = [], []
        for question, row in zip(groups, answers, strict=True):
            root = len(parents)
            parents += [-1, *[root] * len(row)]
            lengths += [question, *row]
        return cls.tree(parents, lengths)
