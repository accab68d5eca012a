"""Test every kind of error, which ranks get it, and that the next call works."""

import functools
import pickle

import numpy as np
import pytest

from tests.harness import ranks, run_script

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import hvdlite
import hvdlite.tensorflow as hvd
from hvdlite.errors import RankGoneError
from hvdlite.tensorflow import errors
from hvdlite.tensorflow.tensors import run
from tests.tensorflow.modes import each_mode, equal, in_mode, reduced


def alive(size):
    return hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy() == [size]


def all_raise(kinds, said, function, mode):
    """Return the error that a function raises; it must be an instance of all given classes."""
    with pytest.raises(kinds[0], match=said) as caught:
        in_mode(mode, function)()
    for kind in kinds:
        assert isinstance(caught.value, kind), kind
    return caught.value


MISMATCH = (tf.errors.FailedPreconditionError, hvd.MismatchError, hvd.HorovodInternalError)
ARGUMENT = (tf.errors.InvalidArgumentError, ValueError)
INTERNAL = (hvd.HorovodInternalError, tf.errors.UnknownError)


@ranks(2)
@each_mode
def test_ranks_disagree(size, mode):
    hvd.init()
    rank = hvd.rank()
    other = min(rank, 1)
    same, own = tf.Variable([1.0], name="same"), tf.Variable(tf.ones(2 + other), name="own")
    layer = hvd.SyncBatchNormalization()
    layer.build((None, 2 + other))

    def gradient(sources):
        return reduced(lambda: tf.add_n(list(map(tf.reduce_sum, sources))), sources)

    cases = [
        (r"'x'.*shape is \(2,\)", lambda: hvd.allreduce(tf.ones(2 + other), name="x")),
        ("dtype is", lambda: hvd.allreduce(tf.ones(2, (tf.float32, tf.int32)[other]), name="x")),
        ("op is", lambda: hvd.allreduce(tf.ones(2), op=(hvd.Sum, hvd.Max)[other], name="x")),
        ("factor", lambda: hvd.allreduce(tf.ones(2), prescale_factor=1.0 + other, name="x")),
        ("root_rank is 0", lambda: hvd.broadcast(tf.ones(2), other, name="x")),
        ("the shape after its first", lambda: hvd.allgather(tf.ones((2, 2 + other)), name="x")),
        ("the shape after its first", lambda: hvd.alltoall(tf.ones((2, 2 + other)), name="x")),
        ("number of arrays is", lambda: hvd.grouped_allreduce([tf.ones(1)] * (1 + other))),
        (r"'own', 'float32\[2\]'", lambda: hvd.broadcast_variables([same, own], 0)),
        (r"'same', 'float32\[1\]'", lambda: hvd.broadcast_variables([same] * (1 + other), 0)),
        ("its variables", lambda: hvd.broadcast_([own], 0, name="x")),
        (r"'own' float32\[2\] on rank 0, 'own' float32\[3\]", lambda: gradient([same, own])),
        ("'same#1' float32", lambda: gradient([same] * (1 + other))),
        ("the shape after its first", lambda: layer(tf.ones((4, 2 + other)), training=True)),
    ]
    for words, disagree in cases:
        error = all_raise(MISMATCH, f"(?s)disagree.*{words}", disagree, mode)
        assert "on rank 0" in error.message, words
        assert "hvdlite/engine" not in error.message, words
        assert alive(size), words
    if mode == "eager":
        all_raise(MISMATCH, "root_rank", lambda: hvd.broadcast_object(1, other, name="x"), mode)
        assert alive(size)


@ranks(2)
@each_mode
def test_bad_argument_of_one_rank(size, mode):
    """This rank gets its error at once; the others continue."""
    hvd.init()
    variable, number = tf.Variable([1.0]), tf.ones(1, tf.complex64)
    if hvd.rank() == size - 1:  # by names, because the others do not count what it does
        for said, wrong in (
            (f"root_rank={size} is not a rank", lambda: hvd.broadcast(tf.ones(1), size, "b")),
            ("root_rank=-1 is not a rank", lambda: hvd.broadcast_([variable], -1, name="w")),
            (
                "Max is not defined for dtype complex64",
                lambda: hvd.allreduce(number, op=hvd.Max, name="c"),
            ),
            (
                "splits must not be negative",
                lambda: hvd.alltoall(tf.ones(size), [size] * size, "s"),
            ),
            ("no process set with the id 7", lambda: hvd.size_op(7)),
            ("no process set with the id 7", lambda: hvd.process_set_included_op(7)),
        ):
            all_raise(ARGUMENT, said, wrong, mode)
        if mode == "eager":
            all_raise(
                ARGUMENT, "is not a rank", lambda: hvd.broadcast_object(1, size, name="o"), mode
            )
            all_raise(
                ARGUMENT, "is not a rank", lambda: hvd.broadcast_object_fn(size, None, "f")(1), mode
            )
    hvd.barrier(name="after")
    assert hvd.allreduce(tf.ones(1), op=hvd.Sum, name="after").numpy() == [size]


