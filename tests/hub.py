"""A stand-in for the `kernels` package, and for the builds that it downloads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

REPOSITORIES = {"kernels-community/flash-attn2": 3, "kernels-community/flash-attn3": 1}
"""The versions whose functions the stand-ins have."""

OPERATORS = "_flash_attn3_cuda_ab12cd3"
"""The namespace of a build: it ends in the hash of its sources."""

SIGNATURE = (
    "repo_id, *, revision=None, version=None, backend=None, user_agent=None, "
    "trust_remote_code=False, check_arch=True"
)
"""Of `get_kernel` in kernels 0.17.2."""

VARLEN = (
    "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, "
    "causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, "
    "return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False"
)
"""Of the function over segments, which differs from that of the flash-attn package."""


class Hub:
    """The builds that can be downloaded, and the requests that were made.

    Attributes:
        asked: repositories, each time one is asked for.
        error: raised instead of a download.
    """

    def __init__(self, builds: dict[str, ModuleType]) -> None:
        self._builds = builds
        self.asked: list[str] = []
        self.error: Exception | None = None

    def get_kernel(self, given: dict[str, Any]) -> ModuleType:
        """Called with the arguments of `get_kernel`, by name."""
        self.asked.append(given["repo_id"])
        if self.error is not None:
            raise self.error
        # The real one wants exactly one of both.
        assert (given["revision"] is None) != (given["version"] is None)
        assert given["version"] == REPOSITORIES[given["repo_id"]]
        assert not given["trust_remote_code"]
        return self._builds[given["repo_id"]]


@contextmanager
def builds(
    flash2: dict[str, Callable[..., Any]], flash3: dict[str, tuple[str, Callable[..., Any]]]
) -> Iterator[dict[str, ModuleType]]:
    """Modules as `get_kernel` returns them.

    Args:
        flash2: functions of flash attention 2, by name.
        flash3: schemas and implementations of its operators.
    """
    library = torch.library.Library(OPERATORS, "DEF")
    for name, (schema, run) in flash3.items():
        library.define(f"{name}{schema}")
        library.impl(name, run, "CPU")
    second, third = ModuleType("flash_attn2_ab12cd3"), ModuleType("flash_attn3_ab12cd3")
    second.flash_attn_interface = SimpleNamespace(**flash2)  # type: ignore[attr-defined]
    third._ops = SimpleNamespace(ops=getattr(torch.ops, OPERATORS))  # type: ignore[attr-defined]
    yield dict(zip(REPOSITORIES, (second, third), strict=True))
    library._destroy()


def package(hub: Hub) -> ModuleType:
    """The module `kernels`."""
    found = ModuleType("kernels")
    bind = eval(f"lambda {SIGNATURE}: locals()")
    found.get_kernel = lambda *args, **kwargs: hub.get_kernel(bind(*args, **kwargs))  # type: ignore[attr-defined]
    return found
