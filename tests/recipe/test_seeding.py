"""Seeds: equal on all ranks inside the block, different by rank after it."""

from __future__ import annotations

import random

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.errors import NotInitializedError
from tests.harness import ranks


def draw():
    return random.random(), *np.random.random(3)


def distinct(values):
    """Return whether no number comes twice, neither on one rank nor on two."""
    flat = np.ravel(values).tolist()
    return len(set(flat)) == len(flat)


@ranks(1, 2, 3)
def test_streams():
    hvd.init()
    hvd.seed(7)
    plain = draw()
    with hvd.seed(7):
        equal = draw()
    after = draw()
    hvd.seed(8)
    other = draw()
    # The same n gives the same run, whatever was drawn in between.
    assert after == plain
    inside = hvd.allgather_object(equal)
    assert inside == [inside[0]] * hvd.size()
    assert distinct([inside[0], *hvd.allgather_object(plain), *hvd.allgather_object(other)])
    with pytest.raises(KeyError), hvd.seed(7):
        raise KeyError
    assert draw() == plain


@ranks(1)
def test_what_is_refused():
    hvd.init()
    for bad in (-1, 1.5, True, None):
        with pytest.raises(ValueError, match=r"is not an integer of 0 or more"):
            hvd.seed(bad)
    hvd.shutdown()
    with pytest.raises(NotInitializedError):
        hvd.seed(1)
