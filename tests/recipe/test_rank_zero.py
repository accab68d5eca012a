"""Rank 0 before the others, and rank 0 alone."""

from __future__ import annotations

import threading
import time

import pytest

import hvdlite as hvd
from hvdlite.errors import NotInitializedError
from tests.harness import ranks


class UnportableError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def no_space():
    return OSError(28, "no space")


def unportable():
    return UnportableError("one", "two")


@ranks(1, 2, 3, 4)
def test_rank_0_goes_first(tmp_path):
    hvd.init()
    path = hvd.broadcast_object(tmp_path) / "data"
    for turn in range(3):
        with hvd.first():
            if hvd.rank() == 0:
                time.sleep(0.05)  # others would be earlier if they did not wait
                path.write_text(str(turn))
            assert path.read_text() == str(turn)
        hvd.barrier()


@ranks(1, 3)
def test_a_block_within_another_is_a_part_of_it(tmp_path):
    hvd.init()
    path = hvd.broadcast_object(tmp_path) / "data"
    with hvd.first():
        with hvd.first():  # in a library
            pass
        if hvd.rank() == 0:
            time.sleep(0.05)
            path.touch()
        assert path.exists()
    other = pytest.raises(ValueError, match="put one behind the other")
    with other, hvd.first(), hvd.first(per_node=True):
        pass
    with hvd.first(per_node=True):
        pass


@ranks(1, 3, 4)
def test_one_rank_of_each_node_goes_first(tmp_path, monkeypatch):
    hvd.shutdown()
    monkeypatch.setenv("HVDLITE_FORCE_LOCAL_SIZE", "2")
    hvd.init()
    path = hvd.broadcast_object(tmp_path) / f"node-{hvd.rank() // 2}"
    with hvd.first(per_node=True):
        if hvd.local_rank() == 0:
            time.sleep(0.05)
            assert not path.exists()
            path.touch()
        assert path.exists()
    hvd.shutdown()


@ranks(1, 2, 3)
@pytest.mark.parametrize("make", [no_space, unportable])
def test_a_failure_is_one_on_every_rank(make):
    hvd.init()
    error, entered = make(), []

    def run():
        with hvd.first():
            entered.append(True)
            raise error

    with pytest.raises(Exception, match=r"no space|one and two") as caught:
        run()
    assert len(entered) == (hvd.rank() == 0)
    if hvd.rank() == 0:
        assert caught.value is error
    elif make is no_space:
        assert type(caught.value) is OSError
        assert caught.value.errno == 28
    else:
        assert type(caught.value) is RuntimeError
        assert str(caught.value) == "rank 0 has failed: UnportableError: one and two"
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


@ranks(2, 3)
def test_a_failure_afterwards_concerns_its_rank_alone():
    hvd.init()
    last = hvd.size() - 1
    try:
        with hvd.first():
            if hvd.rank() == last:
                raise KeyError("mine")
    except KeyError:
        assert hvd.rank() == last
    else:
        assert hvd.rank() != last
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))


@ranks(1, 2, 3)
def test_on_rank_zero():
    hvd.init()

    @hvd.on_rank_zero
    def add(a, b=1):
        """Add."""
        return a + b

    assert add(2, b=3) == (5 if hvd.rank() == 0 else None)
    assert (add.__name__, add.__doc__) == ("add", "Add.")


@ranks(1)
def test_both_need_init():
    hvd.shutdown()
    with pytest.raises(NotInitializedError):
        hvd.on_rank_zero(print)("nobody")
    with pytest.raises(NotInitializedError), hvd.first():
        pass


@ranks(1)
def test_a_block_in_another_thread_is_not_within_one():
    hvd.init()
    done = []

    def run():
        with hvd.first(per_node=True):
            done.append(True)

    with hvd.first():
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert done == [True]
