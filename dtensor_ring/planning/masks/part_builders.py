"""Slices of sequences that consist of parts: frames, answers, nodes of a tree.

Parts are given by their lengths, one after the other from position 0 on, in any form that holds
integers: one row for the whole batch, or one for each batch row. For parts of several documents,
see `Slices.shifted` and `|`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from dtensor_ring.planning.masks import given, tables
from dtensor_ring.planning.values.count import as_count
from dtensor_ring.planning.values.integers import Integers


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
        parts = given.part_lengths("lengths", lengths)
        return cls._of_rows(lambda row: tables.block_causal_table(row, reach), lengths=parts)

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
        parts = given.part_lengths("lengths", lengths)
        return cls._of_rows(tables.block_diffusion_table, lengths=parts)

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
            given.check_parents(parents, lengths)
            return tables.tree_table(parents, lengths)

        return cls._of_rows(
            make,
            parents=given.integers("parents", parents, "N", smallest=-1),
            lengths=given.part_lengths("lengths", lengths),
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
        answers = given.integers("answer_lengths", answer_lengths, "A")
        questions = given.one_row("prefix_lengths", given.counts("prefix_lengths", prefix_lengths))
        groups = given.of_each("prefix_lengths", questions, len(answers), "rows of answer_lengths")
        parents, lengths = [], []
        for question, row in zip(groups, answers, strict=True):
            root = len(parents)
            parents += [-1, *[root] * len(row)]
            lengths += [question, *row]
        return cls.tree(parents, lengths)
