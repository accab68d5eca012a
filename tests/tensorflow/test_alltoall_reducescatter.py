"""Test alltoall, reducescatter, groups, join and process sets, eagerly and inside tf.function."""

import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("tensorflow")

import tensorflow as tf

import hvdlite.tensorflow as hvd
from tests.tensorflow.modes import reduced


def both_ways(function):
    """Return a function and its ``tf.function``."""
    return [function, tf.function(function)]


@ranks(2, 3)
def test_alltoall(size):
    hvd.init()
    rank = hvd.rank()
    for call in both_ways(lambda tensor: hvd.alltoall(tensor)):
        result = call(tf.range(2 * size) + 100 * rank)
        expected = [100 * r + 2 * rank + n for r in range(size) for n in (0, 1)]
        assert result.numpy().tolist() == expected
    for call in both_ways(lambda tensor, splits: hvd.alltoall(tensor, splits)):
        splits = tf.constant([(rank + r) % 3 for r in range(size)])
        rows, received = call(tf.fill((int(tf.reduce_sum(splits)), 2), float(rank)), splits)
        assert received.dtype == tf.int32
        assert received.numpy().tolist() == [(rank + r) % 3 for r in range(size)]
        assert rows[:, 0].numpy().tolist() == [
            r for r in range(size) for _ in range((rank + r) % 3)
        ]


@ranks(2)
def test_gradients_of_an_alltoall_go_back(size):
    hvd.init()
    rank = hvd.rank()
    splits = [(rank + r) % 3 for r in range(size)]

    def gradient(tensor):
        with tf.GradientTape() as tape:
            tape.watch(tensor)
            rows, _ = hvd.alltoall(tensor, splits)
            loss = tf.reduce_sum(rows) * (rank + 1)
        return tape.gradient(loss, tensor)

    for call in both_ways(gradient):
        found = call(tf.zeros((sum(splits), 2)))
        assert found[:, 1].numpy().tolist() == [
            r + 1 for r in range(size) for _ in range(splits[r])
        ]


@ranks(2, 3)
def test_reducescatter_and_its_gradient(size):
    hvd.init()
    rank = hvd.rank()
    rows = 2 if rank == 0 else 1
    for op, expected, factor in ((hvd.Sum, size, size), (hvd.Average, 1, 1)):

        def reduced(tensor, op=op):
            with tf.GradientTape() as tape:
                tape.watch(tensor)
                part = hvd.reducescatter(tensor, op=op, prescale_factor=2.0, postscale_factor=0.5)
                loss = tf.reduce_sum(part) * (rank + 1)
            return part, tape.gradient(loss, tensor)

        for call in both_ways(reduced):
            part, gradient = call(tf.ones((size + 1, 2)))
            assert part.numpy().tolist() == [[expected] * 2] * rows
            weights = [factor * (r + 1) for r in range(size) for _ in range(1 + (r == 0))]
            assert gradient[:, 0].numpy().tolist() == weights
    compressed = hvd.reducescatter(tf.ones(size), compression=hvd.Compression.fp16, op=hvd.Sum)
    assert compressed.numpy().tolist() == [size]


@ranks(2)
def test_groups(size):
    hvd.init()
    rank = hvd.rank()

    def grouped(first, second):
        reduced = hvd.grouped_allreduce([first, second], op=hvd.Sum)
        gathered = hvd.grouped_allgather([first, second[: rank + 1]])
        scattered = hvd.grouped_reducescatter([tf.ones(size), tf.ones(2 * size)], op=hvd.Sum)
        return reduced, gathered, scattered

    for call in both_ways(grouped):
        reduced, gathered, scattered = call(tf.fill((2,), rank + 1.0), tf.range(3))
        assert reduced[0].numpy().tolist() == [size * (size + 1) / 2] * 2
        assert reduced[1].numpy().tolist() == [0, size, 2 * size]
        assert gathered[0].numpy().tolist() == [r + 1.0 for r in range(size) for _ in range(2)]
        assert gathered[1].numpy().tolist() == [n for r in range(size) for n in range(r + 1)]
        assert [part.numpy().tolist() for part in scattered] == [[size], [size, size]]


@ranks(2)
def test_gradients_through_groups(size):
    hvd.init()
    rank = hvd.rank()

    def gradients(first, second, third):
        with tf.GradientTape() as tape:
            tape.watch([first, second, third])
            (reduced,) = hvd.grouped_allreduce([first], op=hvd.Sum)
            (gathered,) = hvd.grouped_allgather([second])
            (scattered,) = hvd.grouped_reducescatter([third])
            parts = [tf.reduce_sum(part) for part in (reduced, gathered, scattered)]
            loss = tf.add_n(parts) * (rank + 1)
        return tape.gradient(loss, [first, second, third])

    for call in both_ways(gradients):
        first, second, third = call(tf.ones(2), tf.ones((rank + 1, 2)), tf.ones(size))
        assert first.numpy().tolist() == [size * (size + 1) / 2] * 2
        np.testing.assert_allclose(second.numpy(), (size + 1) / 2)
        assert third.numpy().tolist() == [r + 1.0 for r in range(size)]


