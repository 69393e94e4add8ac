"""Runs the simulator on published measurements of context parallelism.

    python -m benchmarks.published --write

`benchmarks/published.json` has the measurements, their sources and why some are missed. Constants
are those of the presets, which no measurement of context parallelism was used for. `--write` runs
all of them, keeps what was simulated in `benchmarks/results/published.json`, writes the rows to
`benchmarks/results/published.md`, and replaces the summary in docs/simulator.md. A test compares
both pages with the file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.published_steps import OVER_FIRST, StepSetting, simulated_steps, step_settings
from docs.marked import table_row, write_part
from dtensor_ring import Mask, TransferPolicy
from dtensor_ring.lab.machine import Curve, KernelSpeed, Machine
from dtensor_ring.lab.presets import PRESETS
from dtensor_ring.lab.simulated_attention import simulate_attention
from dtensor_ring.planning.strategy import as_strategy

FOLDER = Path(__file__).parent
MEASURED = FOLDER / "published.json"
SIMULATED = FOLDER / "results" / "published.json"
ROWS = FOLDER / "results" / "published.md"
PAGE = FOLDER.parent / "docs" / "simulator.md"
MARKERS = "<!-- published: written by benchmarks/published.py -->\n", "<!-- end of published -->\n"

HIT = 0.15
"""A simulated value is a hit within this part of the published one."""
TIE = 0.03
"""Published values that are closer than this have no order: other runs differ as much."""
MASKS = {"causal": Mask.causal, "full": Mask.full}
Simulated = dict[str, list[list[float]]]
"""What was simulated: "adapted" to what was measured, "plain", and for whole "steps"."""

SMALLER_IS_BETTER = ("time over all-gather", "time over the first")
RELATIVE = (*SMALLER_IS_BETTER, OVER_FIRST)
"""Units of which the first value is 1 and says nothing."""


@dataclass(frozen=True)
class Setting:
    """What values were measured for, all alike but for strategy and layout.

    Attributes:
        source: a name in `sources` of the file.
        machine: a preset.
        kernel: the attention kernel of the measurement.
        gpus: ranks.
        heads: of queries, and of keys and values.
        head_dim: of all three.
        tokens: of the whole sequence.
        batch: rows.
        mask: "causal" or "full".
        direction: "forward", "backward" or "both".
        unit: of the values.
        counts: what is compared: "order" of two values, "value" itself.
    """

    source: str
    machine: str
    kernel: str
    gpus: int
    heads: tuple[int, int]
    head_dim: int
    tokens: int
    batch: int
    mask: str
    direction: str
    unit: str
    counts: tuple[str, ...]

    @property
    def flops(self) -> tuple[float, float]:
        """FLOPs of all GPUs, forward and backward."""
        pairs = self.tokens**2 / (2 if self.mask == "causal" else 1)
        forward = 4 * self.batch * pairs * self.heads[0] * self.head_dim
        return forward, 2.5 * forward

    @property
    def described(self) -> str:
        """The setting in a few words."""
        query, key = self.heads
        rows = f"{self.batch} x " if self.batch > 1 else ""
        direction = {"both": "forward and backward"}.get(self.direction, self.direction)
        return (
            f"{self.gpus} {self.machine}, {rows}{self.tokens // 1024}K, {query}/{key} heads of "
            f"{self.head_dim}, {self.mask}, {direction}"
        )

    def of_direction(self, forward: float, backward: float) -> float:
        """Return what the direction takes."""
        return {"forward": forward, "backward": backward, "both": forward + backward}[
            self.direction
        ]


@dataclass(frozen=True)
class Value:
    """One published value, and what the simulator makes of it.

    Attributes:
        setting: what it was measured for.
        strategy: spec of the strategy that does the same.
        layout: likewise.
        published: in the unit of the setting.
        simulated: likewise.
    """

    setting: Setting | StepSetting
    strategy: str
    layout: str
    published: float
    simulated: float

    @property
    def error(self) -> float:
        """Simulated over published, less one."""
        return self.simulated / self.published - 1

    @property
    def is_judged(self) -> bool:
        """Whether the value itself counts, and not only its order."""
        return "value" in self.setting.counts and not self.is_reference

    @property
    def is_reference(self) -> bool:
        """Whether the others of its setting are given over this value."""
        return self.setting.unit in RELATIVE and self.published == 1

    @property
    def is_hit(self) -> bool:
        """Whether the error is small enough."""
        return abs(self.error) <= HIT


@dataclass(frozen=True)
class Comparison:
    """Two values of one setting, of which the first was published as the better one."""

    better: Value
    worse: Value

    @property
    def is_right(self) -> bool:
        """Whether the simulated values have the same order."""
        found = self.better.simulated > self.worse.simulated
        if self.better.setting.unit in SMALLER_IS_BETTER:
            found = self.better.simulated < self.worse.simulated
        return found


def measured() -> dict[str, Any]:
    """Return the file of measurements."""
    return json.loads(MEASURED.read_text())


def setting_of(group: dict[str, Any]) -> Setting:
    """Return the setting of an entry of `groups`."""
    fields = {name: x for name, x in group.items() if name != "values"}
    return Setting(**fields | {name: tuple(fields[name]) for name in ("heads", "counts")})


@cache
def machine_of(name: str, kernel: str) -> Machine:
    """Return a preset that has one kernel only, from the preset itself or from the file."""
    preset = PRESETS[name]
    given = measured()["kernels"].get(kernel)
    rows = [x for x in preset.kernels if x.kernel == kernel]
    if given is not None:
        rows = [_speed(kernel, given, form) for form in ("causal", "full")]
    return replace(preset, kernels=tuple(rows))


def _speed(kernel: str, given: dict[str, Any], form: str) -> KernelSpeed:
    """Return a kernel from its TFLOP/s by length."""
    curves = []
    for direction, factor in (("forward", 4.0), ("backward", 10.0)):
        width = given["heads"] * given["head_dim"] / (2 if form == "causal" else 1)
        sizes = [factor * tokens**2 * width for tokens in given["tokens"]]
        rates = given[form][direction]
        seconds = [size / (x * 1e12) for size, x in zip(sizes, rates, strict=True)]
        curves.append(Curve(tuple(sizes), tuple(seconds)))
    return KernelSpeed(kernel, "bfloat16", given["head_dim"], form, *curves)


NUM_PARTS = 2
"""Partial results that are kept, here and in what `copies` compares with; fewer than by default."""


def seconds_of(setting: Setting, value: dict[str, Any], is_adapted: bool) -> float:
    """Return what the simulator says that the direction takes.

    Args:
        setting: what was measured.
        value: an entry of `values`.
        is_adapted: whether to count what the measured library does otherwise, see `copies` and
            `enters_once`.
    """
    machine = machine_of(setting.machine, setting.kernel)
    if is_adapted and value.get("enters_once"):
        machine = entering_once(machine)
    found = simulate_attention(
        MASKS[setting.mask](),
        setting.tokens,
        setting.gpus,
        setting.heads,
        setting.head_dim,
        layout=value["layout"],
        strategy=value["strategy"],
        batch=setting.batch,
        dtype="bfloat16",
        policy=TransferPolicy(num_parts=NUM_PARTS),
        machine=machine,
    )
    seconds = setting.of_direction(*found.seconds)
    return seconds + (copies(setting, value, machine) if is_adapted else 0.0)


def copies(setting: Setting, value: dict[str, Any], machine: Machine) -> float:
    """Return the seconds of passes over memory that the measured library makes in each step.

    `copies` of a value has bytes for each number of the output, and kernels, beyond what this
    library reads and writes; both are counted in the source of the other library.
    """
    num_bytes, kernels = value.get("copies", (0, 0))
    steps = setting.gpus // as_strategy(value["strategy"], setting.gpus).heads
    numbers = setting.batch * setting.tokens // setting.gpus * setting.heads[0] * setting.head_dim
    return steps * (num_bytes * numbers / machine.memory_rate + kernels * machine.merge(0.0))


def entering_once(machine: Machine) -> Machine:
    """Return a machine for collectives, by which each key enters a host once and goes on inside.

    Where messages go from rank to rank, a key enters a host once for each of its ranks. A ring of
    NCCL passes through all ranks of a host, and all ports of a host have a part of the keys. Links
    within the host are the slower ones then, as 8 ports together carry more.
    """
    inside, latency = machine.inside.p2p, machine.between.p2p(0.0)
    p2p = Curve(inside.sizes, tuple(latency + x for x in inside.seconds))
    return replace(machine, between=replace(machine.between, p2p=p2p))


def in_unit(setting: Setting, seconds: float, first: float) -> float:
    """Return seconds in the unit of a setting; `first` are those of its first value."""
    if setting.unit == "TFLOP/s of a GPU":
        return setting.of_direction(*setting.flops) / seconds / setting.gpus / 1e12
    if setting.unit == "% of one GPU":
        return 100 * setting.gpus * _alone(setting) / seconds
    if setting.unit == "iterations/s":
        return 1 / seconds
    if setting.unit == "thousand tokens/s":
        return setting.batch * setting.tokens / seconds / 1e3
    return seconds / first


def _alone(setting: Setting) -> float:
    """Return the seconds of one GPU for its own shard alone, whose FLOPs are 1 / gpus**2."""
    speed = machine_of(setting.machine, setting.kernel).speed(
        "bfloat16", setting.head_dim, setting.mask
    )
    forward, backward = (x / setting.gpus**2 for x in setting.flops)
    return setting.of_direction(speed.forward(forward), speed.backward(backward))


def simulated(group: dict[str, Any], is_adapted: bool = True) -> list[float]:
    """Return what the simulator makes of the values of a group, in their unit."""
    setting = setting_of(group)
    seconds = [seconds_of(setting, x, is_adapted) for x in group["values"]]
    return [in_unit(setting, x, seconds[0]) for x in seconds]


def values_of(content: dict[str, Any], found: Simulated, name: str = "adapted") -> list[Value]:
    """Join published and simulated values of attentions, and then of steps."""
    of_groups = [
        Value(setting_of(group), x["strategy"], x["layout"], x["value"], number)
        for group, numbers in zip(content["groups"], found[name], strict=True)
        for x, number in zip(group["values"], numbers, strict=True)
    ]
    of_steps = [
        Value(setting, x["strategy"], x["layout"], x["value"], number)
        for table, numbers in zip(content["steps"], found["steps"], strict=True)
        for setting, x, number in zip(step_settings(table), table["values"], numbers, strict=True)
    ]
    return of_groups + of_steps


def comparisons(values: Sequence[Value]) -> list[Comparison]:
    """Return all pairs of one setting whose published values differ enough."""
    found = []
    for one, other in combinations(values, 2):
        is_same = (one.strategy, one.layout) == (other.strategy, other.layout)
        if one.setting != other.setting or is_same:
            continue
        low, high = sorted((one, other), key=lambda x: x.published)
        if high.published / low.published < 1 + TIE:
            continue
        pair = (low, high) if one.setting.unit in SMALLER_IS_BETTER else (high, low)
        found.append(Comparison(*pair))
    return found


def why(misses: Sequence[dict[str, Any]], value: Value) -> int | None:
    """Return the number of the reason why a value is missed: the first one that fits."""
    for number, miss in enumerate(misses, 1):
        wanted = miss["when"].items()
        if all(str(_field(value, name)) in map(str, _list(x)) for name, x in wanted):
            return number
    return None


def _field(value: Value, name: str) -> Any:
    owner = value if name in ("strategy", "layout") else value.setting
    return getattr(owner, name, None)  # settings of steps have other fields


def _list(x: Any) -> list[Any]:
    return x if isinstance(x, list) else [x]


def rows(content: dict[str, Any], found: Simulated) -> Iterator[str]:
    """Yield the lines of the rows: a table for each source, wrong comparisons, and the reasons."""
    values = values_of(content, found, "adapted")
    yield "# Published and simulated"
    yield ""
    yield "Written by `python -m benchmarks.published --write`; docs/simulator.md says what counts."
    yield ""
    yield from _counted(content, values, [*content["sources"], None])
    for name, source in content["sources"].items():
        of_source = [x for x in values if x.setting.source == name]
        if of_source:
            yield from _of_source(content, source, of_source)
    yield from _wrong(content, values)
    yield ""
    yield "## Why they are missed"
    yield ""
    for number, miss in enumerate(content["misses"], 1):
        yield f"{number}. {miss['why']}"


def summary(content: dict[str, Any], found: Simulated) -> Iterator[str]:
    """Yield the lines of the page: hits of all sources, and those without adaptations."""
    yield from _counted(content, values_of(content, found, "adapted"), [None])
    yield ""
    yield from _plain(values_of(content, found, "plain"))


def _counted(
    content: dict[str, Any], values: Sequence[Value], names: Sequence[str | None]
) -> Iterator[str]:
    """Yield a table of hits, a row for each source, or for all where it is `None`."""
    yield table_row("source", "comparisons", "right", "values", "within 15 %", "median error")
    yield table_row("---", *["---:"] * 5)
    for name in names:
        ours = [x for x in values if name in (None, x.setting.source)]
        if ours:
            title = "all" if name is None else content["sources"][name]["title"]
            yield table_row(title, *_counts(ours))


def _counts(values: Sequence[Value]) -> Iterator[str]:
    """Yield comparisons, right ones, judged values, hits, and the median error."""
    two, judged = comparisons(values), [x for x in values if x.is_judged]
    yield str(len(two))
    yield _part(sum(x.is_right for x in two), len(two))
    yield str(len(judged))
    yield _part(sum(x.is_hit for x in judged), len(judged))
    yield f"{100 * median(abs(x.error) for x in judged):.0f} %" if judged else ""


def _part(count: int, of: int) -> str:
    return f"{count} ({100 * count / of:.0f} %)" if of else ""


def _plain(values: Sequence[Value]) -> Iterator[str]:
    _, right, _, hits, error = _counts(values)
    yield "Without what the measured libraries do otherwise, as if all of them were this one:"
    yield f"{right} of the comparisons are right, {hits} of the values are hits, and the median"
    yield f"error is {error}."


def _of_source(
    content: dict[str, Any], source: dict[str, str], values: Sequence[Value]
) -> Iterator[str]:
    yield ""
    yield f"## {source['title']}"
    yield ""
    yield f"[Source]({source['link']}), read {source['read']}. Values are {values[0].setting.unit}."
    yield ""
    yield table_row("setting", "strategy", "layout", "published", "simulated", "error", "")
    yield table_row("---", "---", "---", "---:", "---:", "---:", "---")
    for value in values:
        yield table_row(*_cells(content, value))


def _cells(content: dict[str, Any], value: Value) -> Iterator[str]:
    yield value.setting.described
    yield f"`{value.strategy}`"
    yield value.layout
    yield _number(value.published)
    yield _number(value.simulated)
    yield f"{100 * value.error:+.0f} %" if value.is_judged else ""
    if not value.is_judged:
        yield "reference" if value.is_reference else "order only"
    else:
        yield "hit" if value.is_hit else f"miss, see {why(content['misses'], value)}"


def _number(x: float) -> str:
    return f"{x:.3g}" if x < 1000 else f"{x:.0f}"


def _wrong(content: dict[str, Any], values: Sequence[Value]) -> Iterator[str]:
    """Yield the comparisons that are wrong."""
    yield ""
    yield "## Comparisons that are wrong"
    yield ""
    yield table_row("setting", "published as better", "than", "")
    yield table_row("---", "---", "---", "---")
    for pair in comparisons(values):
        if not pair.is_right:
            names = (f"`{x.strategy}`, {x.layout}" for x in (pair.better, pair.worse))
            reason = reason_of(content["misses"], pair)
            yield table_row(pair.better.setting.described, *names, f"see {reason}")


def reason_of(misses: Sequence[dict[str, Any]], pair: Comparison) -> int | None:
    """Return the number of the reason why a comparison is wrong: that of either value."""
    numbers = (why(misses, x) for x in (pair.better, pair.worse))
    return min((x for x in numbers if x is not None), default=None)


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="simulate, and replace the pages")
    is_new, content = parser.parse_args().write, measured()
    if is_new:
        SIMULATED.write_text(_lines(simulate_all(content)))
    found = json.loads(SIMULATED.read_text())
    lines, short = [*rows(content, found)], [*summary(content, found)]
    if is_new:
        ROWS.write_text("".join(f"{line}\n" for line in lines))
        write_part(PAGE, *MARKERS, short)
    print("\n".join(short + lines))


def simulate_all(content: dict[str, Any]) -> Simulated:
    """Return what the simulator makes of all groups, with and without adaptations, and of steps."""
    found = {
        name: [simulated(group, is_adapted) for group in content["groups"]]
        for name, is_adapted in (("adapted", True), ("plain", False))
    }
    found["steps"] = [
        simulated_steps(x, machine_of(x["machine"], x["kernel"])) for x in content["steps"]
    ]
    return found


def _lines(found: Simulated) -> str:
    """Return JSON with a line for each group, of numbers as exact as the published ones."""
    parts = []
    for name, groups in found.items():
        rows = [json.dumps([float(f"{x:.4g}") for x in numbers]) for numbers in groups]
        parts.append(f'"{name}": [\n ' + ",\n ".join(rows) + "\n]")
    return "{" + ",\n".join(parts) + "}\n"


if __name__ == "__main__":
    main()
