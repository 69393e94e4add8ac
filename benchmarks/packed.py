"""Documents of every length: one axis of all ranks next to a fixed mesh (dp, cp), on paper.

    python benchmarks/packed.py

One process, no tensors: bytes, messages and tiles are counted from the plans of all ranks, and
seconds are simulated for a machine by its data sheet. All meshes get the same documents, and each
rank as many tokens. With ``--quick`` it takes seconds and writes to ``out``.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import mean

import numpy as np
from harness import is_quick, origin, publish, table_of
from rich.console import Console

from dtensor_ring import Mask, describe_schedule
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.simulated_attention import simulate_attention

CAUSAL = Mask.causal()
TOKENS = 32768
"""Of each rank."""
LONGEST = 2**20
"""Longer documents are cut."""
MACHINE = "h100"
KEY_BYTES = 2 * 8 * 128 * 2
"""Key and value of a token in 16 bits, 8 heads of 128."""
LAYERS, PARAMETERS = 32, 8.03e9
"""Of the model whose step is simulated, that of Llama 3 8B."""
WAYS = {
    "dp x cp, zigzag": (True, "zigzag"),
    "dp x cp, balanced": (True, "balanced"),
    "one axis, zigzag": (False, "zigzag"),
    "one axis, balanced": (False, "balanced"),
}
"""Whether the mesh is fixed, and the layout."""
SEEDS = range(3)


def lognormal(sigma: float) -> partial[Iterator[int]]:
    return partial(_lognormal, sigma)


def _lognormal(sigma: float, generator: np.random.Generator) -> Iterator[int]:
    """Lengths with a median of 1,500 tokens."""
    while True:
        yield int(1500 * np.exp(sigma * generator.standard_normal())) + 1


def long_tail(generator: np.random.Generator) -> Iterator[int]:
    """Nine of ten have 100 to 2,000 tokens, the others up to a million, evenly by the logarithm."""
    while True:
        is_short = generator.random() < 0.9
        lowest, most = (100, 2000) if is_short else (2000, LONGEST)
        even = generator.uniform(np.log(lowest), np.log(most))
        yield int(generator.integers(lowest, most) if is_short else np.exp(even))


LENGTHS = {
    "lognormal, sigma 1": lognormal(1),
    "lognormal, sigma 2": lognormal(2),
    "90 % short, long tail": long_tail,
}


@dataclass(frozen=True)
class Measured:
    """One batch by one way."""

    lengths: str
    world_size: int
    seed: int
    way: str
    num_documents: int
    longest: int
    cp: int
    """Ranks that share a row."""
    imbalance: float
    """The visible pairs of the busiest of all ranks, over the mean."""
    received: int
    """Bytes of keys and values that the busiest rank receives in a forward."""
    received_by_all: int
    hops: int
    tiles: int
    """Of the rank with most."""
    attention: float
    """Seconds of the slowest row, forward and backward."""
    step: float
    """Seconds of `LAYERS` such attentions and of the matrix products of the parameters."""


def documents(name: str, world_size: int, seed: int) -> list[int]:
    """Lengths of the documents of a batch; the last one is cut."""
    found: list[int] = []
    left = TOKENS * world_size
    for length in LENGTHS[name](np.random.default_rng(seed)):
        found.append(min(length, LONGEST, left))
        left -= found[-1]
        if not left:
            return found
    raise AssertionError


def smallest_cp(longest: int, world_size: int) -> int:
    """The fewest ranks, a power of two, that hold the longest document."""
    found = 1
    while found * TOKENS < longest:
        found *= 2
    return min(found, world_size)


def rows(lengths: Iterable[int], num_rows: int, row: int) -> list[list[int]]:
    """Lengths by row, longest first, to the row with the least work; what finds no room is cut."""
    found: list[list[int]] = [[] for _ in range(num_rows)]
    room, work, cut = [row] * num_rows, [0] * num_rows, 0
    for length in sorted(lengths, reverse=True):
        fitting = [index for index in range(num_rows) if room[index] >= length]
        if not fitting:
            cut += length
            continue
        index = min(fitting, key=work.__getitem__)
        found[index].append(length)
        room[index] -= length
        work[index] += length**2
    assert cut == sum(room)
    for index, length in enumerate(room):  # the ends of rows, of documents that were cut
        found[index] += [length] if length else []
    return found


def measure(name: str, world_size: int, seed: int, way: str, longest: int) -> Measured:
    is_fixed, layout = WAYS[way]
    lengths = documents(name, world_size, seed)
    cp = smallest_cp(longest, world_size) if is_fixed else world_size
    row = cp * TOKENS
    shared = rows(lengths, world_size // cp, row) if is_fixed else [lengths]
    areas, received, hops, tiles, seconds = [], [], [], [], []
    for one in shared:
        ends = np.cumsum([0, *one])
        schedule = describe_schedule(layout, CAUSAL, row, cp, ends)
        areas += [sum(steps) for steps in schedule.areas]
        received += schedule.received
        hops += [sum(bool(hop.receives) for hop in plan.shards) for plan in schedule.plans]
        tiles += [sum(len(step.tiles) for step in plan.steps) for plan in schedule.plans]
        how = {"cu_seqlens": ends, "layout": schedule.layout, "machine": MACHINE}
        seconds.append(simulate_attention(CAUSAL, row, cp, **how).total)
    products = 6 * PARAMETERS * TOKENS / as_machine(MACHINE).gemm["bfloat16"]
    return Measured(
        *(name, world_size, seed, way, len(lengths), max(lengths), cp),
        *(max(areas) / mean(areas), KEY_BYTES * max(received), KEY_BYTES * sum(received)),
        *(max(hops), max(tiles), max(seconds), LAYERS * max(seconds) + products),
    )


def report(console: Console, found: Sequence[Measured]) -> None:
    """Print what was measured, in Markdown."""
    console.print(
        f"\nCausal attention in packed documents, {TOKENS:,} tokens for each rank, 32 query heads "
        "and 8 key\nheads of 128 in bfloat16. `dp x cp` has as many ranks in a row as hold the "
        "longest document of the\nbatches; documents are dealt to rows, longest first, each to the "
        "row with the least work. `one axis`\nis all ranks. Means of three batches. `busiest`: "
        "visible pairs of the busiest of all ranks over the\nmean; MB of keys and values that the "
        "busiest rank receives forward, and all together, in GB; messages\nthat a rank waits for, "
        "and tiles of the rank with most. Simulated for 8 H100 a host, by their data\nsheet: "
        f"milliseconds of one attention with backward; seconds of a step of {LAYERS} layers and "
        "8 billion\nparameters, attention and matrix products only; the step of `dp x cp, zigzag` "
        "over this one.\n"
    )
    numbers = ("documents", "longest", "cp", "busiest", "MB", "GB", "hops", "tiles", "ms", "step")
    table = table_of(("lengths", "ranks", "mesh, layout"), (*numbers, "gain"))
    for name in LENGTHS:
        for world_size in sorted({one.world_size for one in found}):
            of = [one for one in found if (one.lengths, one.world_size) == (name, world_size)]
            before = [one.step for one in of if one.way == next(iter(WAYS))]
            for way in WAYS:
                these = [one for one in of if one.way == way]
                gains = [x / one.step for x, one in zip(before, these, strict=True)]
                table.add_row(name, str(world_size), way, *cells(these), f"{mean(gains):.2f}")
    console.print(table)


def cells(these: Sequence[Measured]) -> Iterator[str]:
    """What a row of the table says of some batches."""

    def over(name: str) -> float:
        return mean(getattr(one, name) for one in these)

    yield from (f"{over('num_documents'):,.0f}", f"{over('longest'):,.0f}", f"{these[0].cp}")
    yield from (f"{over('imbalance'):.2f}", f"{over('received') / 1e6:,.0f}")
    yield from (f"{over('received_by_all') / 1e9:,.1f}", f"{over('hops'):.0f}")
    yield from (f"{over('tiles'):.0f}", f"{1e3 * over('attention'):,.0f}", f"{over('step'):,.1f}")


def measure_all(sizes: Iterable[int]) -> Iterator[Measured]:
    for name in LENGTHS:
        for world_size in sizes:
            batches = [documents(name, world_size, seed) for seed in SEEDS]
            longest = max(map(max, batches))
            for seed in SEEDS:
                for way in WAYS:
                    yield measure(name, world_size, seed, way, longest)


def main() -> None:
    quick = is_quick(__doc__, "take seconds")
    about = origin() | {"machine": f"{MACHINE}, by its data sheet"}
    found = list(measure_all((8,) if quick else (8, 16, 32, 64)))
    results = {"packed": [asdict(one) for one in found]}
    show = partial(report, found=found)
    publish("packed", "Documents of every length", quick, about, results, show)


if __name__ == "__main__":
    main()
