import logging

import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("tensorflow")

import tensorflow as tf

import hvdlite.tensorflow as hvd
from tests.tensorflow.modes import close, each_mode, equal, in_mode

DTYPES = [
    tf.uint8,
    tf.int8,
    tf.uint16,
    tf.int16,
    tf.uint32,
    tf.int32,
    tf.uint64,
    tf.int64,
    tf.float16,
    tf.bfloat16,
    tf.float32,
    tf.float64,
    tf.complex64,
    tf.complex128,
]
SHAPES = [(), (0,), (1,), (7,), (3, 5), (2, 0, 3)]


@ranks(2)
@each_mode
def test_sum_of_every_dtype_and_shape(size, mode):
    hvd.init()
    tensors = [
        tf.constant(np.full(shape, hvd.rank() + 1, dtype.as_numpy_dtype))
        for dtype in DTYPES
        for shape in SHAPES
    ]
    results = in_mode(mode, lambda: [hvd.allreduce(each, op=hvd.Sum) for each in tensors])()
    for tensor, result in zip(tensors, results, strict=True):
        assert result.dtype == tensor.dtype
        expected = np.full(tensor.shape, size * (size + 1) // 2)
        assert equal(result, expected), tensor
        assert equal(tensor, np.full(tensor.shape, hvd.rank() + 1))


@ranks(2)
@each_mode
def test_min_max_product_and_bool(size, mode):
    hvd.init()
    number = tf.constant([hvd.rank() + 1, -hvd.rank()])
    flags = tf.constant([hvd.rank() == 0, True, False])

    def reduce():
        numbers = [hvd.allreduce(number, op=op) for op in (hvd.Min, hvd.Max, hvd.Product)]
        return numbers, [hvd.allreduce(flags, op=op) for op in (hvd.Max, hvd.Min)]

    (least, most, product), (anywhere, everywhere) = in_mode(mode, reduce)()
    assert least.numpy().tolist() == [1, 1 - size]
    assert most.numpy().tolist() == [size, 0]
    assert product.numpy().tolist() == [np.prod(range(1, size + 1)), 0]
    assert anywhere.numpy().tolist() == [True, True, False]
    assert everywhere.numpy().tolist() == [size == 1, True, False]


@ranks(2)
@each_mode
def test_average_is_the_default_and_factors_scale(size, mode):
    hvd.init()
    tensor = tf.fill([5], float(hvd.rank()))

    def reduce():
        factors = {"prescale_factor": 3.0, "postscale_factor": 0.5}
        return hvd.allreduce(tensor), hvd.allreduce(tensor, op=hvd.Sum, **factors)

    average, scaled = in_mode(mode, reduce)()
    assert close(average, np.full(5, (size - 1) / 2))
    assert close(scaled, np.full(5, 1.5 * size * (size - 1) / 2))


@ranks(2)
def test_average_argument_is_deprecated(size):
    hvd.init()
    with pytest.warns(DeprecationWarning, match="average= is deprecated") as caught:
        total = hvd.allreduce(tf.ones(2), average=False)
    assert caught[0].filename == __file__
    assert equal(total, [size, size])
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(tf.ones(2), average=True, op=hvd.Sum)


@ranks(2)
@each_mode
def test_compression_rounds_what_travels(size, mode):
    hvd.init()
    tensor = tf.range(1.0, 2.0, 0.01) + hvd.rank()
    expected = np.arange(1.0, 2.0, 0.01) + (size - 1) / 2
    for compression, unit in ((hvd.Compression.fp16, 2**-11), (hvd.Compression.bf16, 2**-8)):
        function = in_mode(mode, lambda c=compression: hvd.allreduce(tensor, compression=c))
        result = function()
        assert result.dtype == tf.float32
        assert close(result, expected, 2 * unit)
        assert not close(result, expected, unit / 64)
    with pytest.raises(TypeError, match="is no compression"):
        hvd.allreduce(tensor, compression="fp16")


@ranks(2, 3)
@each_mode
def test_allgather_of_uneven_rows_and_scalars(size, mode):
    hvd.init()
    rank = hvd.rank()
    rows, nothing = tf.fill([rank, 2], rank), tf.zeros((0, 3), tf.bfloat16)
    own = [rows, tf.constant(rank == 0), nothing]
    whole, flags, empty = in_mode(mode, lambda: [hvd.allgather(each) for each in own])()
    assert whole.shape == (size * (size - 1) // 2, 2)
    assert equal(whole, np.repeat(np.arange(size), np.arange(size))[:, None].repeat(2, axis=1))
    assert flags.numpy().tolist() == [True] + [False] * (size - 1)
    assert empty.shape == (0, 3)
    assert empty.dtype == tf.bfloat16


@ranks(2)
@each_mode
def test_broadcast_from_every_root(size, mode):
    hvd.init()
    for dtype in (tf.bfloat16, tf.bool, tf.int64):
        own = tf.cast(tf.fill([3, 2], hvd.rank()), dtype)
        spread = in_mode(mode, lambda t=own: [hvd.broadcast(t, root) for root in range(size)])
        for root, result in enumerate(spread()):
            assert result.dtype == dtype
            assert equal(
                tf.cast(result, tf.int32),
                np.full((3, 2), min(root, 1) if dtype == tf.bool else root),
            )


@ranks(2)
def test_one_name_for_two_operations_on_their_way():
    hvd.init()
    tensor = tf.ones(2)
    results = tf.function(lambda: [hvd.allreduce(tensor, name="same") for _ in range(3)])()
    assert all(equal(result, [1.0, 1.0]) for result in results)


@ranks(2)
def test_unnamed_operations_of_a_graph_run_in_the_order_of_the_program(size):
    hvd.init()
    tensors = [tf.fill([3], float(number)) for number in range(30)]

    @tf.function
    def reduce(count):
        results = [hvd.allreduce(tensor, op=hvd.Sum) for tensor in tensors]
        total = tf.zeros(())
        for number in tf.range(count):
            total += hvd.allreduce(tf.cast(number, tf.float32) + 1.0, op=hvd.Sum)
        return results, total

    for _ in range(3):
        results, total = reduce(tf.constant(4))
        assert all(equal(r, np.full(3, n * size)) for n, r in enumerate(results))
        assert total.numpy() == 10 * size


@ranks(2)
def test_gradients_of_a_function_run_in_one_order_on_all_ranks(size):
    """TensorFlow orders nothing in the backward pass of a function."""
    hvd.init()
    reduced = tf.function(lambda given: [hvd.allreduce(each, op=hvd.Sum) for each in given])
    given = [tf.ones(2) for _ in range(8)]
    for _ in range(5):
        with tf.GradientTape() as tape:
            tape.watch(given)
            loss = tf.add_n([n * tf.reduce_sum(each) for n, each in enumerate(reduced(given))])
        found = tape.gradient(loss, given)
        assert [each.numpy().tolist() for each in found] == [[size * n] * 2 for n in range(8)]


@ranks(2)
def test_functions_that_ranks_call_in_another_order_cross():
    """A graph's operation is compared by the line that made it, whatever thread runs it."""
    hvd.init()

    @tf.function
    def loss():
        return hvd.allreduce(tf.ones(3), op=hvd.Sum)

    @tf.function
    def accuracy():
        return hvd.allreduce(tf.ones(3), op=hvd.Sum)

    first, second = (loss, accuracy) if hvd.rank() == 0 else (accuracy, loss)
    first()
    with pytest.raises(tf.errors.FailedPreconditionError, match="the calls of the ranks cross"):
        second()
    assert equal(hvd.allreduce(tf.ones(1), name="named"), [1.0])


@ranks(2)
def test_a_function_that_a_graph_makes_is_the_same_call_on_all_ranks():
    """AutoGraph writes it into a file of another name in each process."""
    hvd.init()

    def make():
        return lambda value: hvd.allreduce(value)

    @tf.function
    def step(value):
        return make()(value)

    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.getLogger("hvdlite"), "handle", said.append)
        assert equal(step(tf.fill([2], float(hvd.rank()))), [0.5, 0.5])
    assert not hvd.allgather_object(said)[0]


@ranks(2)
def test_static_shapes_are_kept():
    hvd.init()
    shapes = {}

    @tf.function(input_signature=[tf.TensorSpec([None, 3]), tf.TensorSpec(None)])
    def function(partly, unknown):
        shapes["allreduce"] = hvd.allreduce(partly).shape.as_list()
        shapes["broadcast"] = hvd.broadcast(tf.ones((4, 2)), 0).shape.as_list()
        shapes["allgather"] = hvd.allgather(tf.ones((4, 2))).shape.as_list()
        shapes["scalar"] = hvd.allgather(1.0).shape.as_list()
        shapes["unknown"] = hvd.allgather(unknown).shape.rank

    function(tf.ones((2, 3)), tf.ones(2))
    assert shapes == {
        "allreduce": [None, 3],
        "broadcast": [4, 2],
        "allgather": [None, 2],
        "scalar": [None],
        "unknown": None,
    }


@ranks(2)
def test_variables_arrays_and_numbers_are_taken():
    hvd.init()
    variable = tf.Variable([1.0, 2.0])
    for value in (variable, np.array([1.0, 2.0], np.float32), [1.0, 2.0]):
        assert equal(hvd.allreduce(value, op=hvd.Sum), [2.0, 4.0])
    assert hvd.allreduce(3).dtype == tf.int32


@ranks(2, 3)
@each_mode
def test_gradients_flow_through_collectives(size, mode):
    hvd.init()
    rank = hvd.rank()
    weights = tf.range(1.0, 4.0) * (rank + 1.0)
    x, y = tf.Variable(tf.ones(3)), tf.Variable(tf.ones(2))
    rows = tf.Variable(tf.ones(rank + 1))

    def gradients():
        with tf.GradientTape(persistent=True) as tape:
            summed = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0) * weights)
            averaged = tf.reduce_sum(hvd.allreduce(x) * weights)
            whole = hvd.allgather(rows)
            gathered = tf.reduce_sum(whole * tf.range(tf.cast(tf.size(whole), tf.float32)))
            spread = tf.reduce_sum(hvd.broadcast(y, 0) * (rank + 1.0))
        return [
            tape.gradient(loss, source)
            for loss, source in ((summed, x), (averaged, x), (gathered, rows), (spread, y))
        ]

    of_sum, of_average, of_rows, of_broadcast = in_mode(mode, gradients)()
    total = size * (size + 1) / 2
    start = rank * (rank + 1) // 2
    assert close(of_sum, 2 * np.arange(1.0, 4.0) * total)
    assert close(of_average, np.arange(1.0, 4.0) * total / size)
    assert close(of_rows, np.arange(start, start + rank + 1))
    assert close(of_broadcast, np.full(2, total / size if rank == 0 else 0.0))


