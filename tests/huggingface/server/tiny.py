"""A tiny model with a tokenizer, on disk, what the stock model says, and servers of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from parallel_plans.huggingface.server.rank import FirstRank, ServerOptions, run_rank

LONGEST = 512
"""Tokens of a prompt and its answer that the model has positions for."""
STOP = "$$"
"""What ends an answer by the model's config: one to "once"."""
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and one for the end and padding."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    model = models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    made.chat_template = TEMPLATE
    return made


def write_tiny(folder: Path, ends: bool = True) -> str:
    """Write the model; in float64, so that no tie decides which token is the largest.

    With `ends`, a token of its vocabulary ends an answer, and so does a string.
    """
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=LONGEST,
        initializer_range=0.3,  # else a token repeats itself
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id if ends else None,
        pad_token_id=tokenizer.eos_token_id,
        **sizes,
        **heads,
    )
    model = LlamaForCausalLM(config).double()
    model.generation_config.stop_strings = [STOP] if ends else None
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class Stock:
    """The stock model of a folder, in one process."""

    def __init__(self, folder: str) -> None:
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype="auto").eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    def tokens(self, prompt: list[int], num_new: int) -> list[int]:
        """What it generates greedily."""
        how = {"max_new_tokens": num_new, "do_sample": False, "tokenizer": self.tokenizer}
        found = self.model.generate(torch.tensor([prompt]), **how)
        return found[0, len(prompt) :].tolist()

    def text(self, prompt: str, num_new: int) -> str:
        tokens = self.tokens(self.tokenizer(prompt)["input_ids"], num_new)
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


OPTIONS = ServerOptions("", 2, port=0, name="tiny", page_size=8, cache_tokens=4096, seed=1)


def serving(folder: str, client: Callable[[FirstRank], Any], **options: Any) -> Any:
    """What a client returns, which runs beside the server of these ranks, on the first of them."""
    answers, errors = [], []

    def ask(first: FirstRank) -> None:
        try:
            answers.append(client(first))
        except BaseException as error:
            errors.append(error)
        finally:
            first.stop()

    threads = []

    def ready(first: FirstRank) -> None:
        threads.append(Thread(target=ask, args=(first,)))
        threads[0].start()

    given = {"model": folder, "num_ranks": dist.get_world_size()} | options
    run_rank(replace(OPTIONS, **given), ready)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return answers[0] if answers else None


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never holds"
        time.sleep(0.02)
