from __future__ import annotations

import errno
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.base.settings import Settings
from hvdlite.compression import (
    Compression,
    ErrorFeedback,
    Parameter,
    Reduction,
    StrategyState,
    TopK,
)
from hvdlite.engine import runtime
from hvdlite.gradients import buckets
from hvdlite.gradients.buckets import GradientBuckets
from hvdlite.gradients.exchange import GradientExchange
from tests.harness import ranks
from tests.references import check_reduction, dtype_of, sample
from tests.simulation import on_all_ranks

ALL = ranks(1, 2, 3, 4)
TWO = ranks(2)

SHAPES = [(3, 4), (), (0, 2), (7,), (5, 1), (2, 2, 2)]
DTYPES = ["float32", "float16", "bfloat16", "float64"]


def parameter(name, shape, dtype="float32"):
    return Parameter(name, shape, dtype_of(dtype))


def model(count=12, dtypes=("float32",)):
    """Parameters of several shapes and dtypes, the same on all ranks."""
    return [
        parameter(f"p{n}", SHAPES[n % len(SHAPES)], dtypes[n % len(dtypes)]) for n in range(count)
    ]


def exchange(
    label, parameters, strategy=Compression.none, reduction=None, threshold=80, state=None
):
    """An exchange with buckets small enough to have several."""
    settings = Settings(fusion_threshold=threshold, first_bucket_size=min(threshold, 20))
    engine = SimpleNamespace(gradients=runtime.engine().gradients, settings=settings)
    reduction = reduction or Reduction()
    return GradientExchange(engine, label, parameters, strategy, reduction, state=state)


def buckets_of(made):
    return made if isinstance(made, GradientBuckets) else made.buckets


def gradient(made, number, step, rank):
    chosen = buckets_of(made).parameters[number]
    return sample(rank, chosen.dtype.name, chosen.shape, seed=1000 * step + number)


def gradients(made, number, step):
    return [gradient(made, number, step, rank) for rank in range(hvd.size())]


def mark_all(made, step, numbers=None):
    """Bring gradients in an order that differs from rank to rank."""
    order = list(range(len(made.buckets.parameters)) if numbers is None else numbers)
    random.Random(10 * step + hvd.rank()).shuffle(order)
    for number in order:
        made.buckets.slot(number)[...] = gradient(made, number, step, hvd.rank())
        made.mark(number)


def check(made, step, op=hvd.Average):
    """Assert that every parameter has the reduction of all ranks' gradients."""
    for number in range(len(made.buckets.parameters)):
        check_reduction(made.buckets.result_slot(number), gradients(made, number, step), op)


class TestAverages:
    @ALL
    @pytest.mark.parametrize("threshold", [0, 80, 10**6])
    @pytest.mark.parametrize("op", [hvd.Average, hvd.Sum, hvd.Adasum])
    def test_step_after_step_in_any_order_of_dtypes_and_shapes(self, threshold, op):
        hvd.init()
        made = exchange("model", model(dtypes=DTYPES), reduction=Reduction(op), threshold=threshold)
        assert len(made.buckets.plan) == {0: 12, 10**6: 5}.get(threshold, len(made.buckets.plan))
        for step in range(4):
            mark_all(made, step)
            assert made.in_flight
            assert made.finish() == [True] * 12
            assert not made.in_flight
            check(made, step, op)
            # The gradients themselves are as they were.
            for number in range(12):
                mine = gradient(made, number, step, hvd.rank())
                assert made.buckets.slot(number).tobytes() == mine.tobytes()
        results = b"".join(made.buckets.result_slot(number).tobytes() for number in range(12))
        assert len(set(hvd.allgather_object(results))) == 1

    @TWO
    def test_marks_from_several_threads(self):
        hvd.init()
        made = exchange("model", model())
        for step in range(5):
            on_all_ranks(lambda t, step=step: mark_all(made, step, range(t, 12, 3)), range(3))
            made.finish()
            check(made, step)

    @ranks(1, 2)
    def test_a_model_without_parameters(self):
        hvd.init()
        made = exchange("empty", [])
        assert made.finish() == []
        assert not made.in_flight


