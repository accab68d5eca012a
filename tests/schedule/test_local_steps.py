from __future__ import annotations

import signal
from types import SimpleNamespace

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.compression import Compression, ErrorFeedback, Parameter, Reduction, TopK
from hvdlite.gradients.options import Options
from hvdlite.observe import status
from hvdlite.schedule import Schedule
from hvdlite.schedule.local_steps import LocalSteps
from tests.harness import ranks
from tests.references import dtype_of
from tests.schedule import models
from tests.schedule.models import SHAPES, ArrayWeights, Replica

SEVERAL = ranks(2, 3)
CASES = [
    (Schedule.LocalSGD(every=3), lambda size: models.local_sgd(size, 8, 3)),
    (Schedule.PartialSync(parts=2), lambda size: models.partial(size, 5)),
    (Schedule.PartialSync(bytes=450, momentum=True), lambda size: models.partial(size, 5, True)),
    (Schedule.DiLoCo(every=3), lambda size: models.diloco(size, 10, 3, 0.7, 0.9)),
    (Schedule.DiLoCo(2, 0.3, 0.0), lambda size: models.diloco(size, 6, 2, 0.3, 0.0)),
]
STEPS = {0: 8, 1: 5, 2: 5, 3: 10, 4: 6}


def _options(schedule, strategy, **more):
    return Options(strategy, Reduction(), sparse_as_dense=False, schedule=schedule, **more)


def make(schedule, dtype=np.float64, strategy=Compression.none, names=tuple(SHAPES), label="test"):
    hvd.init()
    steps = LocalSteps(_options(schedule, strategy), label)
    steps.add([Parameter(name, SHAPES[name], np.dtype(dtype)) for name in names])
    return steps


def train(steps, replica, count, names=tuple(SHAPES)):
    weights = ArrayWeights(replica, names)
    for _ in range(count):
        steps.begin(weights.read)
        replica.step(hvd.rank(), steps.steps)
        steps.end(weights)


def bits(arrays):
    return b"".join(arrays[name].tobytes() for name in SHAPES)


def same_everywhere(arrays):
    return len(set(hvd.allgather_object(bits(arrays)))) == 1


def assert_close(found, expected, tolerance=1e-12):
    for kind in ("weights", "velocity"):
        for name in SHAPES:
            np.testing.assert_allclose(
                getattr(found, kind)[name].astype(np.float64),
                getattr(expected, kind)[name],
                tolerance,
                tolerance,
            )


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda number: repr(CASES[number][0]))
def test_weights_are_what_the_papers_say(size, number):
    schedule, reference = CASES[number]
    steps, replica = make(schedule), Replica()
    train(steps, replica, STEPS[number])
    assert steps.steps == STEPS[number]
    expected = reference(size)
    assert_close(replica, expected[hvd.rank()])
    if size > 1:  # what is local is so
        assert not same_everywhere(replica.velocity) or schedule == CASES[2][0]


@ranks(1, 2)
def test_local_steps_count_as_steps(monkeypatch):
    """The launcher names the last one if this rank dies."""
    counted = memoryview(bytearray(32)).cast("q")
    monkeypatch.setattr(status, "_notes", lambda: counted)
    steps = make(Schedule.PartialSync(parts=2), label="counted")
    train(steps, Replica(), 3)
    steps.average(ArrayWeights(Replica()))
    assert counted[0] == 3


@SEVERAL
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("schedule", "count"), [(Schedule.LocalSGD(2), 4), (Schedule.DiLoCo(2), 4)], ids=repr
)
def test_of_other_types_and_alike_to_the_bit_after_an_exchange(size, dtype, schedule, count):
    steps, replica = make(schedule, dtype_of(dtype)), Replica(dtype_of(dtype))
    train(steps, replica, count - 1)
    assert not same_everywhere(replica.weights)
    train(steps, replica, 1)
    assert same_everywhere(replica.weights)
    if schedule == Schedule.LocalSGD(2):
        expected = models.local_sgd(size, count, 2)
    else:
        expected = models.diloco(size, count, 2, 0.7, 0.9)
        kept = {entry["momentum"].dtype.name for entry in steps.state_dict()["outer"].values()}
        assert kept == {"float32"}
    tolerance = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 8e-2}[dtype]
    assert_close(replica, expected[hvd.rank()], tolerance)


class Interrupting(ArrayWeights):
    """Weights during whose first replacement a signal arrives."""

    def write(self, number, array):
        super().write(number, array)
        if number == 0:
            signal.raise_signal(signal.SIGUSR2)


