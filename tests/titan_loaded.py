"""torchtitan, set to the CPU and imported: what the worker processes of its tests begin with."""

from __future__ import annotations

import warnings

from examples.torchtitan_cpu import use_cpu

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchtitan's own, as it is imported
    use_cpu()
    import torchtitan.trainer

    import parallel_plans.torchtitan
    import tests.titan_dense

__all__ = ["parallel_plans", "tests", "torchtitan"]
