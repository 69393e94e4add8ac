"""Real text that every machine has: the sources of Python's standard library, as bytes."""

import re
import sysconfig
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

BEGIN = re.compile(rb"^(?=def |async def |class |@)", re.MULTILINE)
"""Where a function or a class of a module begins."""


class StandardLibrary(Dataset[Tensor]):
    """Its modules, one after another, cut into sequences of `seq_len` bytes."""

    def __init__(self, seq_len: int) -> None:
        text = read_standard_library()
        self.rows = text[: len(text) // seq_len * seq_len].view(-1, seq_len)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index].long()


def read_standard_library() -> Tensor:
    """The bytes of its modules, one after another."""
    return torch.cat(read_documents())


def read_documents() -> list[Tensor]:
    """Its functions and classes, in the order of modules, with what stands between them."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts = chain.from_iterable(BEGIN.split(file.read_bytes()) for file in files)
    return [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts if part]
