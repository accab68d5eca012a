from __future__ import annotations

import numpy as np
import pytest

from hvdlite import GradientError
from hvdlite.gradients import metadata
from hvdlite.gradients.replicas import REPLICA_DIGEST_SIZE

MEMBERS = range(10)


def decode(*payloads, parameters=2, members=MEMBERS):
    return metadata.decode(payloads, parameters, members)


def test_what_is_of_no_interest_takes_no_bytes():
    assert metadata.encode(b"\x01\x00", None, None) == b"\x01\x00"
    told = decode(b"\x01\x00", b"\x00\x04")
    assert told.kinds.tolist() == [[1, 0], [0, 4]]
    assert (told.exchanges, told.weights) == (0, None)
    assert told.absent == [1]  # a sparse one is not in the bucket
    assert not told.is_empty
    assert decode(b"\x00\x00", b"\x00\x04").is_empty
    assert decode(b"\x01\x00", b"\x00\x05").absent == []  # a sparse one in its slot is


def test_a_rank_that_joined_has_what_any_has_and_no_samples():
    told = decode(metadata.encode(b"\x01\x00", 3, 6), b"", metadata.encode(b"\x01\x00", 5, 2))
    assert told.kinds.tolist() == [[1, 0]] * 3
    assert told.exchanges == 5
    np.testing.assert_allclose(told.weights, [6 * 3 / 8, 0, 2 * 3 / 8])
    assert decode(b"", b"\x01\x01").weights is None


def test_an_average_of_weighted_gradients_is_that_of_all_samples():
    told = decode(*(metadata.encode(b"\x01\x01", None, n) for n in (5, 0, 2)))
    gradients = np.array([3.0, 100.0, -4.0])
    assert np.mean(told.weights * gradients) == pytest.approx((5 * 3 - 2 * 4) / 7)


def test_some_who_do_not_say():
    with pytest.raises(GradientError, match="ranks 4, 6 gave no batch_size"):
        decode(
            metadata.encode(b"\x01\x01", 0, None),
            metadata.encode(b"\x01\x01", 0, 3),
            b"\x01\x01",
            members=[4, 5, 6],
        )


def test_nobody_has_samples():
    with pytest.raises(GradientError, match="batch_size is 0 on all ranks"):
        decode(metadata.encode(b"\x01\x01", None, 0), b"")


@pytest.mark.parametrize("kinds", [b"\x01", b"\x01\x00\x02" * 15])
@pytest.mark.parametrize("exchanges", [None, 3])
@pytest.mark.parametrize("samples", [None, 7])
def test_the_digest_of_a_replica_is_told_apart(kinds, exchanges, samples):
    digest = bytes(range(REPLICA_DIGEST_SIZE))
    plain = metadata.encode(kinds, exchanges, samples)
    payload = metadata.encode(kinds, exchanges, samples, digest)
    assert metadata.split_replica(payload, len(kinds)) == (plain, digest)
    assert metadata.split_replica(plain, len(kinds)) == (plain, b"")
    assert metadata.split_replica(b"", len(kinds)) == (b"", b"")
