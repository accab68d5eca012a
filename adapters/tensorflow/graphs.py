"""Graph operations that call Python, inside ``tf.function`` and for sessions."""

from __future__ import annotations

import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import partial
from importlib.machinery import PathFinder
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.script_ops import _py_funcs

from hvdlite.engine import calls, naming
from hvdlite.engine.process_sets import ProcessSet

_FOREIGN = (
    "hvdlite operation {}: the graph calls a Python function of the process that traced it, and "
    "this process has no such function. Export what has no hvdlite operation (inference, with "
    "training=False), or build the model from its code here and load its weights "
    "(save_weights, tf.train.Checkpoint)"
)

# Calls in a graph are where the graph was made, in the program's lines; those in a layer, too.
# (Not by `find_spec`, which looks at sys.modules, where programs put another Keras in its place.)
for _spec in map(PathFinder.find_spec, ("tensorflow", "keras", "tf_keras")):
    if _spec is not None and _spec.origin is not None:
        calls.leave_out(os.path.dirname(_spec.origin))

# The operation after which the next one has to run; None: operations are not ordered.
_last: ContextVar[list[tf.Operation] | None] = ContextVar("last", default=None)


def call_python(
    function: Callable[..., Any], tensors: Sequence[tf.Tensor], specs: Sequence[tf.TensorSpec]
) -> list[tf.Tensor]:
    """Make an operation that calls a function of arrays, and return its results.

    It differs from ``tf.numpy_function`` in the key under which the graph finds the function. There
    the key is the number of earlier calls, so a process that loads an exported graph would call
    any function of its own that has this number. Here the key is unique, and it says what to do,
    because TensorFlow's message for an unknown key contains the key.

    Args:
        function: Takes arrays, which it must not change, and returns a list of arrays.
        tensors: Its arguments. They are not copied, and neither are large results.
        specs: The dtypes and shapes of the results.
    """
    place = _place()

    def call(*arrays: Any) -> Any:
        with naming(place):
            return function(*arrays)

    key = _FOREIGN.format(uuid.uuid4().hex)
    _py_funcs._funcs[key] = call  # by a weak reference
    graph = _outermost_graph()
    # An attribute, since functions may refer to the graph.
    if not hasattr(graph, "_hvdlite_functions"):
        graph._hvdlite_functions = []
    graph._hvdlite_functions.append(call)
    with tf.control_dependencies(_earlier()):
        outputs = tf.raw_ops.PyFunc(input=tensors, token=key, Tout=[spec.dtype for spec in specs])
    if not specs:  # then TensorFlow returns the operation
        return []
    for output, spec in zip(outputs, specs, strict=True):
        output.set_shape(spec.shape)
    return list(outputs)


def _earlier() -> list[tf.Operation]:
    """Return what the next operation has to wait for where TensorFlow keeps no order.

    It keeps none in the backward pass of a function that is differentiated from outside.
    """
    graph = tf.compat.v1.get_default_graph()
    if getattr(graph, "_add_control_dependencies", True):  # not a public name
        return []
    kinds = {"PyFunc", "StatefulPartitionedCall", "If", "While"}
    return [each for each in graph.get_operations() if each.type in kinds]


def _place() -> calls.Place:
    """Return where an operation is made, in the program's lines instead of AutoGraph's."""
    try:
        from tensorflow.python.util.tf_stack import extract_stack
    except ImportError:  # not a public name; without it such calls are not told apart
        return calls.place_of(())
    frames = ((each.filename, each.lineno) for each in reversed(extract_stack()))
    # Of a function that a traced one makes AutoGraph tells its own file, another in each process.
    return calls.place_of(each for each in frames if "__autograph_generated_" not in each[0])


def for_session() -> bool:
    """Return whether the current graph is one for a ``tf.compat.v1.Session``."""
    return not tf.compat.v1.executing_eagerly_outside_functions()


