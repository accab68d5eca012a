from __future__ import annotations

import threading

import pytest

from hvdlite.engine.persistent import PersistentCache


def test_what_is_kept_is_found():
    kept = PersistentCache(3)
    assert kept.get("a") is None
    kept.put("a", 1)
    kept.put("b", 2)
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (1, 2, None)


def test_the_oldest_makes_room():
    kept = PersistentCache(2)
    for number, name in enumerate("abc"):
        kept.put(name, number)
    assert [kept.get(name) for name in "abc"] == [None, 1, 2]
    kept.put("b", 7)  # the newest now
    kept.put("d", 8)
    assert [kept.get(name) for name in "abcd"] == [None, 7, None, 8]
    assert len(kept) == 2


def test_where_there_is_no_room_nothing_is_kept():
    kept = PersistentCache(0)
    kept.put("a", 1)
    assert kept.get("a") is None
    assert len(kept) == 0


def test_only_what_is_kept_is_forgotten():
    kept = PersistentCache(3)
    first, second = [1], [1]
    kept.put("a", first)
    kept.put("b", first)
    kept.put("a", second)
    kept.remove("a", first)  # it is not there any more
    kept.remove("c", first)
    assert kept.get("a") is second
    kept.remove("a", second)
    assert [kept.get(name) for name in "ab"] == [None, first]


@pytest.mark.parametrize("capacity", [1, 10])
def test_many_threads(capacity):
    kept = PersistentCache(capacity)

    def keep(first):
        for number in range(first, first + 2000):
            kept.put(str(number % 50), number)
            kept.get(str(number % 37))

    threads = [threading.Thread(target=keep, args=(1000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(kept) == capacity