@ranks(2)
def test_a_gradient_of_a_function_with_integers_in_its_groups(size):
    hvd.init()

    @tf.function
    def grouped(first, labels):
        reduced, _ = hvd.grouped_allreduce([first, labels], op=hvd.Sum)
        _, gathered = hvd.grouped_allgather([labels, first])
        scattered, _ = hvd.grouped_reducescatter([first, labels])
        return tf.reduce_sum(reduced) + tf.reduce_sum(gathered) + tf.reduce_sum(scattered)

    first = tf.ones(2)
    with tf.GradientTape() as tape:
        tape.watch(first)
        loss = grouped(first, tf.range(2))
    assert tape.gradient(loss, first).numpy().tolist() == [size + 1.0 + 1.0] * 2


@ranks(2)
def test_slices_in_a_group(size):
    hvd.init()
    slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([hvd.rank()]), tf.constant([size, 2]))
    gathered, dense = hvd.grouped_allreduce([slices, tf.ones(1)], op=hvd.Sum, name="mixed")
    assert tf.convert_to_tensor(gathered).numpy().tolist() == [[1.0, 1.0]] * size
    assert dense.numpy().tolist() == [size]


@pytest.mark.slow
@ranks(3)
def test_process_sets():
    hvd.shutdown()
    hvd.init()
    pair = hvd.add_process_set([0, 2])
    rank = hvd.rank()
    assert hvd.size_op(pair.process_set_id).numpy() == 2
    assert hvd.process_set_included_op(pair.process_set_id).numpy() == (rank != 1)
    with pytest.raises(ValueError, match="no process set with the id 7"):
        hvd.size_op(7)
    if not pair.included():
        for call in both_ways(lambda: hvd.allreduce(tf.ones(1), process_set=pair)):
            with pytest.raises(tf.errors.InvalidArgumentError, match="rank 1 is not in"):
                call()
    else:

        def collectives(own):
            return (
                hvd.allreduce(own, op=hvd.Sum, process_set=pair),
                hvd.allgather(own, process_set=pair),
                hvd.broadcast(own, 2, process_set=pair),
                hvd.alltoall(tf.concat([own, own], 0), process_set=pair),
                hvd.grouped_allreduce([own], op=hvd.Sum, process_set=pair)[0],
            )

        for call in both_ways(collectives):
            results = call(tf.constant([float(rank)]))
            assert [result.numpy().tolist() for result in results] == [
                [2.0],
                [0.0, 2.0],
                [2.0],
                [0.0, 2.0],
                [2.0],
            ]
        weights = tf.Variable([float(rank)])
        hvd.broadcast_variables([weights], 2, process_set=pair)
        assert weights.numpy() == [2.0]
        assert hvd.broadcast_object(rank, 2, process_set=pair) == 2
        assert hvd.allgather_object(rank, process_set=pair) == [0, 2]

        def gradients():
            loss = lambda: tf.reduce_sum(weights * (rank + 1.0))  # noqa: E731
            return reduced(loss, weights, process_set=pair)

        for call in both_ways(gradients):
            assert call().numpy().tolist() == [2.0]
        slices = tf.IndexedSlices(tf.ones((1, 2)), tf.constant([rank]), tf.constant([3, 2]))
        average = tf.convert_to_tensor(hvd.allreduce(slices, process_set=pair))
        assert average.numpy()[:, 0].tolist() == [0.5, 0.0, 0.5]
    hvd.barrier()
    assert hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy() == [3.0]


@ranks(2)
def test_join(size):
    hvd.init()
    rank = hvd.rank()
    weights = tf.Variable([1.0, 2.0])

    @tf.function
    def gradient(value):
        return reduced(lambda: tf.reduce_sum(weights * value), weights)

    for step in range(rank + 1):
        here = [r for r in range(size) if r >= step]
        total = hvd.allreduce(tf.ones(1), op=hvd.Sum, name=f"step {step}")
        assert total.numpy() == [len(here)]
        average = gradient(tf.constant(rank + 1.0))
        np.testing.assert_allclose(average, sum(r + 1.0 for r in here) / size, rtol=1e-6)
    for call in both_ways(lambda: hvd.join()):
        last = call()
        assert last.dtype == tf.int32
        assert 0 <= last.numpy() < size