def call_python_in_session(
    function: Callable[..., Any],
    tensors: Sequence[tf.Tensor],
    specs: Sequence[tf.TensorSpec],
    process_set: ProcessSet | None,
) -> list[tf.Tensor]:
    """Make the same operation as `call_python`, in a graph for a ``tf.compat.v1.Session``.

    A session runs operations in any order, in few threads. So a function that waits for other ranks
    gets a thread of its own: ranks whose only thread waits, each in another operation, would wait
    for ever. TensorFlow has such threads for data sets: the function is mapped over a data set
    with one element, the tensors. An operation without a name gets one here, from its number in
    the graph.

    Args:
        function, tensors, specs: As for `call_python`.
        process_set: The ranks that take part; None: no other rank.
    """
    place = None if process_set is None else f"graph.{count(process_set.process_set_id)}"

    def call(*arrays: Any) -> list[Any]:
        with nullcontext() if place is None else naming(place):
            return [*function(*arrays[1:]), np.int32(0)]

    scalar = tf.TensorSpec((), tf.int32)
    outputs = {
        "output_types": [*(spec.dtype for spec in specs), tf.int32],
        "output_shapes": [*(spec.shape for spec in specs), scalar.shape],
    }
    order = _last.get()
    with tf.control_dependencies(order), tf.device("/device:CPU:0"):
        element = [tf.constant(0), *tensors]  # one at least
        inputs = [tf.TensorSpec(tensor.shape, tensor.dtype) for tensor in element]
        mapped = tf.function(
            lambda *arguments: call_python(call, arguments, [*specs, scalar]), autograph=False
        ).get_concrete_function(*inputs)
        mapped.add_to_graph(tf.compat.v1.get_default_graph())
        source = tf.raw_ops.TensorDataset(
            components=element, output_shapes=[spec.shape for spec in inputs]
        )
        calls = tf.raw_ops.MapDataset(
            input_dataset=source,
            other_arguments=[],
            f=mapped,
            use_inter_op_parallelism=False,  # which would run the function in a session's thread
            **outputs,
        )
        *results, done = tf.raw_ops.DatasetToSingleElement(dataset=calls, **outputs)
    if order is not None:
        order[:] = [done.op]
    return results


@contextmanager
def in_order() -> Iterator[None]:
    """Run the operations that are made in this context one after the other, for sessions too.

    ``tf.function`` does so in any case.
    """
    token = _last.set([])
    try:
        yield
    finally:
        _last.reset(token)


def together(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return tensors that exist when all operations of this `in_order` context have run."""
    if not for_session():
        return list(tensors)
    with tf.control_dependencies(_last.get()):
        return [tf.identity(tensor) for tensor in tensors]


def when(
    condition: tf.Tensor, act: Callable[[], Any], otherwise: Callable[[], Any] = lambda: None
) -> tf.Tensor:
    """Call one of two functions, in a graph when that runs; return the condition."""

    def branch(function: Callable[[], Any], taken: bool) -> tf.Tensor:
        function()
        return tf.constant(taken)

    return tf.cond(condition, partial(branch, act, True), partial(branch, otherwise, False))


def numbered(label: str, process_set: ProcessSet) -> str:
    """Return a label; in a graph for a session, one of its own for each exchange.

    Exchanges with the same label must not overlap, and a session may run them at the same time.
    """
    number = count((label, process_set.process_set_id)) if for_session() else 0
    return f"{label} {number + 1}" if number else label


def refuse_session(what: str) -> None:
    """Refuse a feature that depends on the order of operations, which a session does not keep."""
    if for_session():
        raise NotImplementedError(
            f"{what} in a graph for a tf.compat.v1.Session, where operations run in any order; "
            "leave out tf.compat.v1.disable_eager_execution(), and train eagerly or in tf.function"
        )


def count(key: Any) -> int:
    """Return how often this has been called with a key for the current graph."""
    graph = _outermost_graph()
    if not hasattr(graph, "_hvdlite_counts"):
        graph._hvdlite_counts = Counter()
    number: int = graph._hvdlite_counts[key]
    graph._hvdlite_counts[key] += 1
    return number


def _outermost_graph() -> tf.Graph:
    """Return the graph that contains the current one; functions live as long as it does."""
    graph, outer = None, tf.compat.v1.get_default_graph()
    while outer is not None:
        graph = outer
        outer = getattr(graph, "outer_graph", None) or getattr(graph, "_outer_graph", None)
    return graph
