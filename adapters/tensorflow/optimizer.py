"""Optimizers of every kind that TensorFlow users have, on the average of all ranks' gradients."""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from hvdlite.compression import Compression
from hvdlite.keras._optimizer import Distributed, KerasAdapter, make_distributed
from hvdlite.keras._synchronizer import Options, Synchronizer
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import Average, ReduceOp
from hvdlite.schedule import CompressionArgument, ExchangeSchedule
from hvdlite.tensorflow.tensors import CONVERSION, as_it_is


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionArgument = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | list[Any] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    schedule: ExchangeSchedule | None = None,
) -> Any:
    """Make an optimizer average its gradients over all ranks before it applies them.

    Optimizers of Keras 3 and of legacy Keras become what `hvdlite.tensorflow.keras` makes of
    them. One of ``tf.compat.v1.train`` averages in ``compute_gradients``, and so in ``minimize``:
    eagerly, inside ``tf.function``, and in graphs for a ``tf.compat.v1.Session``.

    Args:
        optimizer: any of these; it is changed, and keeps its state.
        name: accepted for Horovod's sake, without effect; so are ``use_locking`` and the devices.
        use_locking: see above.
        device_dense: see above.
        device_sparse: see above.
        compression: how dense gradients travel.
        sparse_as_dense: exchange ``tf.IndexedSlices`` as dense gradients.
        backward_passes_per_step: steps whose gradients add up before an exchange; Keras alone.
        op: Average or Sum.
        gradient_predivide_factor: with Average, the part of the division that happens before
            the sum.
        average_aggregated_gradients: whether gradients of several steps are averaged, not summed.
        num_groups: accepted for Horovod's sake: buckets do what groups are for.
        groups: likewise.
        process_set: the ranks that take part.
        scale_local_gradients: divide the gradients of local variables by the number of ranks.
        schedule: when to exchange what, one of ``hvd.Schedule``; local steps in Keras alone.

    Returns:
        The optimizer.

    Raises:
        ValueError: it is distributed already, an argument is out of range, or the schedule does
            not go together with another one.
        TypeError: it is none of these optimizers, ``compression`` is no strategy, or
            ``schedule`` is none.
    """
    return ADAPTER.DistributedOptimizer(
        optimizer,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        num_groups=num_groups,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
        schedule=schedule,
    )


def _distribute(optimizer: Any, options: Options) -> Any:
    """Make an optimizer of TensorFlow 1 or of any Keras distributed.

    Raises:
        ValueError, TypeError: as for `DistributedOptimizer`.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _distribute_v1(optimizer, options)
    if isinstance(optimizer, str):
        optimizer = tf.keras.optimizers.get(optimizer)
    # Neither Keras is imported for the other's sake.
    if "tf_keras" in sys.modules:
        from hvdlite.keras import _legacy

        if _legacy.is_legacy(optimizer):
            return _legacy.distribute(optimizer, options)
    if "keras" in sys.modules:
        from hvdlite.keras import _keras3

        return _keras3.distribute(optimizer, options)
    raise TypeError(f"expected an optimizer of TensorFlow or Keras, found {type(optimizer)}")


def _load_model(*args: Any, **kwargs: Any) -> Any:
    return tf.keras.models.load_model(*args, **kwargs)


ADAPTER = KerasAdapter(CONVERSION, _distribute, _load_model)
"""The functions of `hvdlite.tensorflow.keras`."""


class _DistributedV1(Distributed):
    """What `DistributedOptimizer` adds to the class of a ``tf.compat.v1.train.Optimizer``."""

    @as_it_is
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute gradients as TensorFlow does, and average them over all ranks.

        Raises:
            HorovodInternalError: the ranks disagree, or communication failed.
        """
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        return list(zip(self._hvdlite.reduce(gradients, variables), variables, strict=True))


def _distribute_v1(optimizer: Any, options: Options) -> Any:
    from hvdlite.keras._tensorflow import Backend  # which imports this package

    if isinstance(optimizer, Distributed):
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap it once")
    if options.passes > 1:
        raise ValueError(
            f"backward_passes_per_step={options.passes} with {type(optimizer).__name__}: it needs "
            "a Keras optimizer; use the one of this name in tf.keras.optimizers"
        )
    if options.schedule is not None:
        raise ValueError(
            f"{options.schedule!r} with {type(optimizer).__name__}: it needs a Keras optimizer; "
            "use the one of this name in tf.keras.optimizers, or hvd.DistributedGradientTape"
        )
    synchronizer = Synchronizer(optimizer, options, Backend)
    return make_distributed(optimizer, _DistributedV1, synchronizer)