class TestOverlap:
    @TWO
    def test_a_bucket_starts_when_it_is_complete(self):
        hvd.init()
        made = exchange("model", model())
        for step in range(2):
            first = made.buckets.plan[0]
            mark_all(made, step, first)
            # In the first step the ranks agree on their parameters meanwhile, and nobody waits.
            deadline = time.monotonic() + 10
            while not (made.buckets.all[0].pending and made.buckets.all[0].pending.done()):
                assert time.monotonic() < deadline
                time.sleep(1e-3)
            for number in first:
                check_reduction(
                    made.buckets.result_slot(number), gradients(made, number, step), hvd.Average
                )
            for number in first:  # it may be read at this moment, or be on its way again
                before = made.buckets.slot(number).copy()
                with pytest.raises(ValueError, match="was marked twice"):
                    made.mark(number)
                assert made.buckets.slot(number).tobytes() == before.tobytes()
            mark_all(made, step, [number for number in range(12) if number not in first])
            made.finish()
            check(made, step)

    @TWO
    def test_two_models_whose_ranks_take_them_in_another_order(self):
        hvd.init()
        models = [exchange("one", model(7)), exchange("two", model(9, DTYPES))]
        order = models[:: 1 if hvd.rank() == 0 else -1]
        for step in range(3):
            for made in order:
                mark_all(made, step)
            for made in order:
                assert all(made.finish())
            for made in models:
                check(made, step)


class TestMissing:
    @ALL
    def test_a_gradient_that_is_missing_on_some_ranks_counts_as_zeros_there(self):
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        made = exchange("model", model())
        for step in range(3):
            # Rank r lacks the parameters r and r + 6; nobody has parameter 5.
            lacks = [{other, other + 6, 5} for other in range(size)]
            mark_all(made, step, [number for number in range(12) if number not in lacks[rank]])
            found = made.finish()
            for number in range(12):
                theirs = gradients(made, number, step)
                for other in range(size):
                    if number in lacks[other]:
                        theirs[other] = np.zeros_like(theirs[other])
                check_reduction(made.buckets.result_slot(number), theirs, hvd.Average)
                assert found[number] == any(number not in lacks[other] for other in range(size))


class TestDisagreement:
    @ranks(2, 3)
    def test_it_names_what_differs_on_all_ranks_and_a_new_exchange_works(self):
        hvd.init()
        odd = hvd.rank() == hvd.size() - 1
        last = hvd.size() - 1

        def changed(number, new):
            parameters = model()
            if odd:
                parameters[number] = new
            return exchange("model", parameters)

        kinds = [
            (
                lambda: changed(4, parameter("p4", (5, 2))),
                f"parameter 4 is 'p4' float32[5, 1] on @, 'p4' float32[5, 2] on rank {last}",
            ),
            (
                lambda: changed(4, parameter("p4", (5, 1), "float64")),
                f"'p4' float32[5, 1] on @, 'p4' float64[5, 1] on rank {last}",
            ),
            (
                lambda: changed(0, parameter("other", (3, 4))),
                f"parameter 0 is 'p0' float32[3, 4] on @, 'other' float32[3, 4] on rank {last}",
            ),
            (
                lambda: exchange("model", model(11 if odd else 12)),
                "parameter 11 'p11' float32[2, 2, 2] on @",
            ),
            (lambda: exchange("model", [] if odd else model()), "parameter 0 'p0'"),
            (
                lambda: exchange("model", model(), Compression.fp16 if odd else Compression.none),
                f"compression is none on @, fp16 on rank {last}",
            ),
            (
                lambda: exchange(
                    "model", model(), reduction=Reduction(hvd.Sum if odd else hvd.Average)
                ),
                f"op is Average on @, Sum on rank {last}",
            ),
            (
                lambda: exchange("model", model(), reduction=Reduction(predivide=2 if odd else 1)),
                f"gradient_predivide_factor is 1 on @, 2 on rank {last}",
            ),
        ]
        for make, says in kinds:
            made = make()
            others = "rank 0" if last == 1 else "ranks 0, 1"
            for step in range(2):
                mark_all(made, step)
                with pytest.raises(hvd.MismatchError) as caught:
                    made.finish()
                assert str(caught.value).startswith("the ranks disagree on 'model: its parameters'")
                assert says.replace("@", others) in str(caught.value)
                assert not made.in_flight
            good = exchange("model", model())
            mark_all(good, 0)
            assert good.finish() == [True] * 12
            check(good, 0)


