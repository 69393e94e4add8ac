"""Memory that other processes of this host may map, without a file system and without a name."""

from __future__ import annotations

import os
import weakref
from contextlib import suppress
from hashlib import blake2b

import torch
from torch import Tensor

NAME = "dtensor_ring"
"""What the kernel calls this memory in /proc."""


class Segment:
    """Memory of this process, which lives as long as one process has it mapped.

    No file is left behind, however a process ends.

    Args:
        num_bytes: its size.

    Raises:
        OSError: if this system has no such memory, or no more of it.
    """

    def __init__(self, num_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):  # Linux alone has it
            raise OSError("this system has no memory files (memfd_create)")
        self.fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        os.ftruncate(self.fd, num_bytes)
        self.serial = os.fstat(self.fd).st_ino
        """Of this host: file descriptors are used again."""
        self.memory: Tensor = _mapped(f"/proc/self/fd/{self.fd}", num_bytes)
        """All of it, uint8."""


def segment_of(pid: int, fd: int, serial: int) -> Tensor:
    """The memory of a segment of another process, uint8.

    Raises:
        OSError: if it is not there, or cannot be read.
    """
    path = f"/proc/{pid}/fd/{fd}"
    # Else a pipe could be opened, which waits for a writer, or what another process has there.
    if not os.readlink(path).startswith(f"/memfd:{NAME}") or os.stat(path).st_ino != serial:
        raise OSError(f"{path} is not the memory that was lent")
    return _mapped(path, os.stat(path).st_size)


def _mapped(path: str, num_bytes: int) -> Tensor:
    with torch.inference_mode(False):  # else it could not be written to outside of that mode
        try:
            return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise OSError(f"{path} cannot be mapped: {error}") from error


def host_of_process() -> int:
    """What processes have in common that may map each other's memory, not 0; 0 if it is not known.

    A network namespace counts as a host of its own: between such hosts a network is wanted.
    """
    with suppress(OSError):
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            facts = file.read(), *spaces, os.getuid()
        digest = blake2b(repr(facts).encode(), digest_size=7).digest()
        return 1 + int.from_bytes(digest, "little")
    return 0