@ranks(2)
@each_mode
def test_name_that_is_on_its_way(size, mode):
    hvd.init()
    name = f"twice {mode}"
    if hvd.rank() == 0:
        first = hvdlite.allreduce_async(np.ones(2, np.float32), name=name, op=hvd.Sum)
        again = lambda: hvd.allreduce(tf.ones(2), name=name)  # noqa: E731
        all_raise(ARGUMENT, name, again, mode)
    hvd.barrier(name="refused")
    if hvd.rank() == 0:
        assert first.wait().tolist() == [size, size]
    else:
        assert equal(hvd.allreduce(tf.ones(2), op=hvd.Sum, name=name), [size, size])
    assert alive(size)


@ranks(2)
@each_mode
def test_rank_that_is_gone(size, mode):
    hvd.init()
    variable = tf.Variable([1.0])

    def gradient():
        return reduced(lambda: tf.reduce_sum(variable), variable)

    for call in (gradient, lambda: hvd.allreduce(tf.ones(2))):
        if hvd.rank() < size - 1:
            error = all_raise(INTERNAL, f"rank {size - 1}", call, mode)
            assert not isinstance(error, hvd.MismatchError)
        hvd.shutdown()
        hvd.init()
        assert alive(size)


@ranks(1)
@each_mode
def test_kinds_of_errors_of_the_core(mode):
    hvd.init()

    def failing(error):
        def function():
            raise error

        return lambda: run(function, [], [])

    gone = all_raise(INTERNAL, "rank 1 has ended", failing(RankGoneError("rank 1 has ended")), mode)
    assert not isinstance(gone, hvd.MismatchError)
    all_raise(INTERNAL, "MPI", failing(hvd.HorovodInternalError("MPI failed")), mode)
    all_raise(MISMATCH, "differ", failing(hvd.MismatchError("differ")), mode)
    all_raise(ARGUMENT, "splits", failing(ValueError("bad splits")), mode)
    with pytest.raises(TypeError if mode == "eager" else tf.errors.InvalidArgumentError):
        in_mode(mode, failing(TypeError("not ours")))()
    with pytest.raises(KeyError if mode == "eager" else tf.errors.UnknownError) as caught:
        in_mode(mode, failing(KeyError("not ours")))()
    assert not isinstance(caught.value, hvd.HorovodInternalError)


@ranks(1)
def test_shutdown_since_the_graph_was_traced():
    hvd.init()
    function = tf.function(lambda: hvd.allreduce(tf.ones(1)))
    function()
    hvd.shutdown()
    try:
        all_raise(ARGUMENT, r"call hvd.init\(\) first", function, "eager")
    finally:
        hvd.init()


@ranks(1)
def test_errors_pass_through_autograph_keras_and_pickle():
    hvd.init()

    class Layer(keras.layers.Layer):
        def call(self, inputs):
            return hvd.broadcast(inputs, 5)

    said = "root_rank=5 is not a rank"
    error = all_raise(ARGUMENT, said, lambda: Layer()(tf.ones(1)), "eager")
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1), Layer()])
    model.compile("sgd", "mse", jit_compile=False)
    all_raise(
        ARGUMENT, said, lambda: model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0), "eager"
    )

    @tf.function
    def traced():
        hvd.broadcast_object(1)

    with pytest.raises(RuntimeError, match=r"not inside tf\.function"):
        traced()
    for kind in (errors.MismatchError, errors.HorovodInternalError, errors.ArgumentError):
        copied = pickle.loads(pickle.dumps(kind(None, None, "a message")))
        assert type(copied) is kind
        assert str(copied) == copied.message == str(kind("a message")) == "a message"
    assert said in error.message