class TestMistakes:
    @ranks(1)
    def test_a_gradient_of_another_shape(self):
        hvd.init()
        buckets = exchange("model", model()).buckets
        index = buckets.all.index(buckets.place(0)[0])
        with pytest.raises(
            ValueError, match=r"gradient of 'p0' is float32\[4, 3\]; expected float32\[3, 4\]"
        ):
            buckets.start_bucket(index, {0: np.zeros((4, 3), np.float32)})

    @TWO
    def test_after_shutdown(self):
        hvd.init()
        made = exchange("model", model())
        mark_all(made, 0)
        made.finish()
        hvd.shutdown()
        with pytest.raises(hvd.HorovodInternalError, match="shut down"):
            made.finish()

    @TWO
    def test_a_launch_that_fails_waits_for_the_buckets_before_it(self, monkeypatch):
        """A lane that refuses the second bucket, of which the other rank knows nothing."""
        hvd.init()
        made = exchange("model", model())
        mark_all(made, 0)
        made.finish()
        submit, submitted = made.buckets.lane.submit, []

        def refuse(operation, *begin):
            if submitted:
                raise hvd.HorovodInternalError("refused")
            submitted.append(submit(operation, *begin))
            return submitted[0]

        with monkeypatch.context() as patch:
            patch.setattr(made.buckets.lane, "submit", refuse)
            for number in made.buckets.plan[0]:
                made.buckets.slot(number)[...] = gradient(made, number, 1, hvd.rank())
                made.mark(number)
            with pytest.raises(hvd.HorovodInternalError, match="refused"):
                mark_all(made, 1, made.buckets.plan[1])
            assert made.in_flight
            with pytest.raises(hvd.HorovodInternalError, match="refused"):
                made.finish()
            assert submitted[0].done()
            assert not made.in_flight
        mark_all(made, 2)
        assert all(made.finish())
        check(made, 2)

    @ranks(2, 3)
    def test_memory_that_runs_out_for_the_result_of_a_bucket(self, monkeypatch):
        hvd.init()
        made = exchange("model", model())
        mark_all(made, 0)
        made.finish()

        def refuse():
            raise OSError(errno.ENOMEM, "out of memory")

        with monkeypatch.context() as patch:
            if hvd.rank() == 1:
                patch.setattr(made.buckets.all[0].arrays, "allocate_result", refuse)
            mark_all(made, 1)
            with pytest.raises(hvd.HorovodInternalError, match=r"rank 1: .*out of memory"):
                made.finish()
        mark_all(made, 2)
        assert all(made.finish())
        check(made, 2)


class TestZeroCopy:
    @ALL
    @pytest.mark.parametrize("threshold", [0, 80])
    def test_the_exchange_reads_zero_copy_parts_in_place(self, threshold):
        hvd.init()
        made = exchange("model", model(dtypes=DTYPES), threshold=threshold)
        for step in range(3):
            made.begin()
            lent = 0
            for number in random.Random(step).sample(range(12), 12):
                own = gradient(made, number, step, hvd.rank()).reshape(-1)
                zero_copy, slot = (
                    made.buckets.zero_copy_range(number),
                    made.buckets.slot(number).reshape(-1),
                )
                slot[...] = own
                slot[zero_copy] = 99
                made.buckets.set_zero_copy(number, zero_copy.start, own[zero_copy])
                made.mark(number)
                lent += own[zero_copy].size
            assert made.finish() == [True] * 12
            check(made, step)
            assert bool(lent) == (hvd.size() > 1)

    @TWO
    def test_a_step_that_failed_leaves_nothing(self):
        hvd.init()
        made = exchange("model", [parameter(f"p{n}", (6,)) for n in range(4 - hvd.rank())])
        made.buckets.set_zero_copy(0, 0, np.full(3, 99, np.float32))
        made.mark(0)
        with pytest.raises(hvd.MismatchError):
            made.finish()
        assert not any(bucket.arrays.zero_copy for bucket in made.buckets.all)


