"""Writes the tables of docs/long.md: the longest sequences of models on GPUs, by `estimate`.

python -m docs.long_table --write
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docs.marked import table_row, write_part
from dtensor_ring import longest_sequences
from dtensor_ring.lab.training.longest import PARTS, LongestRow, LongestSequences

PAGE = Path(__file__).with_name("long.md")
BEGIN, END = "<!-- longest: written by docs/long_table.py -->\n", "<!-- end of longest -->\n"

LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336}
LLAMA |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
LLAMA |= {"vocab_size": 128256, "tie_word_embeddings": False}
QWEN = {"model_type": "qwen3_moe", "hidden_size": 2048, "moe_intermediate_size": 768}
QWEN |= {"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
QWEN |= {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936}
NEXT = {"model_type": "qwen3_next", "hidden_size": 2048, "moe_intermediate_size": 512}
NEXT |= {"num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2}
NEXT |= {"head_dim": 256, "num_experts": 512, "num_experts_per_tok": 10, "vocab_size": 151936}
NEXT |= {"shared_expert_intermediate_size": 512, "linear_conv_kernel_dim": 4}
NEXT |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
NEXT |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
NEXT |= {"layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12}
MODELS = {"Llama 3 8B": LLAMA, "Qwen3 30B-A3B": QWEN, "Qwen3-Next 80B-A3B, a hybrid": NEXT}
MACHINES = {"h100": "80 GB", "h200": "141 GB", "mi300x": "192 GB"}
GPUS = (8, 32, 256)


def found(config: dict[str, Any], gpus: int, machine: str = "h100") -> LongestSequences:
    """The longest sequences of a model, all GPUs of which share one sequence."""
    return longest_sequences(config, {"cp": gpus}, machine, is_timed=False)


def lines() -> Iterator[str]:
    """The part of the page."""
    for name, config in MODELS.items():
        yield from _by_setting(name, config)
    yield from _by_machine()
    yield from by_part()


def _by_setting(name: str, config: dict[str, Any]) -> Iterator[str]:
    columns = [found(config, gpus) for gpus in GPUS]
    yield ""
    yield table_row(f"{name}, GPUs of 80 GB", *(f"{gpus} GPUs" for gpus in GPUS))
    yield table_row("---", *["---:"] * len(GPUS))
    for row in zip(*(x.rows for x in columns), strict=True):
        yield table_row(row[0].setting, *map(_tokens, row))


def _by_machine() -> Iterator[str]:
    yield ""
    yield table_row("all settings on, 8 GPUs", *MACHINES.values())
    yield table_row("---", *["---:"] * len(MACHINES))
    for name, config in MODELS.items():
        yield table_row(name, *(_tokens(found(config, 8, x).rows[-1]) for x in MACHINES))


def by_part() -> Iterator[str]:
    """The last table."""
    yield ""
    yield table_row("Llama 3 8B, 8 GPUs of 80 GB, GiB", *(name for name, _ in PARTS))
    yield table_row("---", *["---:"] * len(PARTS))
    for row in found(LLAMA, 8).rows:
        sizes = (sum(getattr(row.memory, x) for x in fields) for _, fields in PARTS)
        yield table_row(row.setting, *(f"{size / 2**30:.1f}" for size in sizes))
    yield ""


def _tokens(row: LongestRow) -> str:
    """Millions of tokens."""
    return f"{row.seq_len / 1e6:.2f} M" if row.seq_len else "does not fit"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        write_part(PAGE, BEGIN, END, lines())
