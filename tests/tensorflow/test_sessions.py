"""Test graphs for a ``tf.compat.v1.Session``, where only data dependencies order operations."""

import itertools
import time

import numpy as np
import pytest

from tests.harness import ranks, run_script

pytest.importorskip("tensorflow")

import tensorflow as tf

import hvdlite.tensorflow as hvd
from tests.tensorflow.modes import close

v1 = tf.compat.v1
RATE, MOMENTUM, STEPS, BATCH, ROWS = 0.05, 0.9, 3, 4, 5


def session(threads=1):
    config = v1.ConfigProto(inter_op_parallelism_threads=threads, intra_op_parallelism_threads=1)
    return v1.Session(config=config)


def batches(size):
    """Return inputs, rows of a table, and targets for each step and rank."""
    draw = np.random.default_rng(3)
    while True:
        yield (
            draw.normal(size=(size, BATCH, 3)),
            draw.integers(0, ROWS, (size, BATCH)),
            draw.normal(size=(size, BATCH)),
        )


def single_process(size, steps):
    """Return the weights after steps on all batches, from closed-form gradients in float64."""
    weights = {"w": np.ones(3), "b": np.zeros(1), "table": np.ones(ROWS)}
    moments = {name: np.zeros_like(weight) for name, weight in weights.items()}
    for x, rows, y in itertools.islice(batches(size), steps):
        x, rows, y = x.reshape(-1, 3), rows.ravel(), y.ravel()
        error = x @ weights["w"] + weights["b"] + weights["table"][rows] - y
        slope = 2 * error / error.size
        table = np.zeros(ROWS)
        np.add.at(table, rows, slope)
        gradients = {"w": x.T @ slope, "b": slope.sum(keepdims=True), "table": table}
        for name, gradient in gradients.items():
            # Of a table, a step is made on the rows that were looked up.
            touched = np.unique(rows) if name == "table" else slice(None)
            moments[name][touched] = MOMENTUM * moments[name][touched] + gradient[touched]
            weights[name][touched] -= RATE * moments[name][touched]
    return weights


def build(sparse_as_dense=False):
    """Build a model with both kinds of variables and two dtypes, so that there are two buckets."""
    off = 10.0 * hvd.rank()
    options = {"initializer": v1.constant_initializer(1.0 + off), "dtype": tf.float32}
    w = v1.get_variable("w", (3,), use_resource=False, **options)
    table = v1.get_variable("table", (ROWS,), use_resource=True, **options)
    start = v1.constant_initializer(off)
    b = v1.get_variable("b", (1,), tf.float64, start, use_resource=True)
    x = v1.placeholder(tf.float32, (None, 3))
    rows, y = v1.placeholder(tf.int64, (None,)), v1.placeholder(tf.float32, (None,))
    prediction = tf.linalg.matvec(x, w) + tf.cast(b, tf.float32) + tf.gather(table, rows)
    loss = tf.reduce_mean((prediction - y) ** 2)
    optimizer = v1.train.MomentumOptimizer(RATE, MOMENTUM)
    optimizer = hvd.DistributedOptimizer(optimizer, sparse_as_dense=sparse_as_dense)
    step = v1.train.get_or_create_global_step()
    train = optimizer.minimize(loss, step)
    return {"w": w, "b": b, "table": table}, (x, rows, y), (train, hvd.allreduce(loss), loss)


