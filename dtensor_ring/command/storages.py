"""The bytes of the storages that ops make, while they live."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any
from weakref import ref

from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class Storages(TorchDispatchMode):
    """As a context, it counts what ops make; tensors on the meta device count as if they were real.

    Attributes:
        alive: bytes of the storages that somebody still holds.
        peak: the most bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._held: dict[int, ref[UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(result, {x._cdata for x in storages_of([args, kwargs])})
        return result

    def count(self, tree: Any, given: Collection[int] = ()) -> None:
        """Count the storages of these tensors, each once, until nobody holds them any more.

        Args:
            tree: nested lists and tuples of tensors.
            given: storages that are not counted, by their `_cdata`, as a view makes none.
        """
        for storage in storages_of(tree):
            key, size = storage._cdata, storage.nbytes()
            if key in self._held or key in given:
                continue

            def gone(_: object, key: int = key, size: int = size) -> None:
                del self._held[key]
                self.alive -= size

            self._held[key] = ref(storage, gone)
            self.alive += size
        self.peak = max(self.peak, self.alive)

    def held(self, tree: Any) -> dict[int, ref[UntypedStorage]]:
        """References to the storages of these tensors that were counted, by their own identity.

        A `_cdata` names another storage once its own is gone: so it is no name to be kept.
        """
        found = [self._held.get(storage._cdata) for storage in storages_of(tree)]
        return {id(x): x for x in found if x is not None}


def storages_of(tree: Any) -> Iterator[UntypedStorage]:
    """The storages of the tensors in nested lists and tuples; of a DTensor, that of its shard."""
    for x in tree_leaves(tree):
        if is_traceable_wrapper_subclass(x):
            names, _ = x.__tensor_flatten__()
            yield from storages_of([getattr(x, name) for name in names])
        elif isinstance(x, Tensor):
            yield x.untyped_storage()
