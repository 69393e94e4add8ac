"""An LRU cache that is bounded by the bytes of its values."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import update_wrapper
from threading import Lock
from typing import Generic, TypeVar

T = TypeVar("T")


class _Entry(Generic[T]):
    """A value, its bytes, and when it was used last, in a count of uses."""

    __slots__ = "num_bytes", "used", "value"

    def __init__(self, value: T, num_bytes: int, used: int) -> None:
        self.value, self.num_bytes, self.used = value, num_bytes, used


class ByteStore(Generic[T]):
    """Keeps the most recently used values by their keys, up to a number of bytes.

    It is thread safe. A value larger than the bound is not kept, so it evicts nothing.

    Args:
        max_bytes: bound on the sum of the sizes of the kept values.
        size_of: estimates the size of a value, in bytes.
    """

    def __init__(self, max_bytes: int, size_of: Callable[[T], int]) -> None:
        self.max_bytes = max_bytes
        self._size_of = size_of
        self._kept: dict[Hashable, _Entry[T]] = {}
        self._num_bytes = self._num_uses = 0
        self._lock = Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of all kept values."""
        return self._num_bytes

    def clear(self) -> None:
        """Forget all values."""
        with self._lock:
            self._kept.clear()
            self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> T | None:
        """Return the value of a key, or `None` if it is not kept."""
        with self._lock:
            entry = self._kept.get(key)
            if entry is None:
                return None
            # A count, since moving a key in an ordered dict hashes it once more: a plan has a
            # mask, layouts and boundaries.
            self._num_uses += 1
            entry.used = self._num_uses
            return entry.value

    def put(self, key: Hashable, value: T, key_bytes: int = 0) -> T:
        """Keep a value, which replaces the one that the key had, and return it."""
        # Outside of the lock: an estimate may walk through the value.
        size = self._size_of(value) + key_bytes
        with self._lock:
            if key in self._kept:
                self._drop(key)
            # A value that is too large would evict all others, and then itself.
            if size <= self.max_bytes:
                self._num_uses += 1
                self._kept[key] = _Entry(value, size, self._num_uses)
                self._num_bytes += size
            if self._num_bytes > self.max_bytes:
                self._evict()
        return value

    def _evict(self) -> None:
        """Forget the values that were not used for longest, until the others leave some room.

        All are put in order, which a full store must not do for each value.
        """
        room = self.max_bytes // 8
        for key in sorted(self._kept, key=lambda key: self._kept[key].used):
            if self._num_bytes <= self.max_bytes - room:
                break
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._num_bytes -= kept.num_bytes


class ByteCache(ByteStore[T]):
    """A function that keeps its most recently used results, up to a number of bytes.

    If two threads miss at the same time, both compute, and the last result is kept.

    Args:
        function: takes hashable arguments and has no side effects; a result is never `None`.
        max_bytes: bound on the sum of the sizes of the kept results.
        size_of: estimates the size of a result, in bytes.
    """

    def __init__(
        self, function: Callable[..., T], max_bytes: int, size_of: Callable[[T], int]
    ) -> None:
        super().__init__(max_bytes, size_of)
        update_wrapper(self, function)
        self._function = function

    def __call__(self, *args: Hashable, **kwargs: Hashable) -> T:
        key: Hashable = (args, *kwargs.items()) if kwargs else args
        found = self.get(key)
        if found is not None:
            return found
        # Outside of the lock: a plan may take seconds, and may call this cache itself.
        value = self._function(*args, **kwargs)
        # Boundaries and tables of runs are kept as part of the key, and can be most of an entry.
        num_bytes = 0
        for x in args:
            num_bytes += getattr(x, "num_bytes", 0)
        return self.put(key, value, num_bytes)


def cached_bytes(
    max_bytes: int, num_bytes: Callable[[T], int]
) -> Callable[[Callable[..., T]], ByteCache[T]]:
    """Decorate a function with a `ByteCache`.

    >>> @cached_bytes(max_bytes=100, num_bytes=len)
    ... def zeros(size):
    ...     return bytes(size)
    >>> zeros(60) is zeros(60), zeros(101) is zeros(101), zeros.num_bytes
    (True, False, 60)
    """
    return lambda function: ByteCache(function, max_bytes, num_bytes)