def test_the_text_of_a_graphs_error_is_the_line_that_helps(caplog):
    """TensorFlow puts it between where the operation was made and where it has run."""
    own, installed = hvdlite.__path__[0], tf.__path__[0]
    made = "".join(
        f'  File "{file}", line {number}, in f\n\n'
        for number, file in enumerate(("/home/train.py", f"{installed}/a.py", f"{own}/b.py"), 3)
    )
    said = "MismatchError: the ranks disagree on 'x': shape"
    ran = f'Traceback (most recent call last):\n\n  File "{own}/c.py", line 1, in g\n\t [[node]]'
    whole = f"Detected at node PyFunc defined at (most recent call last):\n{made}{said}\n{ran}"
    error = errors.named_by(tf.errors.UnknownError(None, None, whole))
    assert isinstance(error, errors.MismatchError)
    assert error.message == f"{said} (an operation of /home/train.py:3)"
    caplog.set_level("DEBUG", "hvdlite")
    assert errors.named_by(tf.errors.UnknownError(None, None, whole)).message == whole


STRATEGY = """
import tensorflow as tf
import hvdlite.tensorflow as hvd

cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
hvd.init()
both, one = (tf.distribute.MirroredStrategy(cpus) for cpus in (["CPU:0", "CPU:1"], ["CPU:0"]))
variable = tf.Variable([1.0])

def gradient():
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        loss = tf.reduce_sum(variable)
    return tape.gradient(loss, variable)

calls = {
    "allreduce": lambda: hvd.allreduce(tf.ones(1)),
    "allgather": lambda: hvd.allgather(tf.ones(1)),
    "broadcast": lambda: hvd.broadcast(tf.ones(1), 0),
    "broadcast_variables": lambda: hvd.broadcast_variables([variable], 0),
    "broadcast_object": lambda: hvd.broadcast_object(1),
    "tape": gradient,
}

def refused(function):
    try:
        function()
    except tf.errors.InvalidArgumentError as error:
        assert "MirroredStrategy has 2 replicas" in str(error), error
        assert "leave the strategy out" in str(error), error
        return True
    return False

with both.scope():
    for name, call in calls.items():
        assert refused(call), name
for name in ("allreduce", "tape"):
    assert refused(lambda: both.run(calls[name])), name
    assert refused(tf.function(lambda: both.run(calls[name]))), name
with one.scope():
    for call in calls.values():
        call()
assert float(one.run(calls["tape"])[0]) == 1.0
assert float(gradient()[0]) == 1.0
print("refused and alive")
"""


@pytest.mark.slow
def test_strategies_with_several_replicas_are_refused():
    done = run_script(STRATEGY, 1)
    assert done.returncode == 0, done.stderr
    assert "refused and alive" in done.stdout


@ranks(2)
def test_arguments_of_a_wrong_kind():
    hvd.init()
    ones = tf.ones(2)
    for call, words in (
        (lambda: hvd.broadcast(ones, "0"), "root_rank='0' is of type str"),
        (lambda: hvd.allreduce(ones, name=5), "name=5 is of type int"),
        (lambda: hvd.allreduce(ones, prescale_factor="2"), "prescale_factor='2' is not a finite"),
        (lambda: hvd.alltoall(ones, splits=[1.0, 1.0]), "splits must be 2 integers"),
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            call()
    with pytest.raises(TypeError, match="expected a dense tensor, found a RaggedTensor"):
        hvd.allreduce(tf.ragged.constant([[1.0], [2.0, 3.0]]))
    for call in (hvd.allreduce, hvd.allgather, lambda text: hvd.broadcast(text, 0)):
        with pytest.raises(TypeError, match="dtype string cannot be exchanged"):
            call(tf.constant(["a"]))
    with pytest.raises(ValueError, match="needs one tensor at least"):
        hvd.grouped_allgather([])
    adasum = functools.partial(hvd.reducescatter, ones, op=hvd.Adasum)
    for call in (adasum, tf.function(adasum)):
        with pytest.raises(NotImplementedError, match="Adasum is not defined for pieces") as caught:
            call()
        assert isinstance(caught.value, tf.errors.InvalidArgumentError)
    for tensor in (ones, tf.Variable(ones)):
        narrow, context = hvd.Compression.fp16.compress(tensor)
        assert narrow.dtype == tf.float16
        assert hvd.Compression.fp16.decompress(narrow, context).dtype == tf.float32
    assert hvd.Compression.fp16.compress(tf.constant([1]))[0].dtype == tf.int32
    assert hvd.allreduce(ones, op=hvd.Sum).numpy().tolist() == [2, 2]