@ranks(2)
def test_training_equals_one_process(size, tmp_path):
    """Start with a hook, resume from rank 0's checkpoint; with one thread and with two."""
    hvd.init()
    data = batches(size)
    for done, threads in ((0, 1), (STEPS, 2)):
        with tf.Graph().as_default():
            weights, places, fetched = build()
            config = v1.ConfigProto(inter_op_parallelism_threads=threads)
            with v1.train.MonitoredTrainingSession(
                checkpoint_dir=str(tmp_path) if hvd.rank() == 0 else None,
                hooks=[hvd.BroadcastGlobalVariablesHook(0)],
                config=config,
                log_step_count_steps=None,
                save_summaries_steps=None,
                save_summaries_secs=None,
            ) as running:
                for inputs in itertools.islice(data, STEPS):
                    feed = dict(zip(places, (part[hvd.rank()] for part in inputs), strict=True))
                    _, average, loss = running.run(fetched, feed)
                    found = running.run(weights)
                    losses = hvd.allgather_object(float(loss))
                    assert close(average, np.mean(losses), 1e-5)
        for name, expected in single_process(size, done + STEPS).items():
            assert close(found[name], expected, 1e-5), name


@ranks(2)
def test_sparse_gradients_as_dense_ones():
    hvd.init()
    with tf.Graph().as_default(), session() as running:
        weights, places, fetched = build(sparse_as_dense=True)
        start = hvd.broadcast_global_variables(0)
        running.run(v1.global_variables_initializer())
        running.run(start)
        inputs = next(batches(2))
        feed = dict(zip(places, (part[hvd.rank()] for part in inputs), strict=True))
        running.run(fetched, feed)
        for name, expected in single_process(2, 1).items():
            assert close(running.run(weights[name]), expected, 1e-5), name


@ranks(2)
def test_operations_that_nothing_orders(size):
    """They become ready in a different order on each rank, in a session with one thread."""
    hvd.init()
    rank, count = hvd.rank(), 6
    alone = hvd.add_process_set([0])

    def late(number):
        def wait(x):
            time.sleep(0.02 * ((number * (rank + 1) + rank) % count))
            return x

        value = tf.constant([1.0 + rank + 100.0 * number])
        return tf.ensure_shape(tf.numpy_function(wait, [value], tf.float32), [1])

    with tf.Graph().as_default():
        variable = tf.Variable([2.0])
        part_ways = variable.assign([2.0 + rank])
        with hvd.DistributedGradientTape(tf.GradientTape(), process_set=alone) as tape:
            loss = tf.reduce_sum(variable * (1.0 + rank))
        own = tape.gradient(loss, variable)
        tapes = [hvd.DistributedGradientTape(tf.GradientTape()) for _ in range(2)]
        losses = []
        for number, tape in enumerate(tapes):
            with tape:
                losses.append(tf.reduce_sum(variable * late(number)))
        gradients = [
            tape.gradient(loss, variable) for tape, loss in zip(tapes, losses, strict=True)
        ]
        terms = [late(number) for number in range(count)]
        sums = [hvd.allreduce(term, op=hvd.Sum) for term in terms]
        slopes = tf.gradients(sums[3], terms[3])
        grouped = hvd.grouped_allreduce([late(0), late(1)], op=hvd.Max)
        rows = hvd.allgather(tf.fill([rank + 1], rank))
        first = hvd.broadcast(late(2), 1)
        sent, _ = hvd.alltoall(tf.range(size) + 10 * rank, splits=[1] * size)
        part = hvd.reducescatter(tf.range(size), op=hvd.Sum)
        met, joined, ranks_there = hvd.barrier(), hvd.join(), hvd.size_op()
        values = hvd.broadcast_([variable], 1)
        with session() as running:
            running.run(v1.global_variables_initializer())
            fetched = [gradients, sums, grouped, rows, first, sent, slopes, part, own]
            for _ in range(2):
                found = running.run(fetched)
            running.run(part_ways)
            running.run(met)  # one after the other: a rank that joined meets no more
            running.run(joined)
            assert running.run([values, ranks_there]) == [[[3.0]], size]
            assert running.run(variable) == [3.0]
    hvd.remove_process_set(alone)
    mean = np.arange(1, size + 1).mean()
    assert found[0] == [[mean], [mean + 100.0]]
    assert found[1] == [[size * (mean + 100.0 * number)] for number in range(count)]
    assert found[2] == [[float(size)], [size + 100.0]]
    assert found[3].tolist() == [each for each in range(size) for _ in range(each + 1)]
    assert found[4] == [202.0]
    assert found[5].tolist() == [rank + 10 * other for other in range(size)]
    assert found[6] == [[float(size)]]
    assert found[7].tolist() == [size * rank]
    assert found[8].tolist() == [1.0 + rank]