@ranks(2)
@each_mode
def test_max_has_no_gradient_and_says_so(size, mode):
    hvd.init()
    x = tf.Variable(tf.ones(3))

    def gradient():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(hvd.allreduce(x, op=hvd.Max))
        return tape.gradient(loss, x)

    with pytest.raises(NotImplementedError, match="Max has no gradient"):
        in_mode(mode, gradient)()
    assert hvd.allreduce(tf.ones(1), op=hvd.Sum).numpy() == [size]


@ranks(2)
@each_mode
def test_slices_are_gathered(size, mode):
    hvd.init()
    rank = hvd.rank()
    slices = tf.IndexedSlices(
        tf.fill([rank + 1, 2], 6.0), tf.range(rank, 2 * rank + 1), tf.constant([9, 2])
    )

    def reduce():
        return hvd.allreduce(slices, op=hvd.Sum, name="slices"), hvd.allreduce(slices)

    total, average = in_mode(mode, reduce)()
    expected = np.zeros((9, 2))
    for other in range(size):
        expected[other : 2 * other + 1] += 6.0
    assert total.values.shape[0] == size * (size + 1) // 2
    assert equal(tf.convert_to_tensor(total), expected)
    assert close(tf.convert_to_tensor(average), expected / size)
    for dtype in (np.int8, np.int64):  # the sum does not fit, the mean does; -2 / 3 is cut
        values = tf.constant([np.iinfo(dtype).max, -1 if rank else 0], dtype)
        given = tf.IndexedSlices(values, tf.constant([2, 0]), tf.constant([3]))
        mean = tf.convert_to_tensor(in_mode(mode, lambda given=given: hvd.allreduce(given))())
        assert mean.numpy().tolist() == [0, 0, np.iinfo(dtype).max]
    for refused in ({"op": hvd.Min}, {"op": hvd.Adasum}, {"prescale_factor": 2.0}):
        with pytest.raises(NotImplementedError, match="IndexedSlices"):
            hvd.allreduce(slices, **refused)