@ranks(2)
@pytest.mark.parametrize("schedule", [Schedule.LocalSGD(1), Schedule.DiLoCo(1)], ids=repr)
def test_a_handler_that_raises_finds_all_weights_replaced(schedule):
    def stop(number, frame):
        raise InterruptedError

    steps, replica = make(schedule), Replica()
    hvd.shutdown()
    previous = signal.signal(signal.SIGUSR2, stop)
    hvd.init()
    weights = Interrupting(replica, tuple(SHAPES))
    try:
        steps.begin(weights.read)
        replica.step(hvd.rank(), 0)
        with pytest.raises(InterruptedError):
            steps.end(weights)
    finally:
        signal.signal(signal.SIGUSR2, previous)
    assert same_everywhere(replica.weights)
    train(steps, replica, 1)
    other = make(schedule, label="undisturbed"), Replica()
    train(*other, 2)
    assert bits(replica.weights) == bits(other[1].weights)


class Failing(ArrayWeights):
    """Weights whose third read fails, once, on rank 1."""

    def __init__(self, replica):
        super().__init__(replica)
        self.left = 3 if hvd.rank() == 1 else -1

    def read(self, number):
        self.left -= 1
        if self.left == 0:
            raise MemoryError("no memory")
        return super().read(number)


@ranks(2)
def test_a_step_that_cannot_begin_has_not_begun():
    """Some anchors would else be older than others, and changes in between count for some."""
    steps, replica = make(Schedule.DiLoCo(2, 1.0, 0.0)), Replica()
    weights = Failing(replica)
    if hvd.rank() == 1:
        with pytest.raises(MemoryError):
            steps.begin(weights.read)
        assert not steps.in_step
        assert steps.state_dict()["outer"] == {}
        replica.weights["a"][...] = 0
    steps.begin(weights.read)
    assert steps.in_step
    for name, entry in steps.state_dict()["outer"].items():
        np.testing.assert_array_equal(entry["anchor"], replica.weights[name])
    replica.__init__()
    steps.load_state_dict({"steps": 0, "outer": {}, "compression": {}})
    train(steps, replica, 2)
    assert_close(replica, models.averaged(2, 2, [2])[hvd.rank()])


@SEVERAL
def test_an_average_in_between_leaves_the_schedule_as_it_is(size):
    steps, replica = make(Schedule.LocalSGD(3)), Replica()
    train(steps, replica, 2)
    steps.average(ArrayWeights(replica))
    assert same_everywhere(replica.weights)
    assert steps.steps == 2
    train(steps, replica, 1)
    assert_close(replica, models.averaged(size, 3, [2, 3])[hvd.rank()])


@SEVERAL
def test_an_average_in_between_is_not_lost_on_the_outer_step(size):
    steps, replica = make(Schedule.DiLoCo(2, 1.0, 0.0)), Replica()
    train(steps, replica, 1)
    steps.average(ArrayWeights(replica))
    train(steps, replica, 1)
    assert_close(replica, models.averaged(size, 2, [1, 2])[hvd.rank()])


@SEVERAL
@pytest.mark.parametrize("done", [2, 3])  # in the middle of a round, and at its end
def test_a_state_goes_on_where_it_was_saved(size, done):
    schedule = Schedule.DiLoCo(3)
    strategy = ErrorFeedback(Compression.fp16)
    whole, replica = make(schedule, strategy=strategy), Replica()
    train(whole, replica, 7)
    first, parted = make(schedule, strategy=strategy), Replica()
    train(first, parted, done)
    state = first.state_dict()
    train(first, Replica(), 1)  # what is saved is a copy
    second = make(schedule, strategy=strategy)
    second.load_state_dict(state)
    train(second, parted, 7 - done)
    assert bits(parted.weights) == bits(replica.weights)
    assert second.steps == 7


@ranks(2)
def test_a_state_of_another_model_is_refused():
    first, replica = make(Schedule.DiLoCo(2)), Replica()
    train(first, replica, 1)
    state = first.state_dict()
    assert {(name, *entry) for name, entry in state["outer"].items()} == {
        (name, "anchor") for name in SHAPES
    }
    other = make(Schedule.DiLoCo(2), names=("a", "b"))
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"the anchor of 'c'.*none of this optimizer's"):
        other.begin(ArrayWeights(replica, ("a", "b")).read)
    state["outer"]["b"]["anchor"] = np.zeros(3)
    del state["outer"]["c"], state["outer"]["d"], state["outer"]["e"], state["outer"]["f"]
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=r"'b', of shape \(3,\), and the parameter is float64\[30"):
        other.begin(ArrayWeights(replica, ("a", "b")).read)


