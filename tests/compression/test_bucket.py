from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from hvdlite.base.reduction import Adasum, Average, Max, Min, Product, Sum
from hvdlite.compression import Bucket, Parameter, Reduction


def parameter(name, *shape, dtype=np.float32):
    return Parameter(name, shape, np.dtype(dtype))


class TestParameter:
    def test_size(self):
        assert (parameter("a", 3, 4).size, parameter("a", 3, 4).nbytes) == (12, 48)
        assert (parameter("a").size, parameter("a").nbytes) == (1, 4)
        assert (parameter("a", 0, 4).size, parameter("a", 0, 4).nbytes) == (0, 0)
        assert parameter("a", 3, dtype=ml_dtypes.bfloat16).nbytes == 6


class TestReduction:
    @pytest.mark.parametrize("op", [Min, Max, Product])
    def test_only_sums_averages_and_adasum(self, op):
        with pytest.raises(ValueError, match=f"not {op.name.capitalize()}"):
            Reduction(op)

    @pytest.mark.parametrize("op", [Sum, Adasum])
    def test_predivision_is_for_averages(self, op):
        with pytest.raises(ValueError, match=r"gradient_predivide_factor needs op=hvd\.Average"):
            Reduction(op, predivide=2.0)

    @pytest.mark.parametrize("factor", [0.0, -1.0, float("nan")])
    def test_predivision_is_above_0(self, factor):
        with pytest.raises(ValueError, match="is not a number above 0"):
            Reduction(Average, predivide=factor)


class TestBucket:
    def test_slots_are_views_that_cover_the_arrays(self):
        parameters = [parameter("a", 2, 3), parameter("b"), parameter("c", 0, 5), parameter("d", 4)]
        bucket = Bucket(parameters, Reduction())
        for array, slot in ((bucket.send, bucket.send_slot), (bucket.result, bucket.result_slot)):
            assert (array.size, array.dtype) == (11, np.float32)
            for position, member in enumerate(parameters):
                assert slot(position).shape == member.shape
                slot(position)[...] = position
            assert array.tolist() == [0.0] * 6 + [1.0] + [3.0] * 4
        assert not np.shares_memory(bucket.send, bucket.result)