@ranks(2)
@each_mode
def test_rank_and_size_as_tensors_and_barrier(size, mode):
    hvd.init()

    def numbers():
        hvd.barrier()
        own = (hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op())
        return *own, hvd.process_set_included_op()

    found = [int(number) for number in in_mode(mode, numbers)()]
    assert found == [hvd.rank(), size, hvd.rank(), size, 1]


@ranks(1)
def test_xla_is_refused_while_tracing():
    hvd.init()
    with pytest.raises(ValueError, match="without jit_compile=True"):
        tf.function(lambda: hvd.allreduce(tf.ones(2)), jit_compile=True)()
    inner = tf.function(lambda: hvd.allreduce(tf.ones(2)))
    with pytest.raises(ValueError, match="without jit_compile=True"):
        tf.function(lambda: inner(), jit_compile=True)()
    variable = tf.Variable([1.0])
    for call in (
        lambda: hvd.allgather(tf.ones(2)),
        lambda: hvd.broadcast(tf.ones(2), 0),
        lambda: hvd.broadcast_([variable], 0),
        lambda: hvd.broadcast_variables([variable], 0),
        lambda: hvd.allreduce(tf.IndexedSlices(tf.ones(1), tf.constant([0]))),
        hvd.barrier,
        hvd.rank_op,
        hvd.process_set_included_op,
    ):
        with pytest.raises(tf.errors.InvalidArgumentError, match="without jit_compile=True"):
            tf.function(call, jit_compile=True)()


@ranks(1)
@each_mode
def test_before_init(mode):
    hvd.shutdown()
    try:
        with pytest.raises(ValueError, match=r"call hvd.init\(\) first"):
            in_mode(mode, lambda: hvd.allreduce(tf.ones(2)))()
    finally:
        hvd.init()
