"""Machines by name, whose figures and sources `presets.toml` has, or by file."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from dtensor_ring.lab.fields import read_json
from dtensor_ring.lab.machine import Curve, KernelSpeed, Links, Machine


def as_machine(given: Machine | str | PathLike[str]) -> Machine:
    """Return a machine: one of the presets by its name, such as "h100", or that of a file.

    Args:
        given: a machine, the name of a preset, or the path of a file that
            `python -m dtensor_ring calibrate` wrote.

    Raises:
        TypeError: if it is something else.
        ValueError: if there is no such preset or file, or the file cannot be read as a machine.
    """
    if isinstance(given, Machine):
        return given
    if not isinstance(given, str | PathLike):
        raise TypeError(f"machine must be a name, such as 'h100', or a file, got {given!r}")
    name = str(given).lower()
    if name in PRESETS:
        return PRESETS[name]
    try:
        text = Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"machine {str(given)!r} is neither a file that can be read ({error}) nor one of "
            f"{', '.join(PRESETS)}"
        ) from None
    return Machine.from_json(text, f"machine file {str(given)!r}")


def is_machine_file(path: Path) -> bool:
    """Return whether a file is that of a machine, of this version or of another one."""
    try:
        content = read_json(path, str(path))
    except ValueError:
        return False
    return isinstance(content, dict) and {"schema", "ranks_per_host", "gemm"} <= content.keys()


MICRO, GIGA, TERA = 1e-6, 1e9, 1e12


class _Figures:
    """The figures of `presets.toml`, whose comments say what they are."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._content, self._all = content, content["all"]

    def machines(self) -> dict[str, Machine]:
        """Return all machines by name."""
        return {name: self._machine(name, x) for name, x in self._content["machines"].items()}

    def _machine(self, name: str, figures: Mapping[str, Any]) -> Machine:
        rate = self._all["stream"] * figures["memory_rate"]
        stream = Curve.line(self._all["smallest"] * MICRO, rate)
        numbers, seconds = figures.get("indexed", (0.0, 1.0))
        kernels = [x for kernel in figures["kernels"] for x in self._content["kernels"][kernel]]
        return Machine(
            name=name,
            device=figures["device"],
            source="data sheet",
            ranks_per_host=8,
            memory=figures["memory"],
            kernels=tuple(map(self._speed, kernels)),
            gemm=figures["gemm"],
            memory_rate=rate,
            merge=stream,
            pack=stream,
            inside=self._inside(figures["links"]),
            between=self._between(figures["gigabits"] / 8 * GIGA),
            beside_transfer=self._all["beside_transfer"],
            element_rate=numbers / seconds,
            launch=self._all["launch"] * MICRO,
            hop=self._all["hop"] * MICRO,
            date=self._all["date"],
        )

    def _speed(self, kernel: Mapping[str, Any]) -> KernelSpeed:
        form, (sizes, seconds) = kernel["form"], self._points(kernel, "forward")
        forward = Curve((0.0, *sizes), (self._all["smallest_forward"] * MICRO, *seconds))
        if "both" in kernel:
            sizes, both = self._points(kernel, "both")
            back = [3.5 * x - forward(size) for size, x in zip(sizes, both, strict=True)]
        else:
            sizes, seconds = self._points(kernel, "backward")
            back = [2.5 * x for x in seconds]
        # A backward has 2.5 times the FLOPs of a forward.
        sizes, first = [2.5 * x for x in sizes], self._all["smallest_backward"] * MICRO
        backward = Curve((0.0, *sizes), (first, *back))
        dim = kernel.get("head_dim", 128)
        return KernelSpeed(kernel["name"], "bfloat16", dim, form, forward, backward)

    def _points(self, kernel: Mapping[str, Any], what: str) -> tuple[list[float], list[float]]:
        """Return the FLOPs of a forward by length, and the seconds that a rate gives them."""
        table = kernel[what]
        chart, (part, whole) = self._content["charts"][table["chart"]], table.get("times", (1, 1))
        visible = 0.5 if kernel["form"] == "causal" else 1.0
        tokens, width = chart["tokens"], chart["width"]
        flops = [4.0 * n * chart.get("in_all", n) * width * visible for n in tokens]
        rates = [x * part / whole * TERA for x in table["rates"]]
        return flops, [size / rate for size, rate in zip(flops, rates, strict=True)]

    def _inside(self, name: str) -> Links:
        if name in self._content["lines"]:
            line = self._content["lines"][name]
            p2p, other = (
                Curve.line(line["latency"] * MICRO, line[x] * GIGA) for x in ("p2p", "collective")
            )
            return Links(p2p, other, other, other)
        tables, sizes = self._content["links"][name], [2**16, *(4**n * 2**20 for n in range(5))]
        curves = {
            kind: Curve(
                tuple(size * (ranks - 1) / ranks for size in sizes),  # what a rank sends
                tuple(x * MICRO for x in tables[kind]),
            )
            for kind, ranks in (dict.fromkeys(tables, 8) | {"p2p": 2}).items()
        }
        return Links(**curves)

    def _between(self, port: float) -> Links:
        """Return links between hosts, by the bytes per second of a device's port."""
        p2p, exchange = (
            Curve.line(self._all["between_latency"] * MICRO, port * self._all[part])
            for part in ("p2p_part", "exchange_part")
        )
        return Links(p2p, exchange, exchange, exchange)


PRESETS: Mapping[str, Machine] = _Figures(
    tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
).machines()
"""Machines by name, each with 8 devices of a host and one network port of each device."""
