"""Writes what torchtitan reads to a folder: a tokenizer of bytes, and documents.

    python examples/torchtitan_assets.py out/torchtitan

The documents are the modules of Python's standard library, one each. Pass the folder as
`--hf_assets_path` and its `data` as `--dataloader.dataset_path`, with the dataset `c4_test`.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers

MARKS = {"bos_token": "<bos>", "eos_token": "<eos>"}


def write_assets(folder: Path, documents: Iterable[str]) -> None:
    """`tokenizer.json`, `tokenizer_config.json` and `data/data.json`."""
    tokens = [*MARKS.values(), *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(list(MARKS.values()))
    (folder / "data").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(MARKS))
    lines = (json.dumps({"text": text}) + "\n" for text in documents)
    (folder / "data" / "data.json").write_text("".join(lines))


def library() -> Iterable[str]:
    """The sources of the standard library's modules."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield path.read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    write_assets(parser.parse_args().folder, library())
