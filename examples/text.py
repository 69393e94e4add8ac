"""Real text that every machine has: the sources of Python's standard library, as bytes."""

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset


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
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.tensor(list(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
