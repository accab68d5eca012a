"""Loaders that read ahead."""

from __future__ import annotations

import threading

import pytest

from hvdlite.horovod.data import AsyncDataLoaderMixin, BaseDataLoader


class Numbers(BaseDataLoader):
    def __init__(self, end, log=None):
        self.end = end
        self.log = log

    def __len__(self):
        return self.end

    def _iterate(self):
        for number in range(self.end):
            if self.log is not None:
                self.log.append((number, threading.current_thread()))
            yield None if number == 1 else number
        if self.end == 5:
            raise KeyError("no such file")

    def _process_batch(self, batch):
        return batch, threading.current_thread() is threading.main_thread()


class Ahead(AsyncDataLoaderMixin, Numbers):
    pass


@pytest.mark.parametrize("size", [0, 1, 64])
def test_each_pass_has_all_batches(size):
    loader = Ahead(size, False, 4)
    for _ in range(2):
        assert list(loader) == [(0, True), (None, True), (2, True), (3, True)]
    assert list(Numbers(4)) == list(loader)
    assert len(loader) == 4
    loader.close_async_loader()


def test_no_more_is_read_ahead_than_was_asked_for():
    log = []
    loader = Ahead(async_loader_queue_size=2, end=100, log=log)
    batches = iter(loader)
    assert next(batches) == (0, True)
    loader.close_async_loader()
    assert len(log) <= 4  # taken, two ready, and one in the hand
    assert all(thread is not threading.main_thread() for _, thread in log)
    # A pass that was given up leaves nothing to the next.
    assert list(batches) == []
    assert next(iter(loader)) == (0, True)
    loader.close_async_loader()
    assert not any(thread.is_alive() for _, thread in log)


def test_an_error_of_the_loader_comes_where_its_batches_are_used():
    batches = iter(Ahead(2, end=5))
    assert [next(batches)[0] for _ in range(5)] == [0, None, 2, 3, 4]
    with pytest.raises(KeyError, match="no such file"):
        next(batches)
    for loader in (BaseDataLoader(), type("Empty", (AsyncDataLoaderMixin, BaseDataLoader), {})(2)):
        with pytest.raises(NotImplementedError, match=f"{type(loader).__name__} lacks _iterate"):
            next(iter(loader))
