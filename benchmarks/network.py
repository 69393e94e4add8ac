"""Hosts on one machine: network namespaces, joined by links of limited rate through a bridge."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SWITCH = "dtensor-ring-switch"
BURST_BYTES = 256 * 1024
"""What a link lets through at once: a timer tick's worth of the fastest rate here."""


class Hosts:
    """Namespaces, each with a link `eth0` to the others."""

    def __init__(self, num: int) -> None:
        self.names = [f"dtensor-ring-{index}" for index in range(num)]

    def address(self, index: int) -> str:
        return f"10.99.0.{index + 1}"

    def limit(self, bytes_per_second: float | None) -> None:
        """What each host may send; `None` is as much as it can."""
        for name in self.names:
            if bytes_per_second is None:
                _ip("netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0", "root", "pfifo")
            else:
                rate = ("rate", f"{8 * bytes_per_second:.0f}", "burst", str(BURST_BYTES))
                _ip(
                    *("netns", "exec", name, "tc", "qdisc", "replace", "dev", "eth0"),
                    *("root", "tbf", *rate, "latency", "200ms"),
                )

    def run(self, script: Path, *arguments: str) -> None:
        """Run a script once on each host, with its number as the first argument.

        Raises:
            RuntimeError: if it fails on one of them.
        """
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, script, str(index), *arguments],
                env=environment,
            )
            for index, name in enumerate(self.names)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise RuntimeError(f"the processes on the hosts ended with {codes}")

    def _open(self) -> None:
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

    def _close(self) -> None:
        for name in (*self.names, SWITCH):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL)


@contextmanager
def hosts(num: int) -> Iterator[Hosts]:
    """So many hosts, which are gone afterwards.

    Raises:
        PermissionError: if this process may not make them.
    """
    if os.geteuid():
        raise PermissionError("making network namespaces needs root: sudo python ...")
    made = Hosts(num)
    made._close()  # what an earlier run may have left
    try:
        made._open()
        yield made
    finally:
        made._close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