@ranks(2)
def test_errors_and_what_is_refused():
    hvd.init()
    rank = hvd.rank()
    with tf.Graph().as_default():
        variable = tf.Variable(tf.ones(2 + rank))
        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            loss = tf.reduce_sum(variable)
        gradient, fine = tape.gradient(loss, variable), hvd.allreduce(tf.ones(1), op=hvd.Sum)
        broadcast = hvd.broadcast_variables([variable], 0)
        with session(2) as running:
            running.run(v1.global_variables_initializer())
            for fetch in (gradient, broadcast):
                with pytest.raises(hvd.MismatchError, match="on rank 1"):
                    running.run(fetch)
                assert running.run(fine) == [2.0]
    with pytest.raises(RuntimeError, match=r"call hvd.broadcast_variables\(model.variables"):
        hvd.broadcast_global_variables(0)


SCRIPT = """
import hvdlite.horovod

hvdlite.horovod.install()
import horovod.tensorflow as hvd
import tensorflow.compat.v1 as tf
from horovod.tensorflow.util import _executing_eagerly, refs_to_vars, vars_to_refs

tf.disable_v2_behavior()
hvd.init()
assert not _executing_eagerly()
assert hvd.gpu_available("tensorflow") == bool(tf.config.list_physical_devices("GPU"))
try:
    import horovod.tensorflow.data.compute_service
except ModuleNotFoundError as error:
    assert "tf.data.experimental.service" in str(error)
else:
    raise AssertionError("there is no data service")

w = tf.get_variable("w", 2, initializer=tf.constant_initializer(1.0 + hvd.rank()))
assert refs_to_vars(vars_to_refs([w]))[0] is w
loss = tf.reduce_sum(w) * (1.0 + hvd.rank())
optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(0.5), name="Distributed")
train = optimizer.apply_gradients(optimizer.compute_gradients(loss, [w]))
start, total = hvd.broadcast_global_variables(0), hvd.allreduce(loss, op=hvd.Sum, name="loss")
with tf.Session(config=tf.ConfigProto(inter_op_parallelism_threads=1)) as session:
    session.run(tf.global_variables_initializer())
    session.run(start)
    for step in range(3):
        assert session.run(total) == (1 + 2) * 2 * (1.0 - 0.75 * step)
        session.run(train)
    print("trained", session.run(w).tolist(), flush=True)
"""


@pytest.mark.slow
def test_script_of_tensorflow_1():
    """Disable eager mode, resource variables and new control flow; use names of old scripts."""
    done = run_script(SCRIPT, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines().count("trained [-1.25, -1.25]") == 2


@ranks(2)
@pytest.mark.parametrize("what", ["rate", "weight"])
def test_replicas_that_part_are_found(what):
    hvd.init()
    with tf.Graph().as_default(), session() as running:
        weight = v1.get_variable("weight", initializer=tf.ones(3))
        plain = v1.train.GradientDescentOptimizer(0.125)
        step = hvd.DistributedOptimizer(plain).minimize(tf.reduce_sum(weight**2))
        change = weight[1].assign(5.0)
        running.run(v1.global_variables_initializer())
        for _ in range(3):
            running.run(step)
        if hvd.rank() == 1:
            if what == "rate":
                plain._learning_rate = 0.25
            else:
                running.run(change)
        with pytest.raises(tf.errors.FailedPreconditionError) as caught:
            running.run(step)
    words = {
        "rate": "learning_rate is 0.125 on rank 0, 0.25 on rank 1",
        "weight": "element [1] of the weight 'weight' is ",
    }
    assert words[what] in str(caught.value)
    assert "(equal in step 3, apart in step 4)" in str(caught.value)
