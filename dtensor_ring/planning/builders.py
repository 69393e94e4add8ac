"""Slices of packed documents and of sequences that consist of parts, by the names of the field.

Arguments that hold integers are tensors on the CPU, arrays or sequences: one row for the whole
batch, or one for each batch row. Rows may be of different lengths, or filled up: with the last
boundary, and with parts without tokens. Positions are global.

Parts are given by their lengths, one after the other from position 0 on, in any form that holds
integers: one row for the whole batch, or one for each batch row. For parts of several documents,
see `Slices.shifted` and `|`.
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
    """Makes slices of packed documents."""

    @classmethod
    def of_tables(cls, tables: Any) -> Self:
        """Slices of one table `(N, 6)` for the whole batch, or of one for each batch row."""
        raise NotImplementedError

    @classmethod
    def _of_rows(cls, make: Callable[..., np.ndarray], **sides: Sequence[Any]) -> Self:
        """Slices of the tables that are made of what the sides have in each batch row."""
        return cls.of_tables([make(*row) for row in broadcast(**sides)])

    @classmethod
    def _of_counts(
        cls, make: Callable[..., np.ndarray], cu_seqlens: Integers, name: str, counts: Any
    ) -> Self:
        """Slices of the tables that are made of boundaries and a number for each document."""

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
        """Documents, each with a mask of its own: full next to causal next to windows.

        q sees k iff both are in one document, and its mask shows it. A prefix counts from the begin
        of its document, chunks from position 0 of the row.

        Args:
            cu_seqlens: boundaries, `(D+1,)` or `(B, D+1)`.
            mask: one for all documents; or a list of D; or one of those for each batch row.

        Raises:
            ValueError: if boundaries decrease, or masks are not as many as documents.
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
        """Prefix language models: a prompt that sees itself both ways, then causal text.

        In a document from b on with prefix length p, q sees k iff k <= q or k < b + p (Raffel et
        al., 2020, arXiv 1910.10683, section 3.2.1; UL2, PaliGemma).

        Args:
            cu_seqlens: boundaries, `(D+1,)` or `(B, D+1)`.
            prefix_lengths: an integer for all documents, `(D,)` or `(B, D)`.

        Raises:
            ValueError: if boundaries decrease, or lengths are negative or not as many as documents.
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
        """Blocks that see themselves both ways in causal text, as images do.

        q sees k iff both are in one document, and the mask shows it or both are in one block
        (Gemma 3, arXiv 2503.19786, in layers of both kinds; Molmo).

        Args:
            cu_seqlens: boundaries, `(D+1,)` or `(B, D+1)`; `[0, S]` is one document.
            begins: where blocks begin, `(M,)` or `(B, M)`.
            ends: where they end. Blocks do not overlap, and each is in one document.
            mask: `Mask.causal()`, or `Mask.sliding(window)`.

        Raises:
            ValueError: if blocks or boundaries are impossible, or the mask is another one.
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
        """A causal window, and first tokens that all later ones see, however far behind.

        In a document from b on, q sees k iff 0 <= q - k, and q - k <= window or k < b + num_global
        (StreamingLLM, Xiao et al., 2023, arXiv 2309.17453).

        Args:
            cu_seqlens: boundaries, `(D+1,)` or `(B, D+1)`; `[0, S]` is one document.
            num_global: tokens that all later ones see: an integer for all documents, `(D,)` or
                `(B, D)`.
            window: how many tokens before itself a query sees, as in `Mask.sliding`.

        Raises:
            ValueError: if boundaries decrease, or numbers are negative or not as many as documents.
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
        """Masks aligned at the last query and key, as flash-attn aligns them.

        In document d, whose queries end at e and whose keys end at f, q sees k iff the mask shows
        key k to query q + f - e: queries that continue a sequence, or causal cross attention.

        Args:
            cu_seqlens: boundaries of the queries, `(D+1,)` or `(B, D+1)`; `[0, S]` is one document.
            key_cu_seqlens: boundaries of the keys, of as many documents.
            mask: a band, without chunk or prefix.

        Raises:
            ValueError: if boundaries decrease or are not as many, or the mask is another one.
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
        """Any ranges of keys for each query: text that sees its last image, streaming speech.

        q sees k iff begins[q] <= k < ends[q], of one of its ranges if there are several. Queries
        in a row are one slice while both ends of their ranges stay, or move along with them.

        Args:
            begins: the first key of each query, `(S,)` or `(B, S)`; or `(B, S, R)` of R ranges that
                have no key in common.
            ends: the position after its last key; at the begin or before it where a range is empty.

        Raises:
            ValueError: if positions are negative, or ends not as many as begins.
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
            return slice_tables.stacked([slice_tables.query_table(*edges) for edges in of_each])

        return cls._of_rows(
            make,
            begins=builder_inputs.edges("begins", begins),
            ends=builder_inputs.edges("ends", ends),
        )


class PartBuilders:
    """Makes slices of sequences that consist of parts."""

    @classmethod
    def _of_rows(cls, make: Callable[..., np.ndarray], **sides: Sequence[Any]) -> Self:
        """Slices of the tables that are made of what the sides have in each batch row."""
        raise NotImplementedError

    @classmethod
    def block_causal(cls, lengths: Integers, num_earlier: int | None = None) -> Self:
        """Blocks that see themselves both ways, and earlier blocks: video, streaming speech.

        q of block i sees k of block j iff i - num_earlier <= j <= i (MAGI-1, arXiv 2505.13211).

        Args:
            lengths: of the blocks, in tokens, `(N,)` or `(B, N)`.
            num_earlier: how many earlier blocks are seen; `None` is all.

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
        """Training of block diffusion: all blocks with noise, then all of them clean.

        A noisy block sees itself both ways, and the clean blocks before it; a clean block sees
        itself and the clean blocks before it (BD3-LM, Arriola et al., 2025, arXiv 2503.09573).

        Args:
            lengths: of the blocks of one half, in tokens, `(N,)` or `(B, N)`.

        Raises:
            ValueError: if a length is negative.
            TypeError: if they are not integers.

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
        """A tree of texts, each of which sees itself causally, and all that it continues.

        q of node i sees k of node j iff j is an ancestor of i, or i = j and k <= q (drafts of
        Medusa, arXiv 2401.10774, and EAGLE; rollouts and conversations that branch).

        Args:
            parents: the node that each one continues, -1 of a root, `(N,)` or `(B, N)`. Nodes come
                after their parents.
            lengths: of the nodes, in tokens, of the same shape.

        Raises:
            ValueError: if a parent comes late, a length is negative, or they are not as many.
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
        """Answers that share a question: each sees it and itself, not the others.

        A tree of a root and its leaves, or several in a row (DPO and reward models with shared
        prompts, FlashMask, arXiv 2410.01359; GRPO).

        Args:
            prefix_lengths: length of the question; or `(G,)`, of G groups that see nothing of one
                another.
            answer_lengths: lengths of its answers; or a sequence of those for each group.

        Raises:
            ValueError: if a length is negative, or there are not as many questions as groups.
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
        parents, lengths = [], []
        for question, row in zip(groups, answers, strict=True):
            root = len(parents)
            parents += [-1, *[root] * len(row)]
            lengths += [question, *row]
        return cls.tree(parents, lengths)
