"""FLOPs per second of devices by their data sheets, which MFU is a part of."""

from __future__ import annotations

from dtensor_ring.simulate.machine import Machine
from dtensor_ring.simulate.training.layer_seconds import gemm_rate

TERA = 1e12

# Dense matrix products in bfloat16 and in FP8, of the data sheets of NVIDIA A100, H100, H200 and
# B200 (DGX B200: 36 and 72 PFLOP/s of 8, with sparsity or FP8) and of AMD MI300X; FP8 of A100 is
# none. H800 is H100 with fewer links.
DENSE = (
    ("A100", 312 * TERA, 0.0),
    ("H100", 989 * TERA, 1979 * TERA),
    ("H800", 989 * TERA, 1979 * TERA),
    ("H200", 989 * TERA, 1979 * TERA),
    ("B200", 2250 * TERA, 4500 * TERA),
    ("MI300X", 1307 * TERA, 2615 * TERA),
)


def peak_flops(machine: Machine, dtype: str) -> float:
    """Return the FLOPs per second that MFU is a part of.

    Args:
        machine: the machine. Of a device without a row here, and for other dtypes, it is what
            matrix products reach.
        dtype: of matrix products.

    Raises:
        ValueError: if the machine has no speed for the dtype.

    >>> from dtensor_ring.simulate.machine_files import as_machine
    >>> peak_flops(as_machine("h100"), "bfloat16") / 1e12
    989.0
    """
    half, eight = next((x for name, *x in DENSE if name in machine.device), (0.0, 0.0))
    found = {"bfloat16": half, "float16": half, "float8_e4m3fn": eight}
    return found.get(dtype) or gemm_rate(machine, dtype)
