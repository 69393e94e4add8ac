"""Hosts on one machine: network namespaces, joined by links of limited rate through a bridge."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "dtensor-ring-"
SWITCH = PREFIX + "switch"
BURST_BYTES = 256 * 1024
"""Bytes that a link lets through at once: a timer tick of the fastest rate here."""


class Hosts:
    """Namespaces, each with a link `eth0` to the others."""

    def __init__(self, num: int) -> None:
        self.names = [f"{PREFIX}{index}" for index in range(num)]

    def address(self, index: int) -> str:
        return f"10.99.0.{index + 1}"

    def limit(self, bytes_per_second: float | None) -> None:
        """Rate at which each host may send; `None` is unlimited."""
        queue = ["pfifo"]
        if bytes_per_second is not None:
            rate = f"{8 * bytes_per_second:.0f}"
            queue = ["tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", "200ms"]
        for name in self.names:
            replace = ("tc", "qdisc", "replace", "dev", "eth0", "root")
            _ip("netns", "exec", name, *replace, *queue)

    def connect(self, index: int, is_in: bool = True) -> None:
        """Put the cable of a host into the switch, or pull it out."""
        _ip("-n", SWITCH, "link", "set", f"port{index}", "up" if is_in else "down")

    def run(self, script: Path, *arguments: str) -> None:
        """Run a script once on each host, with its number as the first argument.

        Raises:
            RuntimeError: if it fails on one of them; the others are ended then.
        """
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, script, str(index), *arguments],
                env=environment,
            )
            for index, name in enumerate(self.names)
        ]
        try:
            while any(process.poll() is None for process in processes):
                if any(process.returncode for process in processes):
                    break
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"the processes on the hosts ended with {codes}")

    def open(self) -> None:
        _ip("netns", "add", SWITCH)
        _ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        _ip("-n", SWITCH, "link", "set", "bridge", "up")
        for index, name in enumerate(self.names):
            port = f"port{index}"
            _ip("netns", "add", name)
            peer = ("peer", "name", port, "netns", SWITCH)
            _ip("-n", name, "link", "add", "eth0", "type", "veth", *peer)
            _ip("-n", SWITCH, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")


@contextmanager
def hosts(num: int) -> Iterator[Hosts]:
    """Make `num` hosts, which are gone afterwards.

    Raises:
        RuntimeError: if this process may not make them, lacks the tools, or others are in use.
    """
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing:
        raise RuntimeError(f"{' and '.join(missing)} not found; install iproute2")
    if os.geteuid():
        raise RuntimeError("making network namespaces needs root; run it with sudo")
    _clear()  # what an earlier run may have left
    made = Hosts(num)
    try:
        made.open()
        yield made
    finally:
        _clear()


def _clear() -> None:
    """Delete all hosts, unless something still runs on them."""
    listed = [line.split()[0] for line in _ip("netns", "list").splitlines() if line]
    ours = [name for name in listed if name.startswith(PREFIX)]
    if any(_ip("netns", "pids", name) for name in ours):
        raise RuntimeError("another run uses these hosts; wait for it, or end it")
    for name in ours:
        _ip("netns", "delete", name)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout
