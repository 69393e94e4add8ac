"""Compares what all ranks of a model need alike: batches in each forward, the model in some."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import isclose, isnan
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, ref
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtensor_ring import SequenceAxis
from dtensor_ring.extension import (
    axis_group,
    check_agreement,
    checked_barrier,
    is_capturing,
    register_op,
)
from parallel_plans.huggingface.sharding.late_embeddings import LateEmbeddings

SAME_WEIGHTS = (
    "and have the same weights (seeded before the model is made, or loaded, and gradients averaged "
    "over them)"
)
SAME_BATCH = (
    "get the same batch (samplers and the seeds of random collators depend on the data-parallel "
    f"rank only) {SAME_WEIGHTS}"
)


def described(batch: Mapping[str, Any]) -> dict[str, str]:
    """Describe the batch, so that ranks can compare theirs."""
    return {name: described_value(x) for name, x in batch.items()}


class Parts(NamedTuple):
    """The arguments of a call, as an op can take them.

    Attributes:
        tensors: those that can be read, by name.
        numbers: integers, by name.
        others: descriptions of all else, by name.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]  # a compiler has symbols for them
    others: dict[str, str]

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> Parts:
        """Sort the arguments of a call."""
        parts = cls({}, {}, {})
        for name, x in batch.items():
            parts._add(name, x)
        return parts

    def _add(self, name: str, x: Any) -> None:
        if isinstance(x, (list, tuple)):
            for i, part in enumerate(x):
                self._add(f"{name}[{i}]", part)
        elif isinstance(x, LateEmbeddings):
            for key, part in x.parts.items():
                self._add(f"{name}.{key}", part)
        elif isinstance(x, Tensor) and is_readable(x):
            self.tensors[name] = x.detach()
        elif isinstance(x, (int, torch.SymInt)) and not isinstance(x, bool):
            self.numbers[name] = x
        else:
            self.others[name] = described_value(x)

    @property
    def described(self) -> dict[str, str]:
        """What ranks compare, by name."""
        tensors = {name: described_value(x) for name, x in self.tensors.items()}
        return tensors | {name: str(x) for name, x in self.numbers.items()} | self.others

    @property
    def text(self) -> str:
        """All but tensors and integers: their names, and what describes the others."""
        others = [f"{name}: {x}" for name, x in self.others.items()]
        return "\n".join([",".join(self.tensors), ",".join(self.numbers), *others])

    @classmethod
    def parse(cls, tensors: Sequence[Tensor], numbers: Sequence[int], text: str) -> Parts:
        """Return the parts with this text."""
        of_tensors, of_numbers, *others = text.split("\n")
        named = (line.partition(": ") for line in others)
        return cls(
            dict(zip(of_tensors.split(","), tensors, strict=False)),
            dict(zip(of_numbers.split(","), numbers, strict=False)),
            {name: x for name, _, x in named},
        )


# By key, for the op: an argument of a graph cannot be a model.
_AGREEMENTS: WeakValueDictionary[str, Agreement] = WeakValueDictionary()