@SEVERAL
def test_ranks_that_differ_learn_it_before_the_first_step(size):
    hvd.init()
    differs = hvd.rank() == 1
    replica = Replica()
    steps = make(Schedule.LocalSGD(3 if differs else 2))
    for _ in range(2):
        with pytest.raises(
            hvd.MismatchError, match=r"schedule is Schedule\.LocalSGD\(every=2\) on rank"
        ):
            steps.begin(ArrayWeights(replica).read)
    names = ("a", "b") if differs else ("a", "c")
    steps = make(Schedule.LocalSGD(2), names=names)
    with pytest.raises(hvd.MismatchError, match=r"parameter 1 is 'c' float64\[4, 5\] on rank"):
        steps.begin(ArrayWeights(replica, names).read)
    steps = make(Schedule.LocalSGD(2))
    if differs:
        steps.load_state_dict({"steps": 1, "outer": {}, "compression": {}})
    with pytest.raises(hvd.MismatchError, match="the number of steps is 0 on rank"):
        steps.begin(ArrayWeights(replica).read)
    assert bits(replica.weights) == bits(Replica().weights)


@SEVERAL
def test_a_failed_exchange_leaves_weights_and_loses_nothing(size):
    """The ranks disagree on how weights travel, which they compare when they exchange them."""
    hvd.init()
    for schedule in (Schedule.DiLoCo(2, 1.0, 0.0), Schedule.LocalSGD(2)):
        own = Compression.fp16 if hvd.rank() == 1 else Compression.none
        steps, replica = make(schedule, strategy=own), Replica()
        train(steps, replica, 1)
        weights = ArrayWeights(replica)
        steps.begin(weights.read)
        replica.step(hvd.rank(), 1)
        before = bits(replica.weights)
        with pytest.raises(hvd.MismatchError, match="compression is none on rank"):
            steps.end(weights)
        assert bits(replica.weights) == before
        assert steps.steps == 2
        steps.options = _options(schedule, Compression.none)
        train(steps, replica, 2)
        assert_close(replica, models.averaged(size, 4, [4])[hvd.rank()])


@ranks(2)
@pytest.mark.parametrize("bad", ["a", "b"])
def test_a_refused_outer_gradient_leaves_what_the_compression_remembers(bad):
    """One of two buckets travels before the other is refused."""
    hvd.init()
    replica = SimpleNamespace(
        weights={"a": np.zeros(8, np.float32), "b": np.zeros(8, np.float64)}, velocity={}
    )
    strategy = ErrorFeedback(TopK(0.25))
    steps = LocalSteps(_options(Schedule.DiLoCo(1, 1.0, 0.0), strategy), "test")
    steps.add([Parameter(name, (8,), each.dtype) for name, each in replica.weights.items()])
    weights = ArrayWeights(replica, tuple(replica.weights))

    def step(last):
        steps.begin(weights.read)
        for name, each in replica.weights.items():
            each -= np.arange(8.0)
            each[7] -= last if name == bad and hvd.rank() else 0.0
        steps.end(weights)

    step(0.0)
    before = steps.state_dict()["compression"]["parameters"]
    with pytest.raises(hvd.GradientError, match=f"the gradient of '{bad}' is not finite on rank 1"):
        step(np.nan)
    after = steps.state_dict()["compression"]["parameters"]
    for name in "ab":
        assert before[name]["residual"].any()
        np.testing.assert_array_equal(after[name]["residual"], before[name]["residual"])
        assert after[name]["exchanges"] == 1


@SEVERAL
def test_parameters_that_come_later_are_exchanged_too(size):
    hvd.init()
    for schedule in (Schedule.LocalSGD(2), Schedule.DiLoCo(2)):
        steps, replica = make(schedule, names=("a", "b")), Replica()
        weights = ArrayWeights(replica, ("a", "b", "c"))
        steps.begin(weights.read)
        replica.step(hvd.rank(), 0, ("a", "b"))
        steps.end(weights)
        steps.add([Parameter("c", SHAPES["c"], np.dtype(np.float64))])
        steps.begin(weights.read)
        replica.step(hvd.rank(), 1, ("a", "b", "c"))
        steps.end(weights)
        for name in ("a", "b", "c"):
            assert len(set(hvd.allgather_object(replica.weights[name].tobytes()))) == 1
        assert (replica.weights["c"] != models.start()["c"]).all()
        late = "e" if hvd.rank() == 1 else "d"
        steps.add([Parameter(late, SHAPES[late], np.dtype(np.float64))])
        with pytest.raises(hvd.MismatchError, match="parameter 3 is 'd'"):
            steps.begin(ArrayWeights(replica, ("a", "b", "c", late)).read)


@ranks(2, 3)
def test_ranks_that_have_joined_do_not_count_in_averages(size):
    hvd.shutdown()
    hvd.init()
    for schedule in (Schedule.LocalSGD(2), Schedule.PartialSync(parts=2)):
        steps, replica = make(schedule), Replica()
        last = hvd.rank() == size - 1
        train(steps, replica, 2 if last else 4)
        hvd.join()
        expected = [Replica() for _ in range(size)]
        for step in range(4):
            here = expected[:-1] if step >= 2 else expected
            models.step_all(here, step)
            if isinstance(schedule, Schedule.PartialSync):
                models.average(here, models.PARTS[step % 2])
            elif step % 2:
                models.average(here)
        assert_close(replica, expected[hvd.rank()])
        train(steps, replica, 2)  # who comes back follows the others
        assert steps.steps == 6
        assert same_everywhere(replica.weights) or schedule == Schedule.PartialSync(parts=2)


