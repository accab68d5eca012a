"""A gradient tape that reduces gradients over all ranks."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from hvdlite.base.arguments import check_groups
from hvdlite.base.reduction import Average, ReduceOp
from hvdlite.compression import Compression, Reduction
from hvdlite.engine.process_sets import ProcessSet, global_process_set, is_outside
from hvdlite.gradients.keras_exchange import LocalVariables
from hvdlite.gradients.options import (
    CompressionArgument,
    ExchangeSchedule,
    gradient_path,
    make_options,
)
from hvdlite.tensorflow.gradients import Gradient, GradientAllreduce
from hvdlite.tensorflow.tensors import CONVERSION, unconverted
from hvdlite.tensorflow.variables import ReplicaChecks

_LABEL = "DistributedGradientTape"
# Shared by all tapes, because each step makes a new tape.
_checks = ReplicaChecks()


def _inner_method(name: str) -> Any:
    """Return a method that calls the inner tape's; attributes of the base class hide that."""

    @functools.wraps(getattr(tf.GradientTape, name))
    def call(self: DistributedGradientTape, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._inner, name)(*args, **kwargs)

    return call


class DistributedGradientTape(tf.GradientTape):
    """A ``tf.GradientTape`` around another one, whose ``gradient`` averages over all ranks.

    There are two equivalent ways to use it, in eager mode and inside ``tf.function``::

        with tf.GradientTape() as tape:
            loss = ...
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            ...

    A source without a gradient counts as zeros if another rank has one; if no rank has one, its
    gradient is None. Inside ``tf.function`` ranks must agree on which gradients are None (or a
    MismatchError is raised), because graphs have a fixed structure. A gradient that is
    ``tf.IndexedSlices`` on one rank must be so on all, unless ``sparse_as_dense``.

    Functions with ``jit_compile=True`` are refused while they are traced, because XLA cannot
    compile the exchange. So are strategies of ``tf.distribute`` with several replicas.

    With the second exchange of its sources' gradients, the ranks compare their variables, and with
    each further one a slice of them (``HVDLITE_CHECK_RANKS=error``, ``warn`` or ``off``): a
    forgotten broadcast is an error, and so is a variable that one rank has changed alone.

    ``jacobian`` and ``batch_jacobian`` are not reduced.

    With a ``schedule`` of local steps, ``gradient`` returns this rank's own gradients, and the
    sources, which have to be variables, are exchanged in ``end_step``::

        tape = hvd.DistributedGradientTape(tape, schedule=hvd.Schedule.LocalSGD(every=8))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        tape.end_step()

    Steps are counted per list of sources, which must be the same, in the same order, in each step.

    Args:
        gradtape: The tape that records; persistent or not.
        device_dense, device_sparse: Accepted as in Horovod, without effect.
        compression: How dense gradients travel.
        sparse_as_dense: Exchange ``tf.IndexedSlices`` as dense gradients, instead of
            gathering the slices of all ranks.
        op: Average or Sum.
        gradient_predivide_factor: With Average, the part of the division that happens
            before the sum.
        num_groups, groups: Accepted as in Horovod; buckets do what groups are for.
        process_set: The ranks that take part. The gradients of any other rank stay its own, as in
            Horovod, and so do its variables with a schedule.
        scale_local_gradients: Divide the gradients of local sources by the number of ranks,
            so that they count as much as an average does. In a local step they stay whole.
        schedule: Decides what is exchanged and when, one of ``hvd.Schedule``; None: gradients,
            for every step.

    Raises:
        ValueError: The tape is distributed already, an argument is out of range, or the schedule
            cannot be combined with another argument.
        TypeError: ``gradtape`` is not a tape, ``compression`` is not a strategy, or ``schedule``
            is not a schedule.
    """

    def __init__(
        self,
        gradtape: tf.GradientTape,
        device_dense: str = "",
        device_sparse: str = "",
        compression: CompressionArgument = Compression.none,
        sparse_as_dense: bool = False,
        op: ReduceOp | int = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: int | list[Any] | None = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        schedule: ExchangeSchedule | None = None,
    ) -> None:
        # The parent's constructor is not called: the inner tape holds all state.
        if not isinstance(gradtape, tf.GradientTape):
            raise TypeError(f"expected a tf.GradientTape, found {type(gradtape).__name__}")
        if isinstance(gradtape, DistributedGradientTape):
            raise ValueError("this tape is a DistributedGradientTape already; wrap it once")
        check_groups(num_groups, groups)
        self._inner = gradtape
        reduction = Reduction(ReduceOp(op), gradient_predivide_factor)
        options = make_options(
            compression, schedule, CONVERSION, reduction, 1, sparse_as_dense, process_set
        )
        if options.passes > 1:
            raise ValueError(
                f"{schedule!r} is for optimizers: a tape cannot keep its gradients from being "
                "applied; add up gradients of several tapes yourself, or use "
                "hvd.DistributedOptimizer"
            )
        self._allreduce = GradientAllreduce(options, _LABEL, _checks)
        steps = gradient_path("tape", options.schedule)
        self._steps: Any = None if steps is None else steps(options, _LABEL)
        self._local = LocalVariables(scale_local_gradients)

    def register_local_source(self, source: Any) -> None:
        """Keep a variable's gradients to this rank: they are not exchanged."""
        self._local.add([source])

    def register_local_layer(self, layer: Any) -> None:
        """Keep the gradients of a layer's variables, present and future ones, to this rank.

        Args:
            layer: A Keras layer or a ``tf.Module``, with all that it contains; or several.
        """
        self._local.add(layers=layer)

    @unconverted
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: tf.UnconnectedGradients = tf.UnconnectedGradients.NONE,
        batch_size: Any = None,
    ) -> Any:
        """Compute gradients as ``tf.GradientTape.gradient``, and reduce them over all ranks.

        Args:
            target: The tensors to differentiate.
            sources: Variables (Keras' too) or tensors, in any nested structure; on all ranks
                in the same order, with the same names, shapes and dtypes.
            output_gradients: A factor for each element of ``target``.
            unconnected_gradients: Return None or zeros for a source that the target does not
                depend on.
            batch_size: The number of samples that this rank's gradients are averages of, a number
                or a scalar tensor. Each rank's gradient is then weighted by it, and the result is
                the gradient of all samples. Given on all ranks, or on none.

        Returns:
            Reduced gradients in the structure of ``sources``.

        Raises:
            MismatchError: The ranks disagree.
            HorovodInternalError: Communication failed.
            ValueError: Inside a function that XLA compiles, or in the scope of a strategy of
                ``tf.distribute`` with several replicas; with a schedule also if the step before
                has not ended, or a source is not a variable. ``batch_size`` is not a number of
                samples, or is combined with a schedule, another op than Average, or local sources
                whose gradients are divided by the number of ranks.
        """
        own = self._inner.gradient(target, sources, output_gradients, unconnected_gradients)
        if is_outside(self._allreduce.options.process_set):
            return own
        flat_sources, gradients = tf.nest.flatten(sources), tf.nest.flatten(own)

        def reduce() -> list[Gradient]:
            return self._local.reduce(gradients, flat_sources, batch_size, self._allreduce)

        if self._steps is None:
            found = reduce()
        else:
            shared = [flat_sources[number] for number in self._local.others(flat_sources)]
            found = self._steps.gradients(gradients, shared, reduce, batch_size)
        return tf.nest.pack_sequence_as(sources, found)

    @unconverted
    def end_step(self) -> None:
        """Exchange the sources if the schedule says so, after the optimizer has changed them.

        Call it once after each `gradient`. Without a schedule of local steps it does nothing.

        Raises:
            ValueError: `gradient` has not been called.
            HorovodInternalError: The ranks disagree, or communication failed.
        """
        if self._steps is not None and not is_outside(self._allreduce.options.process_set):
            self._step_of("end_step").end()

    @unconverted
    def average_weights(self) -> None:
        """Average the sources over all ranks now: before an evaluation, or at the end.

        Afterwards they are bitwise the same on all ranks. All ranks call it, between the same
        steps. The sources of a rank outside the process set stay its own.

        Raises:
            ValueError: `gradient` has not been called, or there is no schedule of local steps.
            HorovodInternalError: The ranks disagree, or communication failed.
        """
        if not is_outside(self._allreduce.options.process_set):
            self._step_of("average_weights").average()

    def _step_of(self, call: str) -> Any:
        if self._steps is None or self._steps.last is None:
            raise ValueError(
                f"{call}() is for a tape with a schedule of local steps, after its gradient()"
            )
        return self._steps.last

    def __enter__(self) -> DistributedGradientTape:
        self._inner.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._inner.__exit__(*error)

    watch = _inner_method("watch")
    watched_variables = _inner_method("watched_variables")
    stop_recording = _inner_method("stop_recording")
    reset = _inner_method("reset")
    jacobian = _inner_method("jacobian")
    batch_jacobian = _inner_method("batch_jacobian")

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":  # before the constructor has run, as in a copy
            raise AttributeError(name)
        return getattr(self._inner, name)


def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: tf.GradientTape,
    device_dense: str = "",
    device_sparse: str = "",
    compression: CompressionArgument = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[Any] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    schedule: ExchangeSchedule | None = None,
) -> DistributedGradientTape:
    """Return a `DistributedGradientTape` that leaves some layers' gradients to their rank.

    Args:
        gradtape: As for `DistributedGradientTape`, like all other arguments.
        local_layers: A layer or ``tf.Module``, or several; built or not.

    Raises:
        ValueError, TypeError: As for `DistributedGradientTape`; or there is no layer where one is
            expected.
    """
    arguments = locals()
    del arguments["local_layers"]
    tape = DistributedGradientTape(**arguments)
    if local_layers is not None:
        tape.register_local_layer(local_layers)
    return tape
