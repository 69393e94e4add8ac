"""Memory that other processes of this host may map, without a file system and without a name."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b

import torch
from torch import Tensor

NAME = "dtensor_ring"
"""What the kernel calls this memory in /proc."""


class Gone(Exception):
    """A segment is not there any more, as its process has ended."""


class Segment:
    """Shared memory that this process made. The kernel frees it once nobody has it open or mapped.

    Args:
        num_bytes: its size.

    Raises:
        OSError: if this system has no such memory, or no more of it now.
        RuntimeError: if it never has as much.
    """

    def __init__(self, num_bytes: int) -> None:
        if not hasattr(os, "memfd_create"):  # Linux alone has it
            raise OSError("this system has no memory files (memfd_create)")
        # For more than there can be the system would end processes: this is an error instead.
        torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self.fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
        # Not at exit: a forked process would close what has this number by then.
        closing = weakref.finalize(self, os.close, self.fd)
        closing.atexit = False  # pyrefly: ignore[missing-attribute]
        # So is what is not there now, which would end the process where it is written to.
        os.posix_fallocate(self.fd, 0, num_bytes)
        self.inode = os.fstat(self.fd).st_ino
        """Identifies the memory on this host; the number of a file descriptor may be reused."""
        self.memory: Tensor = _mapped(self.fd, num_bytes)
        """All of it, uint8."""
        self.loans: dict[int, int] = {}
        """By peer, the number of the last loan of it."""


def segment_of(pid: int, fd: int, inode: int) -> Tensor:
    """The memory of a segment of another process, uint8.

    Raises:
        Gone: if it is not there.
        OSError: if it cannot be mapped.
    """
    with _opened(f"/proc/{pid}/fd/{fd}") as own:
        found = os.fstat(own)
        if found.st_ino != inode or not os.readlink(f"/proc/self/fd/{own}").startswith(
            f"/memfd:{NAME}"
        ):
            raise Gone(f"process {pid} has something else there")
        return _mapped(own, found.st_size)


@contextmanager
def _opened(path: str) -> Iterator[int]:
    """A file descriptor of a file, which may turn out to be a pipe: nobody waits for its writer."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError, ProcessLookupError) as error:
        raise Gone(str(error)) from error
    try:
        yield fd
    finally:
        os.close(fd)


def _mapped(fd: int, num_bytes: int) -> Tensor:
    path = f"/proc/self/fd/{fd}"
    with torch.inference_mode(False):  # else it could not be written to outside of that mode
        try:
            return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise OSError(f"{num_bytes} bytes cannot be mapped: {error}") from error


def host_of_process() -> int:
    """A number that is equal for processes that may map each other's memory; 0 if it is not known.

    Processes of different network namespaces get different numbers: they use the network.
    """
    with suppress(OSError):
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net")]
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            facts = file.read(), *spaces, os.getuid()
        digest = blake2b(repr(facts).encode(), digest_size=7).digest()
        return 1 + int.from_bytes(digest, "little")
    return 0
