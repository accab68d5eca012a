from __future__ import annotations

import numpy as np
import pytest

from hvdlite.base.reduction import Average, Sum
from hvdlite.collectives.allgather import Allgather
from hvdlite.collectives.allreduce import Allreduce
from hvdlite.collectives.broadcast import Broadcast
from hvdlite.collectives.objects import BroadcastBytes
from hvdlite.engine.operation import Barrier


def allreduce(name="a", shape=(2, 3), dtype="float32", op=Sum, prescale=1.0, postscale=1.0):
    return Allreduce(name, np.zeros(shape, dtype), op, prescale, postscale)


def test_what_is_the_same_has_the_same_word():
    assert allreduce().digest == allreduce().digest
    assert len(allreduce().digest) == 16


@pytest.mark.parametrize(
    "different",
    [
        {"name": "b"},
        {"shape": (3, 2)},
        {"shape": (6,)},
        {"dtype": "int32"},
        {"op": Average},
        {"prescale": 2.0},
        {"postscale": 2.0},
    ],
)
def test_what_is_not_the_same_has_another_word(different):
    assert allreduce(**different).digest != allreduce().digest
    if "name" not in different:
        assert allreduce(**different).signature.digest != allreduce().signature.digest


def test_a_payload_changes_the_word_but_not_the_digest():
    short, long = (Allgather("a", np.zeros(rows)) for rows in (1, 2))
    assert short.digest != long.digest
    assert short.signature.digest == long.signature.digest


def test_a_failure_changes_the_word():
    failed = BroadcastBytes("a", b"", 0, failure="no pickle")
    assert failed.digest != BroadcastBytes("a", b"", 0).digest


def test_name_and_payload_do_not_run_into_each_other():
    one, other = Allgather("ab", np.zeros(1)), Allgather("a", np.zeros(1))
    other.payload = b"b" + one.payload
    assert one.digest != other.digest


def test_every_collective_has_a_word_of_its_own():
    array = np.zeros(3)
    words = {
        operation.digest
        for operation in (
            Allreduce("a", array, Sum),
            Allgather("a", array),
            Broadcast("a", array, 0),
            Broadcast("a", array, 1),
            BroadcastBytes("a", b"", 0),
            Barrier("a"),
        )
    }
    assert len(words) == 6
