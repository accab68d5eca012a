"""The collectives on values: arrays, numbers and tensors go in, arrays come out."""

from __future__ import annotations

from typing import Any

from hvdlite import collectives, scattering
from hvdlite._keras.state import broadcast_variables, to_array, variables_of
from hvdlite.compression import Compression, Strategy
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import ReduceOp


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | int | None = None,
    compression: Strategy = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a value over all ranks: ``postscale * op(prescale * value)``.

    Args:
        value: a number, an array, a tensor or a variable; of one shape on all ranks.
        name: pairs this call with those of the other ranks; None: by order.
        average: deprecated; True is Average, False is Sum.
        prescale_factor: multiplies the value before the reduction.
        postscale_factor: multiplies the result.
        op: one of the six reductions; None is Average.
        compression: how floats travel.
        process_set: the ranks that take part.

    Returns:
        A numpy array of the value's shape.

    Raises:
        ValueError: ``op`` and ``average`` contradict, or the reduction has no meaning for the
            dtype.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    return collectives.allreduce(
        to_array(value),
        average=average,
        name=name,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
        process_set=process_set,
    )


def allgather(
    value: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the values of all ranks along axis 0, in the order of the ranks.

    Args:
        value: as for `allreduce`; all axes but the first alike on all ranks.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.

    Returns:
        A numpy array.

    Raises:
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    return collectives.allgather(to_array(value), name, process_set=process_set)


def broadcast(
    value: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank ``root_rank``'s value on all ranks.

    Args:
        value: as for `allreduce`.
        root_rank: the rank whose value counts.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.

    Returns:
        A numpy array of the value's shape.

    Raises:
        ValueError: there is no such rank.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    return collectives.broadcast(to_array(value), root_rank, name, process_set=process_set)


def reducescatter(
    value: Any,
    name: str | None = None,
    op: ReduceOp | int = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Strategy = Compression.none,
) -> Any:
    """Reduce a value over all ranks, and return this rank's rows of the result.

    Args:
        value: as for `allreduce`, with one axis at least. The first ranks get one row more where
            there are not as many for all.
        name: pairs this call with those of the other ranks; None: by order.
        op: Average, Sum, Min, Max or Product.
        process_set: the ranks that take part.
        prescale_factor: multiplies the value before the reduction.
        postscale_factor: multiplies the result.
        compression: how floats travel.

    Returns:
        A numpy array.

    Raises:
        ValueError: ``op`` is Adasum or has no meaning for the dtype.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    return scattering.reducescatter(
        to_array(value),
        name,
        op,
        prescale_factor,
        postscale_factor,
        compression=compression,
        process_set=process_set,
    )


def broadcast_global_variables(root_rank: int, model: Any = None) -> None:
    """Overwrite the weights of a model, and its optimizer's variables, with rank ``root_rank``'s.

    Args:
        root_rank: the rank whose values count.
        model: a built one. Horovod needs none in TensorFlow 1, where variables are global.

    Raises:
        ValueError: there is no model, or no such rank.
        HorovodInternalError: the ranks disagree on names, shapes or dtypes.
    """
    if model is None:
        raise ValueError(
            "there are no global variables in TensorFlow 2 and Keras 3; pass "
            "broadcast_global_variables(root_rank, model=model), or let fit have "
            "hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank)"
        )
    broadcast_variables([*model.weights, *variables_of(model.optimizer)], root_rank)
