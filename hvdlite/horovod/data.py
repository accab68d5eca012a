"""``horovod.data``: data loaders that read ahead in a thread."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

_SECONDS_TO_STOP = 10.0


class BaseDataLoader:
    """A loader of batches; a subclass defines ``_iterate`` and ``__len__``."""

    def __len__(self) -> int:
        """Return the number of batches."""
        raise NotImplementedError(f"{type(self).__name__} lacks __len__")

    def _iterate(self) -> Iterable[Any]:
        """Return an iterator over the batches of one pass."""
        raise NotImplementedError(f"{type(self).__name__} lacks _iterate")

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """Process a batch in the thread that uses it, and return the result."""
        return batch


class AsyncDataLoaderMixin:
    """Read a loader's batches ahead in a thread; put it before the loader among the bases.

    Unlike in Horovod, each pass has a thread of its own: batches that an abandoned pass has read
    ahead are not part of the next one, and nothing is printed.

    Args:
        async_loader_queue_size: Batches to read ahead; 0: none, and no thread.
        debug_data_loader: Without effect.
        args: The loader's own arguments.
        kwargs: The loader's own keyword arguments.

    Example::

        class Loader(AsyncDataLoaderMixin, FileLoader):
            pass

        for batch in Loader(async_loader_queue_size=8, path="train"):
            ...
    """

    _iterate: Callable[[], Iterable[Any]]
    _process_batch: Callable[[Any], Any]

    def __init__(
        self,
        async_loader_queue_size: int = 64,
        debug_data_loader: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self.debug_data_loader = debug_data_loader
        self._readers: weakref.WeakSet[_Reader] = weakref.WeakSet()
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End all running passes and their threads."""
        for reader in list(self._readers):
            reader.stop()
            reader.thread.join(_SECONDS_TO_STOP)

    def __iter__(self) -> Iterator[Any]:
        if self.async_loader_queue_size <= 0:
            for batch in self._iterate():
                yield self._process_batch(batch)
            return
        reader = _Reader(self._iterate, self.async_loader_queue_size)
        self._readers.add(reader)
        try:
            for batch in reader:
                yield self._process_batch(batch)
        finally:
            reader.stop()


class _Reader:
    """A thread that reads ahead, and an iterator over the items it has read.

    Args:
        source: Called in the thread, which iterates over the result.
        size: The maximal number of items read ahead.
    """

    def __init__(self, source: Callable[[], Iterable[Any]], size: int) -> None:
        self._source = source
        self._size = size
        self._ready: deque[Any] = deque()
        self._failure: BaseException | None = None
        self._ended = False
        self._changed = threading.Condition()
        self.thread = threading.Thread(target=self._read, name="hvdlite data", daemon=True)
        self.thread.start()

    def __iter__(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._ended)
                if not self._ready:
                    break
                item = self._ready.popleft()
                self._changed.notify_all()
            yield item
        if self._failure is not None:
            raise self._failure

    def stop(self) -> None:
        """Have the thread end as soon as its source returns, and the iterator now."""
        with self._changed:
            self._ended = True
            self._ready.clear()
            self._changed.notify_all()

    def _read(self) -> None:
        try:
            for item in self._source():
                with self._changed:
                    self._changed.wait_for(lambda: self._ended or len(self._ready) < self._size)
                    if self._ended:
                        return
                    self._ready.append(item)
                    self._changed.notify_all()
        except BaseException as error:  # raised by the iterator
            self._failure = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()
