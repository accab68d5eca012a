from __future__ import annotations

import random

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.base.reduction import Adasum, Average, Max, Min, Product, Sum
from hvdlite.collectives.allgather import Allgather
from hvdlite.collectives.allreduce import Allreduce
from hvdlite.collectives.broadcast import Broadcast
from hvdlite.engine import Operation, runtime
from hvdlite.engine.operation import Barrier, Signature
from hvdlite.engine.rounds import fuse
from tests.engine.test_lane import Lanes
from tests.harness import ranks
from tests.references import check_reduction, sample, samples


class Piece(Operation):
    def __init__(self, name, kind, nbytes, failure=None):
        super().__init__(name, Signature(), failure=failure)
        self.nbytes = nbytes
        self._kind = kind

    @property
    def fusion(self):
        return self._kind

    def execute(self, transport, payloads):
        raise NotImplementedError


def grouped(pieces, limit):
    return [[piece.name for piece in group] for group in fuse(pieces, limit)]


def pieces(text, **sizes):
    """``"x1 x2 y1"``: each of the kind of its first letter, None for ``-``."""
    return [
        Piece(name, None if name[0] == "-" else name[0], sizes.get(name, 10))
        for name in text.split()
    ]


class TestGroups:
    def test_one_kind(self):
        assert grouped(pieces("x1 x2 x3"), 100) == [["x1", "x2", "x3"]]

    def test_kinds_in_the_order_of_their_first_members(self):
        found = grouped(pieces("y1 x1 y2 -1 x2 y3"), 100)
        assert found == [["y1", "y2", "y3"], ["x1", "x2"], ["-1"]]

    def test_what_may_not_run_with_others_is_alone(self):
        assert grouped(pieces("-1 -2 x1 -3"), 100) == [["-1"], ["-2"], ["x1"], ["-3"]]

    def test_a_group_is_filled_up_to_the_limit_and_not_beyond(self):
        assert grouped(pieces("x1 x2 x3 x4 x5"), 20) == [["x1", "x2"], ["x3", "x4"], ["x5"]]
        assert grouped(pieces("x1 x2 x3 x4 x5"), 29) == [["x1", "x2"], ["x3", "x4"], ["x5"]]
        assert grouped(pieces("x1 x2 x3 x4 x5"), 30) == [["x1", "x2", "x3"], ["x4", "x5"]]

    def test_what_is_larger_than_the_limit_is_alone(self):
        found = grouped(pieces("x1 x2 x3 x4", x2=1000), 30)
        assert found == [["x1"], ["x2"], ["x3", "x4"]]

    def test_a_limit_of_zero_is_for_what_is_empty_too(self):
        assert grouped(pieces("x1 x2", x1=0, x2=0), 0) == [["x1"], ["x2"]]

    def test_what_has_failed_is_alone(self):
        given = pieces("x1 x2 x3")
        given[1].failure = "lost"
        assert grouped(given, 100) == [["x1", "x3"], ["x2"]]

    @pytest.mark.parametrize("seed", range(5))
    def test_each_is_in_one_group_which_is_of_one_kind_and_within_the_limit(self, seed):
        choose = random.Random(seed)
        given = [
            Piece(str(number), choose.choice(["x", "y", None]), choose.randrange(50))
            for number in range(100)
        ]
        groups = fuse(given, 120)
        assert sorted(int(piece.name) for group in groups for piece in group) == list(range(100))
        firsts = [int(group[0].name) for group in groups]
        assert firsts == sorted(firsts)
        for group in groups:
            assert len({piece.fusion for piece in group}) == 1
            assert len(group) == 1 or sum(piece.nbytes for piece in group) <= 120
            assert len(group) == 1 or group[0].fusion is not None


class TestKinds:
    def test_small_allreduces_of_one_dtype_op_and_scale(self):
        def kind(dtype="float32", shape=(3,), op=Sum, **factors):
            return Allreduce("a", np.zeros(shape, dtype), op, **factors).fusion

        assert kind() == kind(shape=(5, 2)) == kind(shape=()) is not None
        others = [
            kind("float64"),
            kind("int32"),
            kind(op=Max),
            kind(op=Average),
            kind(prescale=2.0),
            kind(postscale=2.0),
        ]
        assert len({kind(), *others}) == 1 + len(others)

    def test_what_is_not_fused(self):
        small, large = np.zeros(3, np.float32), np.zeros(2**20, np.float32)
        assert Allreduce("a", large, Sum).fusion is None
        assert Allreduce("a", small, Adasum).fusion is None
        for operation in (Allgather("a", small), Broadcast("a", small, 0), Barrier("a")):
            assert operation.fusion is None


def submit(lanes, operations):
    """Submit one list of operations for each rank; return their handles likewise."""
    with lanes.all_held():
        return [
            [lane.submit(operation) for operation in own]
            for lane, own in zip(lanes.lanes, operations, strict=True)
        ]


def numbered(number, rank, op=Sum, size=3, **more):
    return Allreduce(f"t{number}", np.full(size, number + rank, np.float64), op, **more)


