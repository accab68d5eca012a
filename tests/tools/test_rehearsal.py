"""Planted faults of the kind `corrupt`: wrong data go where the right ones would have gone."""

from contextlib import contextmanager

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite import recipe
from hvdlite.base import observers
from hvdlite.compression import Compression, Parameter, Reduction
from hvdlite.engine import runtime
from hvdlite.gradients.exchange import GradientExchange
from hvdlite.observe import status
from hvdlite.tools import rehearsal
from tests.harness import ranks
from tests.logs import logged


@contextmanager
def planted(faults):
    before = observers.current
    rehearsal.plant({rehearsal.VARIABLE: faults}, hvd.rank(), hvd.size())
    try:
        yield
    finally:
        rehearsal.plant({}, hvd.rank(), hvd.size())
    assert observers.current == before


@ranks(1, 2, 3)
@pytest.mark.parametrize("elements", [3, 10**5])  # with the digests, or after them
@pytest.mark.parametrize("in_place", [False, True])
def test_an_allreduce_by_its_name(elements, in_place, size):
    hvd.init()
    culprit = size - 1
    with planted(f"corrupt:rank={culprit},name=loss,value=1e30,count=2"):
        for turn in range(3):
            array, other = np.ones(elements), np.ones(elements)
            handle = hvd.allreduce_async(other, name="other")
            out = array if in_place else None
            found = hvd.allreduce(array, name="loss", op=hvd.Sum, out=out)
            expected = np.full(elements, float(size))
            if turn == 1:
                expected[0] = 1e30  # the others' ones are too small to show
            np.testing.assert_array_equal(found, expected)
            np.testing.assert_array_equal(handle.wait(), other)
            np.testing.assert_array_equal(array, found if in_place else 1)


@ranks(2)
def test_compressed_and_narrow_arrays():
    hvd.init()
    with planted("corrupt:rank=1,name=a;corrupt:rank=0,name=b,value=1e30"):
        found = hvd.allreduce(np.ones(4, np.float32), name="a", compression=Compression.fp16)
        assert np.isnan(found).tolist() == [True, False, False, False]
        assert hvd.allreduce(np.ones(2, np.float16), name="b").tolist() == [np.inf, 1]
        assert hvd.allreduce(np.ones(2, np.int32), name="b", op=hvd.Sum).tolist() == [2, 2]


@ranks(1, 2, 3)
@pytest.mark.parametrize("elements", [5, 2**19])  # from 1 MiB on without a copy of a part
def test_the_first_gradient_of_a_step_or_one_by_name(elements, size):
    hvd.init()
    engine = runtime.engine()
    parameters = [
        Parameter(name, (elements,), np.dtype(kind))
        for name, kind in (("weight", "float32"), ("count", "int32"), ("bias", "float32"))
    ]
    label = f"corrupt {engine.unnamed('test')}"
    made = GradientExchange(engine, label, parameters, Compression.none, Reduction(hvd.Sum))

    def step():
        for number in (2, 1, 0):
            gradients = {number: np.ones(elements, parameters[number].dtype)}
            made.buckets.slot(number)[...] = gradients[number]
            zero_copy = made.buckets.zero_copy_range(number)
            made.buckets.set_zero_copy(number, zero_copy.start, gradients[number][zero_copy])
            made.mark(number)
        made.finish()
        return [made.buckets.result_slot(number).copy() for number in range(3)]

    # In a job that other tests have used, theirs may have made more steps.
    while status.steps() > status.counts[made.buckets._key]:
        step()
    number = status.steps() + 2
    with planted(f"corrupt:rank=0,step={number};corrupt:rank={size - 1},name=weight,value=inf"):
        first, second, third = step(), step(), step()
    ones = np.full(elements, size)
    wrong = [np.array([value, *ones[1:]]) for value in (np.nan, np.inf)]
    np.testing.assert_array_equal(first, [wrong[1], ones, ones])
    assert sum(np.isnan(each[0]) for each in second) == 1
    assert [np.isnan(each[1:]).any() for each in second] == [False] * 3
    np.testing.assert_array_equal(third, [ones] * 3)


@ranks(2)
@pytest.mark.parametrize("suffix", ["npz", "safetensors", "pt"])
def test_a_checkpoint_that_is_wrong_on_the_disk(suffix, tmp_path):
    hvd.init()
    checkpoint = recipe.checkpoint
    if suffix == "pt":
        pytest.importorskip("torch")
        from hvdlite.torch import checkpoint
    saved = checkpoint(tmp_path / f"state.{suffix}", keep=2)
    with planted("corrupt:point=checkpoint,count=2"):
        for turn in range(2):
            saved.save({"turn": turn})
    with logged() as told:
        assert saved.load() == {"turn": 0}
    is_told = [f"state.{suffix}.generation-1" in text for text in told]
    assert is_told == ([True] if hvd.rank() == 0 else [])