class TestSingleBuckets:
    @ALL
    @pytest.mark.parametrize("lends", [False, True])
    def test_each_by_itself_in_an_order_of_the_ranks_own(self, monkeypatch, lends):
        if lends:
            monkeypatch.setattr(buckets, "LEAST_ZERO_COPY", 0)
        hvd.init()
        rank, size = hvd.rank(), hvd.size()
        made = exchange("model", model()).buckets
        for step in range(2):
            order = list(range(len(made.plan)))
            random.Random(rank + step).shuffle(order)

            # In one thread for each bucket, as a framework that orders them itself would.
            def one(index, step=step):
                # Rank r lacks parameter r.
                mine = {n: gradient(made, n, step, rank) for n in made.plan[index] if n != rank}
                made.start_bucket(index, mine)
                return made.finish_bucket(index)

            presence = dict(zip(order, on_all_ranks(one, order), strict=True))
            for index, members in enumerate(made.plan):
                expected = [[n != other for n in members] for other in range(size)]
                assert presence[index].tolist() == expected
                for n in members:
                    theirs = gradients(made, n, step)
                    if n < size:
                        theirs[n] = np.zeros_like(theirs[n])
                    check_reduction(made.result_slot(n), theirs, hvd.Average)

    @TWO
    @pytest.mark.parametrize("lends", [False, True])
    def test_neighbours_as_one_array(self, monkeypatch, lends):
        if lends:
            monkeypatch.setattr(buckets, "LEAST_ZERO_COPY", 0)
        hvd.init()
        made = exchange("model", model()).buckets
        for step in range(2):
            for index, members in enumerate(made.plan):
                whole = [gradient(made, n, step, hvd.rank()) for n in members]
                own = [each.reshape(-1) for each in whole]
                size = sum(each.size for each in own)
                with pytest.raises(ValueError, match="the gradient of 'p"):
                    made.start_bucket(index, {members[0]: np.zeros(size + 1, own[0].dtype)})
                if len(members) > 1:
                    with pytest.raises(ValueError, match="the gradient of 'p"):
                        made.start_bucket(index, {members[0]: np.zeros(size - 1, own[0].dtype)})
                joint = np.concatenate(own) if len(own) > 1 else whole[0]
                made.start_bucket(index, {members[0]: joint})
            for index, members in enumerate(made.plan):
                assert made.finish_bucket(index).all()
                for n in members:
                    check_reduction(made.result_slot(n), gradients(made, n, step), hvd.Average)
                joint = made.result_of(members).reshape(-1)
                assert joint.tolist() == made.all[index].arrays.result.tolist()

    @TWO
    def test_a_disagreement(self):
        hvd.init()
        made = exchange("model", model(11 + hvd.rank())).buckets
        for index in (0, 1):
            made.start_bucket(index, {})
            with pytest.raises(hvd.MismatchError, match="parameter 11 'p11'"):
                made.finish_bucket(index)

    @TWO
    def test_several_on_their_way_and_a_step_that_is_given_up(self):
        hvd.init()
        made = exchange("model", model()).buckets
        everything = [
            {n: gradient(made, n, 0, hvd.rank()) for n in members} for members in made.plan
        ]
        for index, mine in enumerate(everything):
            made.start_bucket(index, mine)
        made.finish_bucket(0)
        hvd.barrier()
        made.finish_bucket(len(everything) - 1)  # the last: all have ended
        for index, mine in enumerate(everything):
            made.start_bucket(index, mine)
        for index, members in enumerate(made.plan):
            made.finish_bucket(index)
            for n in members:
                check_reduction(made.result_slot(n), gradients(made, n, 0), hvd.Average)

    @TWO
    def test_out_of_order(self):
        hvd.init()
        made = exchange("model", model()).buckets
        with pytest.raises(ValueError, match="bucket 1 of 'model' has not been started"):
            made.finish_bucket(1)
        if hvd.rank() == 0:
            made.start_bucket(0, {})
            with pytest.raises(ValueError, match="bucket 0 of 'model' is on its way"):
                made.start_bucket(0, {})
        hvd.barrier()
        if hvd.rank() == 1:
            made.start_bucket(0, {})
        made.finish_bucket(0)


