import numpy as np
import pytest

from tests.harness import ranks
from tests.logs import logged

pytest.importorskip("tensorflow")

import keras
import tensorflow as tf

import hvdlite.tensorflow as hvd
from tests.tensorflow.modes import each_mode, equal, in_mode


@ranks(2)
@each_mode
def test_broadcast_of_nested_variables_of_every_dtype(size, mode):
    hvd.init()
    dtypes = [tf.bool, tf.int8, tf.int64, tf.float16, tf.bfloat16, tf.float32, tf.complex64]
    shapes = [(), (0,), (3,), (2, 5)]
    variables = {
        dtype.name: [tf.Variable(tf.cast(tf.fill(shape, hvd.rank()), dtype)) for shape in shapes]
        for dtype in dtypes
    }
    root = size - 1
    in_mode(mode, lambda: hvd.broadcast_variables(variables, root_rank=root))()
    for dtype in dtypes:
        value = np.asarray(root).astype(dtype.as_numpy_dtype)
        for variable in variables[dtype.name]:
            assert equal(variable, np.full(variable.shape, value))


@ranks(2)
@each_mode
def test_broadcast_in_place(size, mode):
    hvd.init()
    rank = hvd.rank()
    variables = [tf.Variable([rank, 2 * rank]), tf.Variable(tf.cast(rank, tf.bfloat16))]
    spread = in_mode(mode, lambda: hvd.broadcast_(variables, 1, name="some variables"))
    for _ in range(2):
        values = spread()
        for found in (values, variables):
            assert equal(found[0], [1, 2])
            assert equal(found[1], 1.0)
        assert [value.dtype for value in values] == [tf.int32, tf.bfloat16]
        variables[0].assign([rank, 2 * rank])
    (value,) = in_mode(mode, lambda: hvd.broadcast_(variables[0], root_rank=0))()
    assert equal(value, [0, 0])
    variables[0].assign([rank, rank])
    hvd.broadcast_variables(variables[:1], root_rank=size - 1, inplace=True)
    assert equal(variables[0], [size - 1] * 2)


@ranks(2)
def test_objects_with_the_arguments_of_horovod(size):
    hvd.init()
    rank = hvd.rank()
    assert hvd.broadcast_object({"rank": rank}, 1, None, "an object") == {"rank": 1}
    assert hvd.broadcast_object_fn(root_rank=1, name="a function's")(rank) == 1
    assert hvd.allgather_object([rank], session=None, name="all") == [[n] for n in range(size)]


@ranks(2)
def test_broadcast_of_a_keras_model_and_its_optimizer():
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(0.1 * (hvd.rank() + 1))
    optimizer.build(model.trainable_variables)
    optimizer.apply([tf.random.normal(v.shape) for v in model.trainable_variables])
    everything = (model.variables, optimizer.variables)
    before = hvd.broadcast_object([value.numpy() for value in tf.nest.flatten(everything)])
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables((variable for variable in optimizer.variables), root_rank=0)
    for variable, value in zip(tf.nest.flatten(everything), before, strict=True):
        assert equal(variable, value)


@ranks(1)
def test_what_cannot_be_broadcast():
    hvd.init()
    with pytest.raises(TypeError, match="expected variables of TensorFlow or Keras, found"):
        hvd.broadcast_variables([tf.constant(1.0)], 0)
    with pytest.raises(TypeError, match="dtype string cannot be exchanged"):
        hvd.broadcast_variables([tf.Variable("text")], 0)


@ranks(2)
def test_model_that_is_not_built_is_reported():
    hvd.init()
    with logged() as messages:
        hvd.broadcast_variables(keras.Sequential([keras.layers.Dense(4)]).variables, 0)
    assert messages == [
        f"rank {hvd.rank()}: there are no variables to broadcast; a model has none before it is "
        "built"
    ]


@ranks(2)
def test_checkpoint_of_variables_and_tensors(tmp_path):
    hvd.init()
    own = float(hvd.rank() + 1)
    weights = [tf.Variable(tf.fill((2, 3), own)), tf.Variable(tf.cast(own, tf.bfloat16))]
    dense = keras.layers.Dense(2)
    dense.build((None, 3))
    dense.set_weights([np.full((3, 2), own), np.full(2, own)])
    saved = hvd.checkpoint(tmp_path / "state.npz")
    assert saved.load(default=None) is None
    state = {"w": weights, "keras": tuple(dense.weights), "x": tf.constant([1, 2]), "epoch": 3}
    saved.save(state, blocking=False)
    state = saved.load()
    assert state["epoch"] == 3
    assert state["x"].tolist() == [1, 2]
    assert isinstance(state["keras"], tuple)
    assert state["w"][1].dtype == tf.bfloat16.as_numpy_dtype
    for variable in weights:
        variable.assign(tf.zeros_like(variable))
    hvd.assign_variables([weights, dense.weights], [state["w"], state["keras"]])
    assert equal(weights[0], np.ones((2, 3)))
    assert float(weights[1]) == 1.0
    assert equal(dense.kernel, np.ones((3, 2)))
    with pytest.raises(TypeError, match=r"state\['bad'\] is a set"):
        saved.save({"bad": {1}})

    @tf.function
    def save_in_graph():
        saved.save({})

    with pytest.raises(RuntimeError, match=r"not inside tf\.function"):
        save_in_graph()


@ranks(2)
def test_a_tensor_that_no_checkpoint_holds_is_an_error_on_all_ranks(tmp_path):
    hvd.init()
    saved = hvd.checkpoint(tmp_path / "state.npz")
    bad = tf.constant("text") if hvd.rank() == 0 else tf.constant(1.0)
    with pytest.raises(TypeError, match=r"state\['w'\]\[1\]: a tensor of dtype string"):
        saved.save({"w": [tf.zeros(1), bad]})
    sparse = tf.sparse.eye(2) if hvd.rank() == 0 else None
    with pytest.raises(TypeError, match=r"state\['w'\] is a .*SparseTensor"):
        saved.save({"w": sparse})
    saved.save({"w": tf.ones(2)})
    assert saved.load()["w"].tolist() == [1.0, 1.0]


@ranks(1)
def test_values_that_do_not_fit_are_refused_before_any_is_assigned():
    hvd.init()
    first, second = tf.Variable([1.0, 2.0], name="first"), tf.Variable([3, 4], name="second")
    for values, said in (
        ([np.zeros(2, np.float32)], "holds 1 values for 2 variables"),
        ([np.zeros(2, np.float32), np.zeros(3, np.int32)], r"'second', is int32\[2\].*int32\[3\]"),
        ([np.zeros(2, np.float32), np.zeros(2, np.int64)], r"'second', is int32\[2\].*int64\[2\]"),
    ):
        with pytest.raises(hvd.CheckpointError, match=said):
            hvd.assign_variables([first, second], values)
        assert equal(first, [1.0, 2.0])
