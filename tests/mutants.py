"""Small wrong changes of the core, and whether tests notice: `make mutants`.

Each row of `MUTANTS` is tried on a copy of the package, by the tests of its file. One that survives
stands for a mistake that nobody would notice: it wants a test.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import sys
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parent.parent
PACKAGE = "dtensor_ring"
SECONDS = 900
"""After which the tests of a mutant hang, which notices it, too."""
OF = {
    "planning/tile.py": "tile route",
    "planning/slices.py": "slices mask",
    "planning/layout.py": "layout",
    "planning/demand.py": "demand route",
    "planning/route.py": "route",
    "planning/plan.py": "plan route cache layout ../all_to_all/ulysses ../all_to_all/plan",
    "planning/intervals.py": "tile",
    "planning/block_order.py": "block_order ../numerics",
    "planning/run_table.py": "layout ../balanced/balanced ../ops/check",
    "planning/sweep.py": "demand slices route ../balanced/balanced plan",
    "planning/ranges.py": "tile slices demand layout ../balanced/balanced",
    "planning/builders.py": "slices",
    "compute/merge.py": "merge whole_step memory merge_triton",
    "compute/accumulate.py": "merge gradient traffic",
    "compute/execute.py": "segments whole_step",
    "compute/memory.py": "memory segments ../ops/op ../ops/dropout",
    "compute/ordered.py": "gradient ../numerics",
    "transport/rotation.py": "rotation process_group streams ../played",
    "transport/quantised_rotation.py": "rotation process_group",
    "transport/transport.py": "process_group ../agreement/record_group",
    "agreement/checked_transport.py": "checked_transport record_group ../decode/decode_messages",
    "agreement/call_record.py": "record_group checked_transport",
    "ring.py": "played numerics",
    "balanced/balanced.py": "balanced",
    "balanced/work.py": "balanced",
    "quantised/block_scales.py": "kept_tokens",
    "quantised/kept_tokens.py": "kept_tokens",
    "decode/plan.py": "decode cache decode_op",
    "paged/block_pool.py": "block_pool",
    "all_to_all/plan.py": "plan ulysses",
    "dtensor/token_index.py": "../border/operations",
}
"""The tests of a file, which are in its folder of `tests`, `test_` left out."""
MUTANTS = [
    ("planning/tile.py", "near[:, 1] > run.start", "near[:, 1] > run.start + 1"),
    ("planning/tile.py", "key.length > 1:", "key.length >= 1:"),
    ("planning/tile.py", "min(num_rows, num_cols + left)", "min(num_rows, num_cols + left + 1)"),
    ("planning/tile.py", "left - shift >= num_rows - 1", "left - shift >= num_rows - 2"),
    ("planning/tile.py", "num_rows + right >= 2 * num_cols", "num_rows + right > 2 * num_cols"),
    ("planning/tile.py", "if last.cols == tile.cols and", "if last.cols <= tile.cols and"),
    ("planning/slices.py", "meet = (lowest <= highest)", "meet = (lowest < highest)"),
    ("planning/slices.py", "ahead = by - key_by", "ahead = by + key_by"),
    ("planning/slices.py", "(later[:, :4] < 0)", "(later[:, :4] <= 0)"),
    ("planning/layout.py", "return first, max(first, last)", "return first, min(first, last)"),
    ("planning/layout.py", "(world_size - 1) * chunk + 1)", "(world_size - 1) * chunk)"),
    (
        "planning/layout.py",
        "np.where(strides > 1, 1, lengths)",
        "np.where(strides >= 1, 1, lengths)",
    ),
    ("planning/demand.py", "first = source + stage.last + 1", "first = source + stage.last"),
    ("planning/demand.py", "owners[key] != self", "owners[key] == self"),
    (
        "planning/demand.py",
        "np.maximum(0, first_row - left)",
        "np.maximum(0, first_row - left + 1)",
    ),
    ("planning/route.py", "range(num_hops + 1)]", "range(num_hops)]"),
    ("planning/route.py", "source = (sender - step) %", "source = (sender + step) %"),
    (
        "planning/route.py",
        "(self.rank - step) % self.world_size, step, -step",
        "(self.rank + step) % self.world_size, step, -step",
    ),
    ("planning/plan.py", "group * owners.heads + member", "group * owners.heads - member"),
    ("planning/plan.py", "if strategy.heads == 1:", "if strategy.heads != 1:"),
    ("planning/intervals.py", "(min(alone), max(alone) + 1)", "(min(alone), min(alone) + 1)"),
    ("planning/intervals.py", "begin - origin[1]", "begin + origin[1]"),
    ("planning/block_order.py", "if not cols or not own:", "if not cols and not own:"),
    (
        "planning/block_order.py",
        "is_one and covered[1] == whole[1]",
        "is_one or covered[1] == whole[1]",
    ),
    ("planning/run_table.py", "starts[1:] < ends[:-1]", "starts[1:] <= ends[:-1]"),
    ("planning/run_table.py", "if self.begin > begin:", "if self.begin >= begin:"),
    ("planning/sweep.py", 'keys.ends - lags, "left"', 'keys.ends + lags, "left"'),
    ("planning/sweep.py", "np.clip(table[:, 4:], -line, line)", "np.clip(table[:, 4:], 0, line)"),
    ("planning/ranges.py", "cuts[at + 1] - ids * line", "cuts[at + 1] + ids * line"),
    ("planning/builders.py", ".right != 0:", ".right == 0:"),
    ("compute/merge.py", "(so_far - lse).sigmoid_()", "(so_far + lse).sigmoid_()"),
    ("compute/merge.py", "weight.max().item() <= MAX_WEIGHT", "weight.max().item() >= MAX_WEIGHT"),
    ("compute/merge.py", "later[-1][0] <= first:", "later[-1][0] < first:"),
    ("compute/merge.py", "if span[1] > first]", "if span[1] >= first]"),
    ("compute/merge.py", "target.dtype == wide and not", "target.dtype == wide or not"),
    ("compute/merge.py", "not others and scale is None", "not others or scale is None"),
    ("compute/accumulate.py", "or not (is_last or first", "or not (is_last and first"),
    ("compute/accumulate.py", ".view(1, -1, 1) - saved.lse)", ".view(1, -1, 1) + saved.lse)"),
    (
        "compute/execute.py",
        "length(x.rows) == length(x.cols) for x in (last, tile)",
        "length(x.rows) != length(x.cols) for x in (last, tile)",
    ),
    (
        "compute/memory.py",
        "x.start + x.length * x.stride, x.stride",
        "x.start + x.length, x.stride",
    ),
    (
        "compute/ordered.py",
        "(self.total * ours).add_(other.total * theirs)",
        "(self.total * ours).add_(other.total * ours)",
    ),
    (
        "compute/ordered.py",
        "masked_fill_(saved.lse == -torch.inf",
        "masked_fill_(saved.lse != -torch.inf",
    ),
    ("transport/rotation.py", "if source == self._rank:", "if source == -1:"),
    ("transport/rotation.py", "but=packets)", "but=())"),
    ("transport/rotation.py", "kv_dtype or shard[0].dtype", "shard[0].dtype"),
    (
        "transport/quantised_rotation.py",
        "self._own if source == self._rank",
        "self._own if source != self._rank",
    ),
    ("transport/transport.py", "dtype is None or dtype in QUANTISED", "dtype in QUANTISED"),
    ("agreement/checked_transport.py", "first_bytes <= MAX_PAYLOAD", "first_bytes > MAX_PAYLOAD"),
    (
        "agreement/call_record.py",
        "if not (one[name] and other[name]):",
        "if not (one[name] or other[name]):",
    ),
    ("agreement/call_record.py", "or waited >= 0.99 * limit", "and waited >= 0.99 * limit"),
    ("ring.py", "step.number - 1, label)", "step.number, label)"),
    ("ring.py", "if plan.rank != first:", "if plan.rank == first:"),
    (
        "ring.py",
        "        if step.number:\n            grad_kv",
        "        if not step.number:\n            grad_kv",
    ),
    ("balanced/balanced.py", "self.seq_len // (32 * self.world_size)", "self.seq_len // 32"),
    (
        "balanced/balanced.py",
        "partition.max_runs > self._max_runs",
        "partition.max_runs >= self._max_runs",
    ),
    ("balanced/work.py", "owners[1:] != owners[:-1]", "owners[1:] == owners[:-1]"),
    (
        "quantised/block_scales.py",
        "(blocks - means.float()) * is_token",
        "(blocks - means.float())",
    ),
    (
        "quantised/kept_tokens.py",
        "min(begin + step, self._num_closed)",
        "min(begin + step - 1, self._num_closed)",
    ),
    ("decode/plan.py", "before[0] + before[1] == start", "before[0] + before[1] != start"),
    (
        "decode/plan.py",
        "max(self.starts, default=0) + self.num_queries",
        "max(self.starts, default=0)",
    ),
    ("paged/block_pool.py", "-(-length // self.dealing.block)", "length // self.dealing.block + 1"),
    ("paged/block_pool.py", "last + is_kept, self", "last, self"),
    ("all_to_all/plan.py", "member * num_key_heads // num_ranks", "member // num_ranks"),
    ("dtensor/token_index.py", "range(start, start + length)", "range(start, start + length + 1)"),
]
"""A file of the package, a piece of it that occurs once, and what stands there instead."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="only files whose path has this")
    given = parser.parse_args()
    importlib.import_module("torch._inductor")  # processes inherit what all tests import first
    survivors, num_tried = [], 0
    for file, old, new in MUTANTS:
        if file.startswith(given.only):
            killed = _is_killed(file, old, new)
            num_tried += 1
            survivors += [] if killed else [file]
            print("killed  " if killed else "SURVIVED", f"{file}: {old} -> {new}", flush=True)
    print(f"{num_tried - len(survivors)} of {num_tried} mutants were killed")
    sys.exit(bool(survivors))


def _is_killed(file: str, old: str, new: str) -> bool:
    with TemporaryDirectory() as folder:
        copy = Path(folder, PACKAGE)
        shutil.copytree(ROOT / PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        text = (copy / file).read_text()
        (copy / file).write_text(text.replace(old, new))
        child = get_context("fork").Process(target=_run, args=(folder, files_of(file)))
        child.start()
        child.join(SECONDS)
        if child.is_alive():
            os.killpg(child.pid, signal.SIGKILL)
            child.join()
        return child.exitcode != 0


def files_of(file: str) -> list[str]:
    folder = (ROOT / "tests" / file).parent
    return [
        str(folder / Path(name).parent / f"test_{Path(name).name}.py") for name in OF[file].split()
    ]


def _run(folder: str, tests: list[str]) -> None:
    """Run tests against the package of a folder, without output."""
    import pytest

    sys.path.insert(0, folder)
    importlib.import_module(PACKAGE)  # before pytest puts the checkout first
    os.setsid()  # a process group, which can be ended as a whole
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
    os._exit(int(code))


if __name__ == "__main__":
    main()
