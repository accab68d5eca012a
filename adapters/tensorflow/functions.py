"""Objects and variables of one rank, or of all, on every rank."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import collectives
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.gradients.lone_steps import LoneSteps
from hvdlite.observe import status
from hvdlite.recipe.variables import broadcast_arrays
from hvdlite.tensorflow import errors
from hvdlite.tensorflow.errors import translated
from hvdlite.tensorflow.graphs import for_session
from hvdlite.tensorflow.tensors import engine, like, run, to_array, to_tensor, unconverted, value_of
from hvdlite.tensorflow.variables import is_variable, name_of, read
from hvdlite.world import world

# The public names of `hvdlite.tensorflow`.
__all__ = [
    "broadcast_object",
    "broadcast_object_fn",
    "allgather_object",
    "broadcast_variables",
    "broadcast_",
    "broadcast_global_variables",
    "BroadcastGlobalVariablesHook",
]

_log = logging.getLogger("hvdlite")

_WATCHED = 4
_lone_steps: LoneSteps | None = None


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank ``root_rank``'s object on all ranks; between steps, not in ``tf.function``.

    Args:
        session: Accepted as in Horovod, without effect.
        obj, root_rank, name, process_set: As for `hvdlite.broadcast_object`, with its errors.

    Raises:
        RuntimeError: Inside ``tf.function``, which would do it only when it is traced.
    """
    _check_outside_function(process_set)
    return translated(collectives.broadcast_object)(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function of an object that calls `broadcast_object` with these arguments."""
    return lambda obj: broadcast_object(obj, root_rank, session, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, by rank; between steps, not in ``tf.function``.

    Args:
        obj, session, name, process_set: As for `broadcast_object`, with its errors.
    """
    _check_outside_function(process_set)
    return translated(collectives.allgather_object)(obj, name, process_set)


def _check_outside_function(process_set: ProcessSet) -> None:
    if tf.inside_function():
        raise RuntimeError(
            "objects are exchanged between steps, not inside tf.function, which would do it once, "
            "when it is traced; exchange tensors there"
        )
    engine(process_set)


def broadcast_variables(
    variables: Any,
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> tf.Operation | None:
    """Overwrite variables with those of rank ``root_rank``.

    Build the model first (call it once, or ``model.build``): until then it has no variables. The
    same holds for a Keras optimizer (``optimizer.build(model.trainable_variables)``). The seeds of
    random layers, which Keras 3 keeps in variables, follow from those of rank ``root_rank`` and
    differ between ranks, so that dropout does.

    Args:
        variables: ``tf.Variable`` or Keras variables of any dtype, in any nested structure;
            e.g. ``model.variables`` or ``optimizer.variables``.
        root_rank: The rank whose values are sent.
        process_set: The ranks that take part.
        inplace: Accepted as in Horovod; variables stay the same objects in any case.

    Returns:
        In a graph for a ``tf.compat.v1.Session`` the operation that does it; otherwise None: it is
        done, or ``tf.function`` does it.

    Raises:
        TypeError: One of them is not a variable.
        ValueError: There is no such rank.
        MismatchError: The ranks disagree on names, shapes or dtypes.
        HorovodInternalError: Communication failed.
    """
    values = broadcast_(variables, root_rank, process_set=process_set)
    return tf.group(values) if for_session() else None


@unconverted
def broadcast_(
    variables: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Overwrite variables with those of rank ``root_rank``, and return their values.

    Args:
        variables, root_rank, process_set: As for `broadcast_variables`, with the same errors.
        name: Pairs this call with those of the other ranks; None pairs by order.

    Returns:
        The values, in the order of ``tf.nest.flatten(variables)``. When they exist, the variables
        have them, in a graph for a ``tf.compat.v1.Session`` too.
    """
    flat = flat_variables(variables)
    names = [name_of(variable, number) for number, variable in enumerate(flat)]

    def spread(*arrays: Any) -> list[Any]:
        return broadcast_arrays(names, list(map(np.asarray, arrays)), root_rank, name, process_set)

    tensors = [to_tensor(variable) for variable in flat]
    values = run(spread, tensors, list(map(like, tensors)), process_set)
    assigned = [variable.assign(value) for variable, value in zip(flat, values, strict=True)]
    if not for_session():
        _watch_training(flat, process_set)
        return values
    with tf.control_dependencies([tf.group(assigned)]):
        return [tf.identity(value) for value in values]


def _watch_training(variables: Sequence[Any], process_set: ProcessSet) -> None:
    """Warn if the graphs that train these variables from now on exchange nothing."""
    global _lone_steps
    trained = [value_of(each) for each in variables if getattr(each, "trainable", False)]
    if not trained or engine(process_set).size == 1:
        return
    if _lone_steps is not None:
        _lone_steps.end()
    sizes = {id(each): (each.shape.num_elements() or 0) * each.dtype.size for each in trained}
    _lone_steps = LoneSteps(sum(sizes.values()))
    # Those of the last layer are among the smallest, and get a gradient in each step.
    trained.sort(key=lambda each: sizes[id(each)])
    watched = [*map(weakref.ref, trained[:_WATCHED])]
    counts = status.counts.total()
    errors.after_graph = partial(_count_change, _lone_steps, watched, [], counts)


def _count_change(
    steps: LoneSteps,
    watched: Sequence[Callable[[], tf.Variable | None]],
    last: list[bytes],
    wrapped: int,
) -> None:
    """Count a step if a graph has changed some variables, and no wrapped tape has made steps."""
    variables = [variable() for variable in watched]
    if any(each is None for each in variables) or status.counts.total() > wrapped:
        steps.end()
    else:
        now = [to_array(read(variable)).tobytes() for variable in variables]
        if steps.count(bool(last) and now != last):
            steps.warn("tf.function", "hvd.DistributedGradientTape(tape), or DistributedOptimizer")
        last[:] = now
    if steps.is_over:
        errors.after_graph = lambda: None


def flat_variables(variables: Any) -> list[Any]:
    """Return the variables of a nested structure; warn if there are none."""
    flat: list[Any] = tf.nest.flatten(
        list(variables) if isinstance(variables, Iterator) else variables
    )
    for variable in flat:
        if not is_variable(variable):
            raise TypeError(f"expected variables of TensorFlow or Keras, found {variable!r}")
    if not flat:
        _log.warning(
            "rank %d: there are no variables to broadcast; a model has none before it is built",
            world.rank(),
        )
    return flat


def broadcast_global_variables(root_rank: int) -> tf.Operation:
    """Return an operation that overwrites all global variables with those of rank ``root_rank``.

    It is for graphs: TensorFlow 2 has no global variables. It covers those that the graph has now,
    so call it when the model and its optimizer are complete; run it after the initializers.

    Args:
        root_rank: The rank whose values are sent.

    Raises:
        RuntimeError: In eager mode and inside ``tf.function``.
        ValueError: There is no such rank; when it runs, like the following.
        MismatchError: The ranks disagree on names, shapes or dtypes.
        HorovodInternalError: Communication failed.
    """
    if not for_session():
        raise RuntimeError(
            "broadcast_global_variables needs the global variables of a graph for a "
            "tf.compat.v1.Session, which TensorFlow 2 has not; call "
            "hvd.broadcast_variables(model.variables, root_rank=0), and the same for "
            "optimizer.variables, when both are built and before the first step"
        )
    return broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Makes a ``MonitoredTrainingSession`` broadcast all global variables when it begins.

    All ranks then have the weights that rank 0 has initialized or restored from a checkpoint.

    Args:
        root_rank: The rank whose values are sent.
        device: Accepted as in Horovod, without effect.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self.root_rank = root_rank
        self.bcast_op: tf.Operation | None = None

    def begin(self) -> None:
        """Make the operation, in the graph that the session is about to have."""
        graph = tf.compat.v1.get_default_graph()
        if self.bcast_op is None or self.bcast_op.graph is not graph:
            self.bcast_op = broadcast_global_variables(self.root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Broadcast the variables."""
        session.run(self.bcast_op)