TOP = ErrorFeedback(TopK(0.5))


def with_state(label, parameters, state=None):
    """An exchange by a strategy that remembers something, in a state that others may share."""
    state = StrategyState() if state is None else state
    return exchange(label, parameters, TOP, state=state), state


def put_all(made, value):
    for number in range(len(made.buckets.parameters)):
        made.buckets.slot(number)[...] = np.full(
            made.buckets.parameters[number].shape, value, np.float32
        )
        made.mark(number)


def exchanges(state):
    return {name: int(entry["exchanges"]) for name, entry in state.state_dict().items()}


class TestRefused:
    """A step in which a gradient is not a number."""

    @TWO
    @pytest.mark.parametrize("samples", [None, 3])
    def test_the_first_step_can_be_made_once_more(self, samples):
        hvd.init()
        made, state = with_state("model", model())
        put_all(made, np.nan if hvd.rank() else 1.0)
        with pytest.raises(hvd.GradientError, match="is not finite on rank 1"):
            made.finish(samples)
        for _ in range(3):
            made.begin()
            put_all(made, 1.0)
            assert made.finish(samples) == [True] * 12
            members = [number for members in made.buckets.plan for number in members]
            assert sorted(members) == [*range(12)]
        if samples is not None:  # all of what left without its weight has been taken back
            assert set(exchanges(state).values()) == {3}

    @pytest.mark.slow
    @TWO
    def test_a_step_of_single_buckets_is_given_up(self):
        hvd.init()
        large = [parameter("bad", (4,)), *(parameter(f"p{n}", (10**6,)) for n in range(4))]
        settings = Settings(fusion_threshold=0, first_bucket_size=0, overlap="1")
        engine = SimpleNamespace(gradients=runtime.engine().gradients, settings=settings)
        made = GradientBuckets(engine, "model", large, TOP, Reduction())
        order = sorted(range(5), key=lambda index: made.plan[index] != [0])  # the bad one first
        for value in (np.nan, 1.0, np.nan, 1.0):
            for index in order:
                shapes = {n: made.parameters[n].shape for n in made.plan[index]}
                own = {n: np.full(s, 1.0 if n else value, np.float32) for n, s in shapes.items()}
                made.start_bucket(index, own)
            if np.isnan(value):
                with pytest.raises(hvd.GradientError, match="'bad' is not finite"):
                    made.finish_bucket(order[0])
            else:
                assert all(made.finish_bucket(index).all() for index in order)


class TestWeights:
    """The first step with weights, in which buckets may leave before anything is known of them."""

    @TWO
    @pytest.mark.parametrize("marked", [True, False])
    def test_what_was_loaded_stays(self, marked):
        hvd.init()
        made, state = with_state("model", [parameter("a", (4,))])
        loaded = np.float32([0, 0, 0, 8])
        state.load_state_dict({"a": {"residual": loaded, "exchanges": np.array(5)}})
        if marked:
            put_all(made, 1.0)
        else:
            made.mark() if hvd.rank() else put_all(made, 1.0)
        made.finish(samples=1)
        applied = made.buckets.result_slot(0).astype(np.float64)
        left = hvd.allreduce(state.state_dict()["a"]["residual"], name="left")
        share = 1.0 if marked else 0.5
        np.testing.assert_allclose(applied + left, loaded + share)
        assert exchanges(state) == {"a": 6}

    @TWO
    def test_parameters_that_come_later_leave_the_others_state_alone(self):
        hvd.init()
        first, state = with_state("first", model())
        for _ in range(2):
            first.begin()
            put_all(first, 1.0)
            first.finish(samples=1)
        later, _ = with_state("later", [parameter("later", (5,))], state)
        first.begin()
        put_all(first, 1.0)
        put_all(later, 1.0)
        first.finish(samples=1)
        before = state.state_dict()
        later.finish(samples=1)
        assert exchanges(state) == {"later": 1, **{f"p{n}": 3 for n in range(12)}}
        for name, entry in before.items():
            np.testing.assert_array_equal(state.state_dict()[name]["residual"], entry["residual"])

    @TWO
    @pytest.mark.parametrize("strategy", [Compression.none, Compression.fp16])
    def test_the_average_of_no_samples_counts_for_nothing_whatever_it_is(self, strategy):
        hvd.init()
        made = exchange("model", model(), strategy)
        for _ in range(2):
            made.begin()
            put_all(made, np.nan if hvd.rank() else 3.0)
            made.finish(samples=0 if hvd.rank() else 7)
            for number in range(12):
                assert (made.buckets.result_slot(number) == 3).all()


