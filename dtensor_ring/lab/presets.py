"""Machines by name, from data sheets and from measurements that others published, or by file.

None of these figures comes from a measurement of context parallelism, and none was fitted to one:
`benchmarks/published.py` runs them against such measurements. Sources of figures are:

- aiconfigurator: tables of ai-dynamo/aiconfigurator at 095f58a, `systems/data/<gpu>/`, measured by
  NVIDIA with nccl-tests and with kernels alone; `systems/<gpu>.yaml` has its data sheets;
- flash-attention: charts in `assets/` of Dao-AILab/flash-attention, of 16,384 tokens in all and
  2,048 numbers of all heads (Dao, 2023, arXiv 2307.08691; Shah et al., 2024, arXiv 2407.08608);
- MagiAttention: its charts of kernels on one GPU, batch 1 and 64 heads of 128, in
  `assets/magi_attn/exp/kernel/` of SandAI-org/MagiAttention at 2c64135, read to 0.5 %;
- Liger-Kernel: `benchmark/data/all_benchmark_data.csv` of linkedin/Liger-Kernel at ead96b6;
- AITER: the table in `op_tests/cpp/mha/README.md` of ROCm/aiter, batch 1 and 64 heads of 128.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike
from pathlib import Path

from dtensor_ring.lab.fields import read_json
from dtensor_ring.lab.machine import Curve, KernelSpeed, Links, Machine

TERA, GIGA, MICRO = 1e12, 1e9, 1e-6
MEGABYTES = (1, 4, 16, 64, 256)
TOKENS = (512, 1024, 2048, 4096, 8192, 16384)
MAGI_TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
CHART, MAGI = (16384, 2048), (None, 64 * 128)
"""Tokens of all sequences, `None` for one sequence, and numbers of all heads."""

# "An average computational slowdown of 18.9 %" while NCCL runs, on A100 and H100: arXiv 2507.03114.
BESIDE_TRANSFER = 1.189
# aiconfigurator's data sheets: the part of the memory's rate that kernels reach, and what one takes
# at least. A survey of MI300X has 81 % (aiweekly.co, "AMD MI300X hits only 45 % of peak FLOPs").
STREAM, SMALLEST = 0.8, 3 * MICRO
# Numbers per second that kernels of PyTorch look up one by one. Liger-Kernel times PyTorch's ops
# for comparison. On an H100, SwiGLU of 8,192 tokens of 32,768 numbers, strided, in bfloat16, takes
# two kernels and 1.495 ms (megatron_swiglu, torch, forward). On an A100, RMSNorm of 2,048 tokens of
# 16,384 numbers takes four, and 0.986 ms with others that take 0.227 ms by their bytes.
INDEXED_HOPPER, INDEXED_AMPERE = 2 * 8192 * 32768 / 1.495e-3, 4 * 2048 * 16384 / 0.759e-3
# The shortest launches of attention in aiconfigurator's tables take 9 to 14 us. A backward is three
# kernels: dot products of outputs and their gradients, the gradients, and a change of dtype.
SMALLEST_KERNEL, BACKWARD_KERNELS = 10 * MICRO, 3
# One more launch and its merge cost our host 41 us: (142 - 59) / 2, `benchmarks/README.md`, Calls.
# A hop is taken to cost as much, as no measurement of NCCL's host time was found.
LAUNCH, HOP = 20 * MICRO, 41 * MICRO
# Between hosts small messages take 31 us (nccl-tests issue 214). A port of 400 Gb/s carries 48 GB/s
# (NCCL's maintainers, nccl-tests issues 267 and 290), and DeepEP gets 45 GB/s of it when all ranks
# exchange. Other ports are taken to reach the same part.
BETWEEN_LATENCY = 31 * MICRO
P2P_PART, EXCHANGE_PART = 48 / 50, 45 / 50


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


def _flops(tokens: int, shape: tuple[int | None, int], form: str) -> float:
    """Return the FLOPs of a forward over sequences of a length."""
    of_all, width = shape
    return 4.0 * tokens * (of_all or tokens) * width / (2 if form == "causal" else 1)


def _kernel(
    form: str, shape: tuple[int | None, int], tokens: Sequence[int], rates: Sequence[float]
) -> Curve:
    """Return seconds by FLOPs of a forward; rates are in TFLOP/s."""
    sizes = [_flops(n, shape, form) for n in tokens]
    seconds = [x / (y * TERA) for x, y in zip(sizes, rates, strict=True)]
    return Curve((0.0, *sizes), (SMALLEST_KERNEL, *seconds))


def _backward(
    form: str, shape: tuple[int | None, int], tokens: Sequence[int], rates: Sequence[float]
) -> Curve:
    """Return seconds by FLOPs of a backward, which has 2.5 times those of a forward."""
    forward = _kernel(form, shape, tokens, rates)
    seconds = (BACKWARD_KERNELS * SMALLEST_KERNEL, *(2.5 * x for x in forward.seconds[1:]))
    return Curve(tuple(2.5 * x for x in forward.sizes), seconds)


def _less(forward: Curve, form: str, rates: Sequence[float]) -> Curve:
    """Return a backward, from charts of flash-attention that have both directions together."""
    sizes = [_flops(n, CHART, form) for n in TOKENS]
    both = [3.5 * x / (y * TERA) for x, y in zip(sizes, rates, strict=True)]
    seconds = [x - forward(size) for x, size in zip(both, sizes, strict=True)]
    smallest = BACKWARD_KERNELS * SMALLEST_KERNEL
    return Curve((0.0, *(2.5 * x for x in sizes)), (smallest, *seconds))


def _speed(kernel: str, form: str, forward: Curve, backward: Curve, dim: int = 128) -> KernelSpeed:
    return KernelSpeed(kernel, "bfloat16", dim, form, forward, backward)


# flash-attention's flash2_h100_fwd_bwd_benchmark.png and flash3_fp16_fwd.png. Flash attention 3 has
# no chart of backward there: it is from MagiAttention.
_FLASH2_HOPPER = (
    (128, "causal", (191, 260, 298, 319, 333, 335), (163, 221, 265, 294, 308, 328)),
    (128, "full", (309, 350, 362, 368, 370, 370), (248, 294, 320, 326, 335, 338)),
    (64, "causal", (180, 229, 262, 284, 295, 299), (141, 192, 232, 257, 273, 284)),
    (64, "full", (282, 306, 318, 321, 322, 324), (215, 254, 274, 288, 294, 296)),
)
_FLASH3 = (
    ("causal", (292, 423, 521, 579, 602, 616), (208, 353, 462, 517, 561, 584)),
    ("full", (467, 565, 625, 638, 646, 648), (335, 453, 517, 555, 586, 599)),
)
# MagiAttention: "sdpa", which is cuDNN by way of PyTorch.
_CUDNN_HOPPER = (
    ("causal", (325, 474, 562, 589, 587, 605), (179, 304, 402, 459, 498, 516)),
    ("full", (533, 628, 625, 608, 607, 616), (315, 436, 487, 500, 519, 533)),
)
# cuDNN of heads of 64, over heads of 128 above. Of 131,072 tokens, 32 heads and a causal mask, an
# H200 (PyTorch 2.11, cuDNN 9.19) reached 463 TFLOP/s forward, and 435 in both directions together,
# which is 425 backward. Other lengths and forms are taken to be as much slower.
CUDNN_64 = 463 / 605, 425 / 516
_CUDNN_BLACKWELL = (
    ("causal", (239, 918, 1288, 1333, 1322, 1320), (318, 554, 727, 893, 937, 985)),
    ("full", (713, 1206, 1413, 1405, 1364, 1369), (528, 840, 991, 1027, 1056, 1064)),
)
# Without its 1,024 tokens, which take as long as 2,048: the host's time for a launch.
_FLASH4 = (
    ("causal", (396, 1331, 1373, 1364, 1386), (247, 612, 937, 1032, 1091)),
    ("full", (835, 1376, 1331, 1297, 1294), (439, 844, 1043, 1107, 1127)),
)
# AITER: the columns FWD and BWD-a32 of MI300X, of 1,024 to 16,384 tokens.
_AITER = (
    ("causal", (229, 392, 474, 518, 542), (242, 258, 378, 433, 412)),
    ("full", (418, 485, 546, 591, 548), (266, 394, 470, 442, 442)),
)


def _flash2_hopper() -> tuple[KernelSpeed, ...]:
    rows = []
    for dim, form, rates, both in _FLASH2_HOPPER:
        forward = _kernel(form, CHART, TOKENS, rates)
        rows.append(_speed("flash_attn2", form, forward, _less(forward, form, both), dim))
    return tuple(rows)


def _flash2_ampere() -> tuple[KernelSpeed, ...]:
    """Return flash attention 2 on A100."""
    # aiconfigurator: a100_sxm/attention/sglang/0.5.10, batch 1, 32 query heads and 8 key heads.
    tokens = (256, *TOKENS)
    causal = _kernel("causal", (None, 4096), tokens, (22.7, 49.1, 90.5, 131, 163, 189, 198.5))
    # Forward and backward together: flash2_a100_fwd_bwd_benchmark.png.
    both = {"causal": (99, 133, 155, 173, 182, 189), "full": (150, 173, 187, 196, 201, 203)}
    # Full forward has no table. Its best is 73 % of 312 TFLOP/s (abstract of arXiv 2307.08691), and
    # short ones are taken to lose as much as both directions together.
    full = _kernel("full", CHART, TOKENS, [0.73 * 312 * x / 203 for x in both["full"]])
    return tuple(
        _speed("flash_attn2", form, forward, _less(forward, form, both[form]))
        for form, forward in (("causal", causal), ("full", full))
    )


_Rates = Sequence[tuple[str, Sequence[float], Sequence[float]]]


def _magi(kernel: str, rates: _Rates, tokens: Sequence[int] = MAGI_TOKENS) -> list[KernelSpeed]:
    """Return a kernel whose rates by length are of 64 heads of 128."""
    return [
        _speed(
            kernel, form, _kernel(form, MAGI, tokens, ahead), _backward(form, MAGI, tokens, back)
        )
        for form, ahead, back in rates
    ]


def _cudnn_hopper() -> list[KernelSpeed]:
    """Return cuDNN of heads of 128, and of 64."""
    rows = _magi("cudnn", _CUDNN_HOPPER)
    slower = [
        replace(
            x, head_dim=64, forward=_slower(x.forward, ahead), backward=_slower(x.backward, back)
        )
        for x in rows
        for ahead, back in (CUDNN_64,)
    ]
    return [*rows, *slower]


def _slower(curve: Curve, part: float) -> Curve:
    """Return a curve of a part of the speed; the smallest launch takes as long."""
    first, *seconds = curve.seconds
    return Curve(curve.sizes, (first, *(x / part for x in seconds)))


def _flash3() -> tuple[KernelSpeed, ...]:
    return tuple(
        _speed(
            "flash_attn3",
            form,
            _kernel(form, CHART, TOKENS, ahead),
            _backward(form, MAGI, MAGI_TOKENS, back),
        )
        for form, ahead, back in _FLASH3
    )


def _collective(ranks: int, small: float, *micros: float) -> Curve:
    """Return seconds by bytes that a rank sends, from a table of nccl-tests.

    Args:
        ranks: ranks of the test.
        small: microseconds of 64 KiB.
        *micros: microseconds of 1, 4, 16, 64 and 256 MiB, the size that nccl-tests prints.
    """
    sizes = (2**16, *(x * 2**20 for x in MEGABYTES))
    sent = tuple(size * (ranks - 1) / ranks for size in sizes)
    return Curve(sent, tuple(x * MICRO for x in (small, *micros)))


def _between(gigabits: float) -> Links:
    """Return links between hosts, with a port of each device."""
    port = gigabits / 8 * GIGA
    exchange = Curve.line(BETWEEN_LATENCY, port * EXCHANGE_PART)
    p2p = Curve.line(BETWEEN_LATENCY, port * P2P_PART)
    return Links(p2p, exchange, exchange, exchange)


def _machine(
    name: str,
    device: str,
    memory: int,
    memory_rate: float,
    gemm: Mapping[str, float],
    kernels: Sequence[KernelSpeed],
    inside: Links,
    gigabits: float,
    element_rate: float = 0.0,
) -> Machine:
    """Return a preset: 8 devices of a host, and a port of each of them to other hosts."""
    reached = STREAM * memory_rate
    stream = Curve.line(SMALLEST, reached)
    return Machine(
        name=name,
        device=device,
        source="data sheet",
        ranks_per_host=8,
        memory=memory,
        kernels=tuple(kernels),
        gemm=gemm,
        memory_rate=reached,
        merge=stream,
        pack=stream,
        inside=inside,
        between=_between(gigabits),
        beside_transfer=BESIDE_TRANSFER,
        element_rate=element_rate,
        launch=LAUNCH,
        hop=HOP,
        date="2026-11-26",
    )


# aiconfigurator: <gpu>/comm/nccl, 2.27.3 (A100) and 2.29.2, "half": microseconds of `alltoall` of 2
# ranks, where each sends half of the size, which is a message between two; and of `alltoall`,
# `all_gather` and `reduce_scatter` of 8 ranks.
_NCCL_A100 = (
    (13.9, 22.8, 38.2, 98.3, 243.0, 844.5),
    (14.2, 25.8, 64.3, 114.3, 347.6, 1197.9),
    (21.1, 26.8, 48.0, 135.0, 351.6, 1216.8),
    (18.0, 23.4, 52.0, 123.4, 327.2, 1149.5),
)
_NCCL_H100 = (
    (12.0, 14.8, 21.2, 53.0, 139.8, 494.7),
    (8.7, 15.6, 26.2, 75.7, 221.3, 763.9),
    (13.1, 17.1, 33.4, 68.9, 208.1, 728.8),
    (11.7, 14.6, 29.9, 69.7, 200.8, 721.7),
)
_NCCL_H200 = (
    (11.5, 13.5, 19.8, 51.8, 137.2, 470.3),
    (12.1, 16.2, 26.6, 73.4, 219.1, 770.8),
    (13.1, 17.0, 41.3, 66.9, 206.3, 725.9),
    (13.0, 14.4, 30.4, 69.5, 198.8, 716.3),
)
# Its `all_gather` of 1 MiB takes 18.7 us, less than that of 64 KiB.
_NCCL_B200 = (
    (13.6, 16.7, 21.8, 49.0, 126.9, 420.8),
    (13.4, 18.8, 26.5, 50.1, 138.8, 437.7),
    (19.5, 19.5, 29.2, 103.9, 137.5, 393.1),
    (19.9, 20.4, 27.2, 97.0, 136.2, 396.0),
)


def _nvlink(micros: Sequence[Sequence[float]]) -> Links:
    """Return links of one host, from tables of nccl-tests."""
    p2p, *collectives = micros
    return Links(_collective(2, *p2p), *(_collective(8, *x) for x in collectives))


def _xgmi() -> Links:
    """Return links of MI300X: 48 GB/s for each of 7 links of a device.

    That is from the blog of ROCm, "Understanding RCCL bandwidth and xGMI performance on AMD
    Instinct MI300X". One link works in a message, all of them in a collective. Latency is as of
    A100.
    """
    collective = Curve.line(14 * MICRO, 7 * 48 * GIGA)
    return Links(Curve.line(14 * MICRO, 48 * GIGA), collective, collective, collective)


# GEMMs: medians of all of 137 GFLOP and more in aiconfigurator: <gpu>/gemm/trtllm. MI300X reaches
# 45 % of 1,307 and 2,615 TFLOP/s (aiweekly.co, as above).


def _a100() -> Machine:
    return _machine(
        "a100",
        "NVIDIA A100-SXM4-80GB",
        80 * 2**30,
        2.039 * TERA,
        {"bfloat16": 260 * TERA},
        _flash2_ampere(),
        _nvlink(_NCCL_A100),
        gigabits=200,  # DGX A100: ConnectX-6
        element_rate=INDEXED_AMPERE,
    )


def _h100() -> Machine:
    return _machine(
        "h100",
        "NVIDIA H100 80GB HBM3",
        80 * 2**30,
        3.35 * TERA,
        {"bfloat16": 752 * TERA, "float8_e4m3fn": 1200 * TERA},
        (*_flash3(), *_cudnn_hopper(), *_flash2_hopper()),
        _nvlink(_NCCL_H100),
        gigabits=400,  # DGX H100: ConnectX-7
        element_rate=INDEXED_HOPPER,
    )


def _h200() -> Machine:
    return _machine(
        "h200",
        "NVIDIA H200",
        141 * 10**9,
        4.8 * TERA,
        {"bfloat16": 753 * TERA, "float8_e4m3fn": 1228 * TERA},
        _h100().kernels,  # the same multiprocessors
        _nvlink(_NCCL_H200),
        gigabits=400,
        element_rate=INDEXED_HOPPER,
    )


def _h800() -> Machine:
    """Return H100 with less NVLink: 158 GB/s (DeepEP's README, intranode); latency as of H100."""
    link = Curve.line(12 * MICRO, 158 * GIGA)
    links = Links(link, link, link, link)
    return replace(_h100(), name="h800", device="NVIDIA H800", inside=links)


def _b200() -> Machine:
    return _machine(
        "b200",
        "NVIDIA B200",
        180 * 10**9,
        7.7 * TERA,
        {"bfloat16": 1473 * TERA, "float8_e4m3fn": 2316 * TERA},
        (*_magi("flash_attn4", _FLASH4, MAGI_TOKENS[1:]), *_magi("cudnn", _CUDNN_BLACKWELL)),
        _nvlink(_NCCL_B200),
        gigabits=400,  # DGX B200: ConnectX-7
    )


def _mi300x() -> Machine:
    return _machine(
        "mi300x",
        "AMD Instinct MI300X",
        192 * 10**9,
        5.3 * TERA,
        {"bfloat16": 0.45 * 1307 * TERA, "float8_e4m3fn": 0.45 * 2615 * TERA},
        _magi("any", _AITER, MAGI_TOKENS[:5]),
        _xgmi(),
        gigabits=400,
    )


PRESETS: Mapping[str, Machine] = {
    x.name: x for x in (_a100(), _h100(), _h200(), _h800(), _b200(), _mi300x())
}
"""Machines by name, each with 8 devices of a host and one network port of each device."""


def is_machine_file(path: Path) -> bool:
    """Return whether a file is that of a machine, of this version or of another one."""
    try:
        content = read_json(path, str(path))
    except ValueError:
        return False
    return isinstance(content, dict) and {"schema", "ranks_per_host", "gemm"} <= content.keys()
