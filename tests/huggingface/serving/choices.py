"""Ways to choose tokens and to end, as options of `generate`: each alone, and some together."""

from __future__ import annotations

from functools import cache
from string import ascii_lowercase
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from tests.families import VOCABULARY

Options = dict[str, Any]


@cache
def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of all tokens: letters, and pairs of them, so that texts do not end tokens."""
    pairs = [("a", "b"), ("b", "c"), ("c", "a"), ("a", "a")]
    texts = ["<pad>", "<end>", *ascii_lowercase, *map("".join, pairs)]
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(texts)}, pairs))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


class FewerOfThoseBefore(LogitsProcessor):
    """The frequency penalty of OpenAI's interface, which a GenerationConfig does not have."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = torch.nn.functional.one_hot(input_ids, scores.shape[1]).sum(1)
        return scores - 0.4 * counts


def _every_third(batch: int, tokens: Tensor) -> list[int]:
    return [*range(len(tokens) % 3, VOCABULARY, 3)]


def _ends(ids: Tensor, scores: Tensor) -> Tensor:
    return (ids[:, -1] % 3 == 0) & (ids.shape[1] > 13)


SAMPLED = {"do_sample": True, "temperature": 1.5}
CHOICES: dict[str, Options] = {
    "greedy": {},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[3], [4, 5], [9, 9, 2]]},
    "sequence_bias": {"sequence_bias": [[[5], 0.4], [[6, 7], -1.0]]},
    "encoder penalties": {"encoder_repetition_penalty": 1.4, "encoder_no_repeat_ngram_size": 2},
    "suppress_tokens": {"suppress_tokens": [2, 7, 11], "begin_suppress_tokens": [3, 5]},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": [*range(2, 32, 3)]},
    "eos_token_id": {"eos_token_id": [*range(2, 32, 5)]},
    "forced_eos_token_id": {"forced_eos_token_id": 4, "eos_token_id": 4},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (2, 1.3),
        "eos_token_id": 8,
    },
    "stop_strings": {"stop_strings": ["a", "bc", "fx", "op", "t"], "tokenizer": letters()},
    "stopping_criteria": {"stopping_criteria": [_ends]},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": _every_third},
    "logits_processor": {"logits_processor": LogitsProcessorList([FewerOfThoseBefore()])},
    "sampled": SAMPLED,
    "sampled, top_p": SAMPLED | {"top_p": 0.8},
    "sampled, top_k": {"do_sample": True, "top_k": 5, "no_repeat_ngram_size": 2},
    "sampled, min_p": SAMPLED | {"min_p": 0.05, "renormalize_logits": True},
    "sampled, cutoffs": SAMPLED
    | {"typical_p": 0.9, "epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "top_h": 0.9},
    "sampled, penalties": SAMPLED | {"repetition_penalty": 1.2, "bad_words_ids": [[3], [4, 5]]},
    "sampled, stop_strings": SAMPLED | {"stop_strings": ["e", "xy", "ca"], "tokenizer": letters()},
    "sampled, watermark": SAMPLED | {"watermarking_config": WatermarkingConfig(bias=1.0)},
    "sampled, SynthID": SAMPLED
    | {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[5, 9, 3])},
    "sampled, logits_processor": SAMPLED
    | {"logits_processor": LogitsProcessorList([FewerOfThoseBefore()])},
}
