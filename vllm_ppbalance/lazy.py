"""A sequence that is read when somebody looks at it. vLLM-free."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Lazy(Sequence[T], Generic[T]):
    """A sequence read on first use, so that a policy pays only for what it reads.

    `iterate(*args, reverse)` yields the items from either end; a walk reads no further than it
    goes, and only an index or a length keeps what was read.
    """

    __slots__ = ("_args", "_items", "_iterate")

    def __init__(self, iterate: Callable[..., Iterator[T]], *args: Any) -> None:
        self._iterate = iterate
        self._args = args
        self._items: Sequence[T] | None = None

    def _get(self) -> Sequence[T]:
        if self._items is None:
            self._items = list(self._iterate(*self._args, False))
        return self._items

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._get()[index]

    def __len__(self) -> int:
        return len(self._get())

    def __iter__(self) -> Iterator[T]:
        return self._iterate(*self._args, False) if self._items is None else iter(self._items)

    def __reversed__(self) -> Iterator[T]:
        if self._items is None:
            return self._iterate(*self._args, True)
        return reversed(self._items)