# Note [Compared batches]: each forward sends a checksum of its batch, in one small message to all
# ranks, before the model runs. If checksums differ, the ranks compare descriptions, and all raise
# the same error. In a compiled graph this is one op, which has no gradient. It returns a zero that
# the numbers of tokens are computed from, so a compiler keeps it and runs it before the model. On a
# GPU the host would have to wait for the device to read a tensor there. So ranks compare shapes,
# and what is on the CPU, in each forward, and the content of other tensors where they compare the
# model.
class Agreement:
    """Compares the ranks of an axis: batches in each forward of a model, the model in a few.

    The model is compared in forwards with gradients number 1, 2, 4, 8, ...: the second check finds
    that gradients of the first were not averaged, later ones find it after accumulation. Without
    gradients weights do not change, so the first check is enough. To read all weights in each
    forward would be slow.
    """

    def __init__(self, axis: SequenceAxis, model: nn.Module) -> None:
        self._axis, self._model = axis, ref(model)
        self._num_agreed: Counter[bool] = Counter()  # forwards with gradients, and without
        self._reads_floats = True
        self.key = str(id(self))
        _AGREEMENTS[self.key] = self

    def check(self, model: nn.Module, batch: dict[str, Any]) -> None:
        """Compare the batch with the other ranks, and the model, if this forward is one to check.

        Raises:
            ValueError: on every rank, if their models or batches differ.
        """
        self.compare(model, Parts.of(batch), torch.is_grad_enabled())

    def check_in_graph(self, batch: dict[str, Any]) -> Tensor:
        """Do the same when a compiled graph runs; return a zero that depends on it."""
        parts, trains = Parts.of(batch), torch.is_grad_enabled()
        return _same_batch_op(
            [*parts.tensors.values()], [*parts.numbers.values()], parts.text, self.key, trains
        )

    def in_graph(self, parts: Parts, trains: bool) -> None:
        """Compare a batch of a compiled graph; see `check`."""
        self.compare(self._model(), parts, trains)

    def compare(self, model: nn.Module | None, parts: Parts, trains: bool) -> None:
        """Compare what a forward gets, and in some forwards the model that it is of."""
        if any(map(is_capturing, {x.device for x in parts.tensors.values()})):
            return  # compared in the call before the capture, see Note [CUDA graphs]
        if self.is_due(trains) and model is not None:
            self._compare_all(parts, facts(model, axis_group(self._axis.mesh)))
        elif self._axis.mesh.size() > 1:
            self._compare_checksums(parts)
        self.passed(trains)

    def is_due(self, trains: bool) -> bool:
        """Return whether the model is compared in this forward."""
        count = self._num_agreed[trains] + 1
        # Powers of two have one bit.
        return count.bit_count() == 1 if trains else count == 1

    def passed(self, trains: bool) -> None:
        """Count a forward in which the ranks agreed."""
        self._num_agreed[trains] += 1

    def _compare_all(self, parts: Parts, more: dict[str, str]) -> None:
        group = axis_group(self._axis.mesh)
        floats = {name: _moments(x) for name, x in parts.tensors.items() if _is_rounded(x)}
        told = check_agreement(group, parts.described | more, SAME_BATCH, told=floats)
        ranks = dist.get_process_group_ranks(group)
        for name, first in told[0].items():
            every = [x[name] for x in told]
            if not all(_are_close(first, x) for x in every):
                listed = ", ".join(f"{x} on [{rank}]" for x, rank in zip(every, ranks, strict=True))
                raise ValueError(
                    f"the ranks of a ring must {SAME_BATCH}, they differ in {name}: mean and mean "
                    f"size {listed}"
                )

    def _compare_checksums(self, parts: Parts) -> None:
        """Compare a few bytes; all ranks know from their sum whether any differ."""
        tensors = parts.tensors.values()
        if self._axis.mesh.device_type != "cpu" or any(map(attrgetter("is_cuda"), tensors)):
            with checked_barrier(axis_group(self._axis.mesh), "forward", _described_on_cpu(parts)):
                return
        words = torch.tensor(checksum_words(parts, self._reads_floats))
        sums, squares = self._axis.sum(torch.stack([words, words * words]))
        # Two sums are all that travels, and yet they tell whether any rank differs.
        # W numbers are equal if and only if W times the sum of squares is the square of their sum.
        if torch.equal(self._axis.mesh.size() * squares, sums * sums):
            return
        self._compare_all(parts, {})
        self._reads_floats = False  # they differ by rounding only, and so they will


def _same_batch(
    tensors: Sequence[Tensor], numbers: Sequence[int], text: str, key: str, trains: bool
) -> Tensor:
    agreement = _AGREEMENTS.get(key)
    if agreement is not None:
        agreement.in_graph(Parts.parse(tensors, numbers, text), trains)
    return _zero_like(tensors)


def _fake_same_batch(tensors: Sequence[Tensor], *others: Any) -> Tensor:
    return _zero_like(tensors)


def _zero_like(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_zeros((), dtype=torch.int64)


_same_batch_op = register_op(
    "same_batch",
    "(Tensor[] tensors, SymInt[] numbers, str text, str key, bool trains) -> Tensor",
    _same_batch,
    _fake_same_batch,
)


def is_readable(x: Tensor) -> bool:
    """Return whether a tensor has dense content to compare."""
    is_dense = x.layout is torch.strided and not x.is_nested and not isinstance(x, DTensor)
    return is_dense and not x.is_meta and not x.is_quantized


def described_value(x: Any) -> str:
    """Describe an argument of a forward, a tensor by its shape and a checksum of its content."""
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(map(described_value, x))}]"
    if not isinstance(x, Tensor):
        return repr(x) if isinstance(x, (bool, int, float, str)) else type(x).__name__
    if x.layout is not torch.strided or x.is_nested:
        return f"{x.layout} {x.dtype}"  # no shape, or no dense content
    kind = f"{x.dtype} {tuple(x.shape)}"
    if isinstance(x, DTensor):
        return f"DTensor {kind}"
    if x.is_meta or x.is_quantized:  # no content to compare
        return f"{x.device.type} {kind}"
    if _is_rounded(x):
        return kind
    return f"{kind} of checksum {checksum_of(x):08x}"


def _is_rounded(x: Tensor) -> bool:
    """Return whether a tensor holds computed values, which may differ in rounding."""
    return x.is_floating_point() or x.is_complex()


def _described_on_cpu(parts: Parts) -> dict[str, str]:
    """Describe all that the host can read without waiting for a device."""
    shapes = {name: f"{x.dtype} {tuple(x.shape)}" for name, x in parts.tensors.items() if x.is_cuda}
    here = {name: x for name, x in parts.tensors.items() if not x.is_cuda}
    return shapes | parts._replace(tensors=here).described


def checksum_of(x: Tensor) -> int:
    """Return a checksum of the content of a tensor, from its memory: nothing is copied."""
    return crc32(x.detach().cpu().contiguous().numpy().data)


def checksum_words(parts: Parts, reads_floats: bool) -> list[int]:
    """Return two numbers of 24 bits, so that squares of them can be summed over many ranks.

    Integers count by `checksum_of`, floating tensors by a sum of their bits.
    """
    lines = [parts.text, str([*parts.numbers.values()])]
    for x in parts.tensors.values():
        lines.append(f"{x.dtype} {tuple(x.shape)}")
        # Rounded numbers may differ in the last bits between ranks that computed the same.
        if not _is_rounded(x):
            lines.append(str(checksum_of(x)))
        elif reads_floats:
            lines.append(str(sum_of_bits(x).item()))
    text = "\n".join(lines).encode()
    return [crc32(text) & 0xFFFFFF, crc32(text, 1) & 0xFFFFFF]


def _moments(x: Tensor) -> tuple[float, float]:
    """Return the mean and the mean size of a floating tensor."""
    wide = x.detach().double()
    return float(wide.mean().real), float(wide.abs().mean())


def _are_close(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether means are equal but for rounding; NaN equals NaN."""
    # Rounding moves a mean by far less, and other content by far more, than a hundredth.
    limit = 1e-2 * max(one[1], other[1])
    pairs = zip(one, other, strict=True)
    return all(isclose(x, y, abs_tol=limit) or (isnan(x) and isnan(y)) for x, y in pairs)


def facts(model: nn.Module, group: dist.ProcessGroup) -> dict[str, str]:
    """Return the facts that the ranks' models must have in common, for `check_agreement`."""
    buffers = [x for x in model.buffers() if _is_plain(x)]
    numbers = {"config": numbers_of_config(model), "modules": numbers_of_modules(model)}
    return {"weights": checksum(_comparable(model, group)), "buffers": checksum(buffers)} | numbers


def numbers_of_config(model: Any) -> str:
    """Return all numbers of a model's config, by name; `""` without one."""
    config = getattr(model, "config", None)
    return "" if config is None else ", ".join(_numbers(config.to_dict(), ""))


def _numbers(x: Any, name: str) -> Iterator[str]:
    items = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else None
    if items is not None:
        for key, part in items:
            yield from _numbers(part, f"{name}.{key}" if name else str(key))
    elif isinstance(x, (int, float)) and not isinstance(x, bool):
        yield f"{name}={x}"


def numbers_of_modules(model: nn.Module) -> str:
    """Return the floating numbers that modules have as attributes, such as the eps of norms.

    Modules of one class with the same number are counted.
    """
    found = Counter(
        f"{type(module).__name__}.{name}={x}"
        for module in model.modules()
        for name, x in vars(module).items()
        if type(x) is float
    )
    return ", ".join(f"{text} ({count})" for text, count in sorted(found.items()))


def checksum(tensors: Iterable[Tensor]) -> str:
    """Return a checksum that is equal on two ranks if their tensors are equal.

    It combines the sum of the bits of each tensor, which is read once, as in a forward of a token.
    """
    sums = [sum_of_bits(x.detach()) for x in tensors]
    if not sums:
        return "none to compare"
    # Copy all sums to the host in one transfer.
    numbers = torch.stack([x.to(sums[0].device) for x in sums]).tolist()
    return f"checksum {crc32(repr(numbers).encode()):08x}"


def checksum_of_weights(model: nn.Module, group: dist.ProcessGroup) -> str:
    """Return the checksum of the weights that are not sharded over the ranks of a group."""
    return checksum(_comparable(model, group))


def _comparable(model: nn.Module, group: dist.ProcessGroup) -> list[Tensor]:
    """Return this rank's weights that should be equal on each rank of the group."""
    others, weights = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}, []
    for x in model.parameters():
        if isinstance(x, DTensor):
            # A weight that is sharded over ranks of the ring differs between them.
            if others & set(x.device_mesh.mesh.flatten().tolist()):
                continue
            x = x.to_local()
        if _is_plain(x):
            weights.append(x)
    return weights


def _is_plain(x: Tensor) -> bool:
    """Return whether a tensor stores its values as plain bits; a quantized one may not."""
    return type(x) in (Tensor, nn.Parameter, nn.Buffer) and not x.is_meta and not x.is_quantized


# Bytes that are summed as one integer.
WORD_BYTES = 8


def sum_of_bits(x: Tensor) -> Tensor:
    """Return the sum of the bits of a tensor, eight bytes at a time; it may overflow.

    The bits are summed as integers, so rounding and order have no effect.
    """
    flat = x.contiguous().view(-1).view(torch.uint8)
    # A view as int64 must begin at a multiple of its eight bytes.
    if flat.storage_offset() % WORD_BYTES:
        flat = flat.clone()
    end = flat.numel() // WORD_BYTES * WORD_BYTES
    # A sum of smaller integers would first convert the whole tensor to int64.
    return flat[:end].view(torch.int64).sum() + flat[end:].sum()
