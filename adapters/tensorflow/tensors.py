"""Conversion between TensorFlow tensors and numpy arrays, and Python functions in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.compression import Conversion
from hvdlite.compression.custom import cast
from hvdlite.engine import Engine, runtime
from hvdlite.tensorflow.errors import ArgumentError, translated
from hvdlite.tensorflow.graphs import call_python, call_python_in_session, for_session

#: Keeps AutoGraph from rewriting a function of hvdlite, and its callees, when it is traced.
unconverted = tf.autograph.experimental.do_not_convert


def engine(process_set: Any = None) -> Engine:
    """Return the engine of a process set.

    Raises:
        ValueError: Before ``init()`` and after ``shutdown()``.
        ArgumentError: This rank is not in the process set; in the scope of a ``tf.distribute``
            strategy with several replicas.
    """
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        raise ArgumentError(
            f"{type(strategy).__name__} has {strategy.num_replicas_in_sync} replicas in this "
            "process, or exchanges gradients with other processes itself, and hvdlite needs a "
            "process for each; leave the strategy out, start one process for each accelerator "
            "(hvdliterun -np N) and call hvd.pin_device()"
        )
    return translated(runtime.engine)(process_set)


def to_tensor(value: Any) -> tf.Tensor:
    """Return a tensor of numbers for a tensor, a variable (Keras' too) or an array."""
    if isinstance(value, tf.RaggedTensor | tf.SparseTensor):
        raise TypeError(
            f"expected a dense tensor, found a {type(value).__name__}; convert it first, by "
            "value.to_tensor() or tf.sparse.to_dense(value)"
        )
    tensor = tf.convert_to_tensor(value)
    if tensor.dtype in (tf.string, tf.resource, tf.variant):
        raise TypeError(
            f"a tensor of dtype {tensor.dtype.name} cannot be exchanged; use "
            "hvd.broadcast_object or hvd.allgather_object for what is not a number"
        )
    return tensor


def to_array(tensor: tf.Tensor) -> Any:
    """View an eager tensor as a read-only array; copy it from an accelerator."""
    # A scalar has no memory of its own that numpy could view in every dtype.
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())


@cast.register(tf.Tensor)
@cast.register(tf.Variable)
def _cast(tensor: Any, dtype: Any) -> Any:
    return tf.cast(tensor, dtype) if tensor.dtype.is_floating else tensor


#: For the tensors that a compression class of the user gets and returns.
CONVERSION = Conversion(tf.convert_to_tensor, to_array)


def value_of(variable: Any) -> Any:
    """Return the ``tf.Variable`` inside a Keras variable; other values are returned as they are."""
    inner = getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable


def dtype_of(dtype: Any) -> np.dtype[Any]:
    """Return the numpy dtype of a TensorFlow dtype or its name; bfloat16 is from ``ml_dtypes``."""
    return np.dtype(tf.as_dtype(dtype).as_numpy_dtype)


def run(
    function: Callable[..., Sequence[Any]],
    tensors: Sequence[tf.Tensor],
    specs: Sequence[tf.TensorSpec],
    process_set: Any = None,
) -> list[tf.Tensor]:
    """Run a function of arrays on tensors.

    In eager mode it runs at once. Inside ``tf.function`` it becomes one operation of the
    graph; these operations run in the order in which they were made. In a graph for a
    ``tf.compat.v1.Session`` they do so if they are made within `graphs.in_order`.

    Args:
        function: Takes an array for each tensor, which it must not change, and returns
            arrays that are not changed afterwards, because TensorFlow goes on using their memory.
        tensors: Its arguments.
        specs: The dtypes and shapes of its results.
        process_set: The ranks that take part; None: all.

    Raises:
        ValueError: Before ``init()``, or inside a function that XLA compiles.
        MismatchError, HorovodInternalError, ArgumentError: From the function, in the classes of
            `hvdlite.tensorflow.errors`; out of a graph, when it runs.
    """
    engine(process_set)
    function = translated(function)
    if tf.executing_eagerly():
        results = function(*map(to_array, tensors))
        return [tf.convert_to_tensor(result) for result in results]
    _refuse_xla()
    if for_session():
        return call_python_in_session(function, tensors, specs, process_set)
    return call_python(function, tensors, specs)


def like(tensor: tf.Tensor) -> tf.TensorSpec:
    """Return the dtype and the static shape of a tensor."""
    return tf.TensorSpec(tensor.shape, tensor.dtype)


def rows_like(tensor: tf.Tensor) -> tf.TensorSpec:
    """Return the same with any number of rows; a scalar counts as one row."""
    if tensor.shape.rank is None:
        return tf.TensorSpec(None, tensor.dtype)
    return tf.TensorSpec(tf.TensorShape([None]).concatenate(tensor.shape[1:]), tensor.dtype)


def _refuse_xla() -> None:
    try:
        from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
    except ImportError:  # not a public name; without it XLA itself reports, less clearly
        return
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ArgumentError(
            "hvdlite's operations call Python, which XLA cannot compile; use tf.function without "
            "jit_compile=True (in Keras: model.compile(..., jit_compile=False)) around them, and "
            "compile the parts in between"
        )
