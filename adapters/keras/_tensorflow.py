"""TensorFlow below Keras, and the optimizers of either Keras and of TensorFlow 1."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from hvdlite.base.reduction import Average, ReduceOp
from hvdlite.compression import Compression
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.gradients.keras_exchange import LABEL, Synchronizer
from hvdlite.gradients.options import CompressionArgument, ExchangeSchedule, Options
from hvdlite.keras._optimizer import Distributed, KerasAdapter, make_distributed
from hvdlite.tensorflow.gradients import Gradient, GradientAllreduce
from hvdlite.tensorflow.recipe import pin_device as pin_device
from hvdlite.tensorflow.tensors import CONVERSION, unconverted, value_of
from hvdlite.tensorflow.variables import ReplicaChecks, read
from hvdlite.world import parts


def connect(synchronizer: Synchronizer) -> GradientAllreduce:
    """Return the exchange of an optimizer's gradients."""
    synchronizer.replica.read = _number
    return GradientAllreduce(
        synchronizer.options,
        LABEL,
        ReplicaChecks(synchronizer.replica),
        synchronizer.state.state,
        synchronizer.leaves_out,
    )


def _number(variable: Any) -> Any:
    """Return the number that a variable has; None: it is in a session's graph."""
    inner = value_of(variable)
    return None if tf.is_symbolic_tensor(inner.handle) else read(inner).numpy().item()


def after(gradients: Sequence[Gradient]) -> AbstractContextManager[None]:
    """Make operations of a graph wait for the exchange, which also compares variables.

    An update that uses no gradient, like the count of steps, could come too early.
    """
    if tf.executing_eagerly():
        return nullcontext()
    parts = [each.values if isinstance(each, tf.IndexedSlices) else each for each in gradients]
    # Those of local variables have not been exchanged, so all are waited for.
    exchanged = tf.group(*(each for each in parts if each is not None))
    waits: AbstractContextManager[None] = tf.control_dependencies([exchanged])
    return waits


def is_traced() -> bool:
    """Return whether the caller is being traced into a graph."""
    return not tf.executing_eagerly()


def as_dense(gradient: Any) -> tf.Tensor:
    """Return a gradient as a tensor with the shape of its variable."""
    return tf.convert_to_tensor(gradient)


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
    model: Any = None,
) -> Any:
    """Make an optimizer average its gradients over all ranks before it applies them.

    Optimizers of Keras 3 and of legacy Keras are wrapped as by `hvdlite.tensorflow.keras`. An
    optimizer of ``tf.compat.v1.train`` averages in ``compute_gradients``, and so in ``minimize``:
    in eager mode, inside ``tf.function``, and in graphs for a ``tf.compat.v1.Session``.

    Args:
        optimizer: Any of these; it is changed, and keeps its state.
        use_locking: Accepted as in Horovod, without effect.
        backward_passes_per_step: Steps whose gradients add up before an exchange; Keras only.
        schedule, model: As for `hvdlite.keras.DistributedOptimizer`, like all other arguments;
            local steps and virtual ranks need Keras 3.

    Returns:
        The optimizer.

    Raises:
        ValueError: It is distributed already, an argument is out of range, or the schedule
            cannot be combined with another argument.
        TypeError: It is none of these optimizers, ``compression`` is not a strategy, or
            ``schedule`` is not a schedule.
    """
    arguments = locals()
    del arguments["use_locking"]
    return ADAPTER.DistributedOptimizer(**arguments)


def _distribute(optimizer: Any, options: Options) -> Any:
    """Make an optimizer of TensorFlow 1 or of any Keras distributed."""
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        return _distribute_v1(optimizer, options)
    if isinstance(optimizer, str):
        optimizer = tf.keras.optimizers.get(optimizer)
    # Importing one Keras must not import the other.
    if "tf_keras" in sys.modules:
        from hvdlite.keras import _legacy

        if _legacy.is_legacy(optimizer):
            return _legacy.distribute(optimizer, options)
    if "keras" in sys.modules:
        from hvdlite.keras import _keras3

        return _keras3.distribute(optimizer, options)
    raise TypeError(f"expected an optimizer of TensorFlow or Keras, found {type(optimizer)}")


ADAPTER = KerasAdapter(CONVERSION, _distribute, lambda: tf.keras)
"""The functions of `hvdlite.tensorflow.keras`."""


class _DistributedV1(Distributed):
    """The methods that `DistributedOptimizer` adds to a ``tf.compat.v1.train.Optimizer``."""

    @unconverted
    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Compute gradients as TensorFlow does, and average them over all ranks."""
        pairs = super().compute_gradients(*args, **kwargs)  # type: ignore[misc]
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        return list(zip(self._hvdlite.reduce(gradients, variables), variables, strict=True))

    def _kept_for(self, variable: Any) -> dict[str, Any]:
        names = self.get_slot_names()  # type: ignore[attr-defined]
        slots = {name: self.get_slot(variable, name) for name in names}  # type: ignore[attr-defined]
        return {name: slot for name, slot in slots.items() if slot is not None}

    def _kept(self) -> Iterable[Mapping[Any, Any]]:
        return list(self._slots.values())  # type: ignore[attr-defined]


def _distribute_v1(optimizer: Any, options: Options) -> Any:
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
    parts.current.refuse(type(optimizer).__name__, "use an optimizer of Keras 3")
    # Its gradients are averaged long before it applies them.
    synchronizer = Synchronizer(optimizer, options, connect, leaves_out=False)
    return make_distributed(optimizer, _DistributedV1, synchronizer, _distribute_v1)
