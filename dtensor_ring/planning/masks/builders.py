"""Slices of packed documents, by the names of the field.

Arguments that hold integers are tensors on the CPU, arrays or sequences: one row for the whole
batch, or one for each batch row. Rows may be of different lengths, or filled up: with the last
boundary, and with parts without tokens. Positions are global.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from dtensor_ring.planning.masks import given, tables
from dtensor_ring.planning.masks.mask import Mask
from dtensor_ring.planning.values.broadcast import broadcast
from dtensor_ring.planning.values.count import as_count
from dtensor_ring.planning.values.integers import Integers

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
            return make(bounds, given.of_each(name, row, len(bounds) - 1, "documents"))

        bounds = given.boundaries("cu_seqlens", cu_seqlens)
        return cls._of_rows(of_row, cu_seqlens=bounds, **{name: given.counts(name, counts)})

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
            of_each = given.of_each("mask", masks, len(bounds) - 1, "documents in cu_seqlens")
            return tables.document_table(bounds, of_each)

        return cls._of_rows(
            make,
            cu_seqlens=given.boundaries("cu_seqlens", cu_seqlens),
            mask=given.masks("mask", mask),
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
            ranges = tables.beginnings(bounds, lengths)
            return tables.block_table(bounds, ranges, tables.UNBOUNDED)

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
        if given.plain("mask", mask).right != 0:
            raise ValueError(f"mask must be Mask.causal() or Mask.sliding(window), got {mask}")

        def make(bounds: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
            given.check_blocks(bounds, begins, ends)
            return tables.block_table(bounds, (begins, ends), tables.band_of(mask)[0])

        return cls._of_rows(
            make,
            cu_seqlens=given.boundaries("cu_seqlens", cu_seqlens),
            begins=given.integers("begins", begins, "M"),
            ends=given.integers("ends", ends, "M"),
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
            return tables.global_table(bounds, counts, window)

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
        given.plain("mask", mask)

        def make(bounds: np.ndarray, key_bounds: np.ndarray) -> np.ndarray:
            given.of_each("key_cu_seqlens", key_bounds, len(bounds), "boundaries in cu_seqlens")
            return tables.aligned_table(bounds, key_bounds, mask)

        return cls._of_rows(
            make,
            cu_seqlens=given.boundaries("cu_seqlens", cu_seqlens),
            key_cu_seqlens=given.boundaries("key_cu_seqlens", key_cu_seqlens),
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
            return tables.stacked([tables.query_table(*edges) for edges in of_each])

        return cls._of_rows(
            make,
            begins=given.edges("begins", begins),
            ends=given.edges("ends", ends),
        )
