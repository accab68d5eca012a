"""Optimizers of ``tf.keras``, whichever Keras that is."""

from __future__ import annotations

from typing import Any

from hvdlite._keras.options import check_options
from hvdlite._keras.training import keep_local
from hvdlite.compression import Compression
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import Average, ReduceOp
from hvdlite.schedule import CompressionArgument, ExchangeSchedule
from hvdlite.tensorflow.optimizer import distribute
from hvdlite.tensorflow.tensors import CONVERSION


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionArgument = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp | int = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[Any] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    schedule: ExchangeSchedule | None = None,
) -> Any:
    """Make an optimizer of ``tf.keras`` average its gradients over all ranks.

    With Keras 3 it is `hvdlite.keras.DistributedOptimizer`. With legacy Keras it does the same
    where ``apply_gradients`` begins, for both kinds of optimizers that there are; there
    ``jit_compile=True`` is refused when the step is traced.

    Args:
        optimizer: any optimizer of ``tf.keras``, or the name of one.
        name: as there, like all that follow.
        device_dense: see there.
        device_sparse: see there.
        compression: see there.
        sparse_as_dense: see there.
        gradient_predivide_factor: see there.
        op: see there.
        backward_passes_per_step: see there; with legacy Keras the gradients add up in variables
            that are no part of the optimizer's.
        average_aggregated_gradients: see there.
        num_groups: see there.
        groups: see there.
        process_set: see there.
        scale_local_gradients: see there.
        schedule: see there.

    Returns:
        The optimizer, with ``register_local_var(variable)``, and ``average_weights()`` for one
        with local steps.

    Raises:
        ValueError: it is distributed already, an argument is out of range, or the schedule does
            not go together with another one.
        TypeError: it is no Keras optimizer, ``compression`` is no strategy, or ``schedule`` is
            none.
    """
    options = check_options(
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        backward_passes_per_step,
        average_aggregated_gradients,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        CONVERSION,
        schedule,
    )
    return distribute(optimizer, options)


def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
) -> Any:
    """`DistributedOptimizer`, except that some layers' gradients stay with their rank.

    Args:
        optimizer: as there.
        *args: as there.
        local_layers: a layer or a list of layers; they need not be built yet.
        **kwargs: as there.

    Returns:
        The optimizer.

    Raises:
        ValueError, TypeError: as there.
    """
    return keep_local(DistributedOptimizer(optimizer, *args, **kwargs), local_layers)