@ranks(2)
def test_outer_steps_do_not_go_on_without_those_that_have_joined():
    hvd.shutdown()
    hvd.init()
    steps, replica = make(Schedule.DiLoCo(2)), Replica()
    if hvd.rank() == 0:
        train(steps, replica, 1)
        hvd.join()
    else:
        train(steps, replica, 1)
        with pytest.raises(hvd.HorovodInternalError, match="cannot go on without rank 0"):
            train(steps, replica, 1)
        hvd.join()


@ranks(2)
def test_the_first_step_does_not_go_on_without_those_that_have_joined():
    """They would wait for the others in their first step, and these for them in another one."""
    for schedule in (Schedule.LocalSGD(2), Schedule.PartialSync(parts=2)):
        hvd.shutdown()
        hvd.init()
        steps, replica = make(schedule), Replica()
        if hvd.rank() == 1:
            with pytest.raises(hvd.HorovodInternalError, match="cannot go on without rank 0"):
                train(steps, replica, 1)
        hvd.join()
        train(steps, replica, 2)
        assert steps.steps == 2


@ranks(2)
def test_a_new_world():
    hvd.init()
    steps, replica = make(Schedule.LocalSGD(2)), Replica()
    train(steps, replica, 3)
    hvd.shutdown()
    hvd.init()
    train(steps, replica, 3)
    assert_close(replica, models.local_sgd(2, 6, 2)[hvd.rank()])


@ranks(2)
def test_a_process_set_of_one_rank_exchanges_nothing():
    hvd.init()
    alone = hvd.add_process_set([0])
    if hvd.rank() == 0:
        for schedule in (Schedule.LocalSGD(2), Schedule.PartialSync(parts=2)):
            steps = LocalSteps(_options(schedule, Compression.fp16, process_set=alone), "alone")
            steps.add([Parameter(n, s, np.dtype(np.float64)) for n, s in SHAPES.items()])
            replica, plain = Replica(), Replica()
            train(steps, replica, 2)
            for step in range(2):
                plain.step(0, step)
            assert bits(replica.weights) == bits(plain.weights)
    hvd.remove_process_set(alone)


@ranks(2)
def test_a_restart_keeps_what_changes_are_measured_from():
    """The ranks' weights differ by then, so these could not take its place."""
    schedule = Schedule.DiLoCo(2, 1.0, 0.0)
    steps, replica = make(schedule), Replica()
    undisturbed, expected = make(schedule, label="undisturbed"), Replica()
    train(steps, replica, 1)
    steps.begin(ArrayWeights(replica).read)
    steps.restart()
    assert not steps.in_step
    train(steps, replica, 1)
    train(undisturbed, expected, 2)
    assert bits(replica.weights) == bits(expected.weights)
    assert same_everywhere(replica.weights)


@ranks(2)
def test_an_average_in_between_is_exact_whatever_else_travels_compressed():
    strategy = ErrorFeedback(Compression.fp16)
    steps, replica = make(Schedule.DiLoCo(3), strategy=strategy), Replica()
    train(steps, replica, 1)
    steps.average(ArrayWeights(replica))
    assert_close(replica, models.averaged(2, 1, [1])[hvd.rank()])
    assert steps.state_dict()["compression"] == {}


@ranks(2)
def test_an_infinite_change_is_not_kept_in_the_outer_momentum():
    """All ranks refuse it, and go on once the weights are finite again."""
    steps, replica = make(Schedule.DiLoCo(1, 1.0, 0.9)), Replica()
    train(steps, replica, 1)
    before = {name: weight.copy() for name, weight in replica.weights.items()}
    momentum = steps.state_dict()["outer"]
    weights = ArrayWeights(replica)
    steps.begin(weights.read)
    if hvd.rank() == 1:
        replica.weights["a"].reshape(-1)[0] = np.inf
    with pytest.raises(hvd.GradientError, match="the change of 'a' since the last exchange is not"):
        steps.end(weights)
    for name, entry in steps.state_dict()["outer"].items():
        np.testing.assert_array_equal(entry["momentum"], momentum[name]["momentum"])
    for name, weight in before.items():
        replica.weights[name][...] = weight
    steps.restart()
    train(steps, replica, 1)
    assert same_everywhere(replica.weights)
    assert all(np.isfinite(weight).all() for weight in replica.weights.values())