class TestAdasum:
    @ranks(1)
    def test_what_it_cannot_be_used_with(self):
        hvd.init()
        reduction = Reduction(hvd.Adasum)
        with pytest.raises(ValueError, match="Adasum is not defined for dtype complex64"):
            exchange("model", [parameter("a", (2,), "complex64")], reduction=reduction)

        class Averaging(type(Compression.none)):
            name = "averaging"
            ops = (hvd.Average,)

        with pytest.raises(ValueError, match=r"compute hvd\.Adasum; use one of"):
            exchange("model", model(), Averaging(), reduction)


class TestSparse:
    """Gradients that are told of, and not copied or copied as dense ones."""

    @ALL
    def test_everybody_hears_of_those_that_are_copied_as_dense_ones(self, size):
        hvd.init()
        made = exchange("model", model())
        for step in range(3):
            assert not made.begin() or step == 1  # the order of the first step
            mark_all(made, step, [n for n in range(12) if n not in (3, 5)])
            for number in (3, 5):
                made.buckets.slot(number)[...] = gradient(made, number, step, hvd.rank())
            if hvd.rank() == 0:
                made.mark(3, kinds={5: 5})
            else:
                made.mark(5, kinds={3: 3})
            assert all(made.finish())
            assert made.densified == {**({3: 1} if size > 1 else {}), 5: 2}
            assert not made.sparse_axes
            for number in range(12):
                check_reduction(
                    made.buckets.result_slot(number), gradients(made, number, step), hvd.Average
                )
        assert not made.sparse_parameters

    @ALL
    def test_everybody_hears_of_them_and_they_leave_the_buckets(self, size):
        hvd.init()
        made = exchange("model", model())
        for step in range(3):
            assert made.begin() == (step == 1)
            dense = [n for n in range(12) if n not in (3, 5)]
            mark_all(made, step, dense)
            made.mark(kinds={3: 2})
            if hvd.rank() == size - 1:
                made.mark(kinds={5: 4})
            assert made.finish() == [n in dense for n in range(12)]
            assert made.sparse_axes == {3: 1, 5: 2}
            for number in dense:
                check_reduction(
                    made.buckets.result_slot(number), gradients(made, number, step), hvd.Average
                )
        assert made.sparse_parameters == {3, 5}
        assert made.buckets.slot(3).size == made.buckets.slot(5).size == 0
        assert made.buckets.plan[-1] == [3, 5]

    @TWO
    def test_dense_here_and_sparse_there_is_an_error_on_all_ranks(self):
        hvd.init()
        made = exchange("model", model())
        for step in range(3):
            made.begin()
            if hvd.rank() == 0:
                made.mark(kinds={3: 2})
            else:
                made.mark(3)
            with pytest.raises(
                hvd.HorovodInternalError,
                match=r"'p3' is sparse in 1 of its axes on rank 0 and dense on rank 1",
            ):
                made.finish()
            made.begin()
            mark_all(made, step, [n for n in range(12) if n != 3])
            assert sum(made.finish()) == 11
            assert made.sparse_axes == {}


@TWO
def test_a_rank_without_a_gradient_takes_over_the_new_order(size):
    """The step after the first: one rank has all gradients, the other none."""
    hvd.init()
    made = exchange("model", model(), threshold=0)
    for number in range(12):  # the reverse of what the plan expects
        made.buckets.slot(number)[...] = gradient(made, number, 0, hvd.rank())
        made.mark(number)
    made.finish()
    assert made.begin()
    if hvd.rank() == 0:
        mark_all(made, 1)
    made.finish()
    for number in range(12):
        mine = gradient(made, number, 1, 0)
        check_reduction(made.buckets.result_slot(number), [mine, np.zeros_like(mine)], hvd.Average)