class TestLane:
    def test_what_is_ready_together_runs_together(self):
        lanes = Lanes(2)
        # The first round begins with what is there: it may be one alone.
        handles = submit(lanes, [[numbered(n, rank) for n in range(50)] for rank in range(2)])
        for own in handles:
            for number, handle in enumerate(own):
                assert handle.wait().tolist() == [2.0 * number + 1] * 3
        assert lanes.simulation.calls[0].count("alltoall") < 50 * 2  # two exchanges each
        assert all(lanes.close())

    def test_any_shapes_places_and_layouts(self):
        lanes = Lanes(2)

        def operations(rank):
            wide = np.arange(24.0).reshape(4, 6) + rank
            inplace, out = np.full((2, 3), 1.0 + rank), np.zeros((6, 4))
            return [
                Allreduce("scalar", np.float64(2 + rank), Sum),
                Allreduce("zero-dimensional", np.array(3.0 + rank), Sum),
                Allreduce("empty", np.zeros((0, 5)), Sum),
                Allreduce("strided", wide[::2, ::-3], Sum),
                Allreduce("turned", wide.T, Sum, out=out),
                Allreduce("in place", inplace, Sum, out=inplace),
            ]

        base = np.arange(24.0).reshape(4, 6)
        expected = [5.0, 7.0, np.zeros((0, 5)), 2 * base[::2, ::-3] + 1, 2 * base.T + 1]
        expected.append(np.full((2, 3), 3.0))
        given = [operations(rank) for rank in range(2)]
        for own, handles in zip(given, submit(lanes, given), strict=True):
            for handle, wanted in zip(handles, expected, strict=True):
                found = handle.wait()
                np.testing.assert_array_equal(found, wanted)
                assert found.shape == np.shape(wanted)
            assert handles[4].wait() is own[4]._out
            assert handles[5].wait() is own[5]._array
        assert all(lanes.close())

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int32", "int8"])
    def test_it_gives_the_bits_that_each_gives_alone(self, dtype):
        def values(rank, count):
            array = sample(rank, dtype, count, seed=count)
            # Scaled integers have to fit: these are from -4 to 3.
            return array >> 8 * array.itemsize - 3 if array.dtype.kind == "i" else array

        def results(threshold):
            lanes = Lanes(3, fusion_threshold=threshold)
            given = [
                [
                    Allreduce(f"{op.name} {n}", values(rank, n), op, prescale, postscale)
                    for op in (Sum, Average, Min, Product)
                    for prescale, postscale in ((1.0, 1.0), (0.5, 3.0))
                    for n in (1, 5, 100 + int(10 * prescale))
                ]
                for rank in range(3)
            ]
            names = [[operation.name for operation in own] for own in given]
            for own in given:
                for position, operation in enumerate(own):
                    operation.name = operation.key = f"{position} {operation.name}"
            found = [[handle.wait().tobytes() for handle in own] for own in submit(lanes, given)]
            assert all(lanes.close())
            assert names[0] == names[1]
            return found

        assert results(2**20) == results(0)


KINDS = [
    (dtype, op)
    for dtype in ("float32", "float64", "int32", "bfloat16", "bool")
    for op in (Sum, Average, Max, Product)
    if (dtype, op) != ("bool", Average)
]


@ranks(2, 3)
class TestJob:
    def test_hundreds_of_all_kinds_in_different_orders(self, size):
        hvd.init()
        rank = hvd.rank()
        for step in range(2):
            order = list(range(400))
            random.Random(f"{step} {rank}").shuffle(order)
            arrays = {
                n: samples(size, KINDS[n % len(KINDS)][0], (n % 7, 1 + n % 5), seed=n)
                for n in range(400)
            }
            handles = {
                n: hvd.allreduce_async(arrays[n][rank], name=f"t{n}", op=KINDS[n % len(KINDS)][1])
                for n in order
            }
            for n, handle in handles.items():
                with np.errstate(all="ignore"):
                    check_reduction(hvd.synchronize(handle), arrays[n], KINDS[n % len(KINDS)][1])

    def test_of_hundreds_one_differs_and_fails_alone(self, size):
        hvd.init()
        handles = []
        for n in range(400):
            length = 6 if (n, hvd.rank()) == (217, size - 1) else 5
            array = np.full(length, float(n))
            handles.append(hvd.allreduce_async(array, name=f"t{n}", op=hvd.Sum))
        for n, handle in enumerate(handles):
            if n == 217:
                with pytest.raises(hvd.HorovodInternalError, match="the ranks disagree on 't217'"):
                    hvd.synchronize(handle)
            else:
                assert hvd.synchronize(handle).tolist() == [n * size] * 5
        assert hvd.allreduce(np.ones(2), op=hvd.Sum).tolist() == [size] * 2

    def test_large_ones_between_small_ones(self, size):
        hvd.init()
        lengths = [1, 2**18, 5, 2**17, 7, 2**17 + 1, 2**20, 3]
        handles = [
            hvd.allreduce_async(np.full(length, n + hvd.rank(), np.float32), name=f"t{n}")
            for n, length in enumerate(lengths)
        ]
        for n, (length, handle) in enumerate(zip(lengths, handles, strict=True)):
            found = hvd.synchronize(handle)
            assert found.shape == (length,)
            assert (found == np.float32(n + (size - 1) / 2)).all()


@ranks(2, settings={"HVDLITE_FUSION_THRESHOLD": "0"})
def test_fusion_can_be_switched_off(monkeypatch):
    together = Allreduce.execute_together

    def alone(operation, others, transport):
        assert not others
        return together(operation, others, transport)

    hvd.init()
    assert runtime.engine().settings.fusion_threshold == 0
    monkeypatch.setattr(Allreduce, "execute_together", alone)
    handles = [hvd.allreduce_async(np.full(4, float(n)), name=f"t{n}") for n in range(50)]
    assert [hvd.synchronize(handle)[0] for handle in handles] == list(range(50))
