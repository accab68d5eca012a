"""A gradient tape whose gradients are those of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import tensorflow as tf

from hvdlite.compression import Compression, Reduction, Strategy, check_groups
from hvdlite.gradients import check_not_local
from hvdlite.process_sets import ProcessSet, global_process_set, is_outside
from hvdlite.reduction import Average, ReduceOp
from hvdlite.schedule import (
    CompressionArgument,
    ExchangeSchedule,
    check_exchange,
    check_unweighted,
)
from hvdlite.tensorflow.gradients import Gradient, GradientAllreduce, divided
from hvdlite.tensorflow.local_steps import VariableSteps, local_steps_of
from hvdlite.tensorflow.tensors import CONVERSION, as_it_is, value_of
from hvdlite.tensorflow.variables import ReplicaChecks

_LABEL = "DistributedGradientTape"
# Of all tapes, which are made anew for every step.
_checks = ReplicaChecks()
_FORGOTTEN = (
    "the step before has not ended, so ranks would train apart; with a schedule, call "
    "tape.end_step() after the optimizer has applied what tape.gradient() returned, once for each "
    "call of it"
)


class DistributedGradientTape(tf.GradientTape):
    """A ``tf.GradientTape`` around another one, whose ``gradient`` averages over all ranks.

    Both ways to use it are alike, eagerly and inside ``tf.function``::

        with tf.GradientTape() as tape:
            loss = ...
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)

        with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
            ...

    A source without a gradient counts as zeros where another rank has one; where no rank
    has one, its gradient is None. Inside ``tf.function`` ranks must agree on which are None
    (a MismatchError says so), because graphs have a fixed structure. A gradient that
    is ``tf.IndexedSlices`` on one rank must be so on all, unless ``sparse_as_dense``.

    Functions with ``jit_compile=True`` are refused while they are traced: XLA cannot compile
    the exchange. So are strategies of ``tf.distribute`` with several replicas.

    With the second exchange of its sources' gradients the ranks compare those that are variables
    (``HVDLITE_CHECK_RANKS=error``, ``warn`` or ``off``): a forgotten broadcast is an error.

    ``jacobian`` and ``batch_jacobian`` are those of this rank alone.

    With a ``schedule`` of local steps, ``gradient`` returns this rank's own gradients, and the
    sources, which have to be variables, are exchanged in ``end_step``::

        tape = hvd.DistributedGradientTape(tape, schedule=hvd.Schedule.LocalSGD(every=8))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        tape.end_step()

    Steps are counted for a list of sources: it is the same, in the same order, in each step.

    Args:
        gradtape: the tape that records; persistent or not.
        device_dense: accepted for Horovod's sake, without effect; so is ``device_sparse``.
        compression: how dense gradients travel.
        sparse_as_dense: exchange ``tf.IndexedSlices`` as dense gradients, instead of
            gathering the slices of all ranks.
        op: Average or Sum.
        gradient_predivide_factor: with Average, the part of the division that happens
            before the sum.
        num_groups: accepted for Horovod's sake: buckets do what groups are for.
        groups: likewise.
        process_set: the ranks that take part. The gradients of any other rank stay its own, as in
            Horovod, and so do its variables with a schedule.
        scale_local_gradients: divide the gradients of local sources by the number of ranks,
            so that they count as much as an average does. In a local step they stay whole.
        schedule: when to exchange what, one of ``hvd.Schedule``; None: gradients, for every
            step.

    Raises:
        ValueError: the tape is distributed already, an argument is out of range, or the schedule
            does not go together with another one.
        TypeError: it is no tape, ``compression`` is no strategy, or ``schedule`` is none.
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
        # The parent's constructor is left out: all state is the inner tape's.
        if not isinstance(gradtape, tf.GradientTape):
            raise TypeError(f"expected a tf.GradientTape, found {type(gradtape).__name__}")
        if isinstance(gradtape, DistributedGradientTape):
            raise ValueError("this tape is a DistributedGradientTape already; wrap it once")
        check_groups(num_groups, groups)
        self._inner = gradtape
        reduction = Reduction(ReduceOp(op), gradient_predivide_factor)
        strategy, self._schedule = _checked(compression, schedule, reduction, sparse_as_dense)
        may_differ = self._schedule is not None or reduction.op is ReduceOp.ADASUM
        self._allreduce = GradientAllreduce(
            strategy,
            reduction,
            sparse_as_dense,
            process_set,
            _LABEL,
            checks=None if may_differ else _checks,
        )
        self._exchange = strategy, reduction, process_set, _LABEL
        self._sparse_as_dense = sparse_as_dense
        self._steps: VariableSteps | None = None
        self._process_set = process_set
        self._local_sources: list[Any] = []
        self._local_layers: list[Any] = []
        self._scale_local_gradients = scale_local_gradients

    def register_local_source(self, source: Any) -> None:
        """Keep a variable's gradients to this rank: they are not exchanged."""
        self._local_sources.append(source)

    def register_local_layer(self, layer: Any) -> None:
        """Keep the gradients of a layer's variables to this rank, also of those to be made yet.

        Args:
            layer: of Keras, or a ``tf.Module``; with all that it contains.

        Raises:
            TypeError: it is something else.
        """
        if not hasattr(layer, "variables"):
            raise TypeError(f"expected a layer or a tf.Module, found {layer!r}")
        self._local_layers.append(layer)

    @as_it_is
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
            target: what is differentiated.
            sources: variables (Keras' too) or tensors, in any nested structure; on all ranks
                in the same order, of the same names, shapes and dtypes.
            output_gradients: for each element of ``target``, a factor.
            unconnected_gradients: whether a source that the target does not depend on gets
                None or zeros.
            batch_size: of how many samples this rank's gradients are averages, a number or a
                scalar tensor. Each rank's gradient then counts as much as it has samples, and the
                result is the gradient of all samples. Given on all ranks, or on none.

        Returns:
            Reduced gradients in the structure of ``sources``.

        Raises:
            MismatchError: the ranks disagree.
            HorovodInternalError: communication failed.
            ValueError: inside a function that XLA compiles, or in the scope of a strategy of
                ``tf.distribute`` with several replicas; with a schedule also where the step
                before has not ended, or a source is no variable. ``batch_size`` is no number of
                samples, or comes with a schedule, another op than Average, or local sources whose
                gradients are divided by the number of ranks.
        """
        own = self._inner.gradient(target, sources, output_gradients, unconnected_gradients)
        if is_outside(self._process_set):
            return own
        flat_sources, gradients = tf.nest.flatten(sources), tf.nest.flatten(own)
        local = self._locals()
        shared = [n for n, source in enumerate(flat_sources) if id(value_of(source)) not in local]
        if self._schedule is None:
            gradients = self._reduced(gradients, flat_sources, shared, batch_size)
        else:
            check_unweighted(batch_size)
            gradients = self._scheduled(gradients, flat_sources, shared)
        return tf.nest.pack_sequence_as(sources, gradients)

    def _reduced(
        self,
        gradients: Sequence[Gradient],
        sources: Sequence[Any],
        shared: Sequence[int],
        batch_size: Any = None,
    ) -> list[Gradient]:
        """The gradients of all ranks; those that are not shared are divided instead."""
        result = list(gradients)
        if self._scale_local_gradients:
            for number in {*range(len(result))}.difference(shared):
                check_not_local(batch_size)
                result[number] = divided(gradients[number], self._process_set)
        reduced = self._allreduce.reduce(
            [gradients[number] for number in shared],
            [sources[number] for number in shared],
            batch_size,
        )
        for number, gradient in zip(shared, reduced, strict=True):
            result[number] = gradient
        return result

    def _scheduled(
        self, gradients: Sequence[Gradient], sources: Sequence[Any], shared: Sequence[int]
    ) -> list[Gradient]:
        """This rank's own gradients, or those of all ranks, whichever the step is made on."""
        variables = [value_of(sources[number]) for number in shared]
        for variable in variables:
            if not isinstance(variable, tf.Variable):
                raise ValueError(
                    "a schedule exchanges what the sources are, and one is no variable but "
                    f"{variable!r}; leave out the schedule, or the source"
                )
        steps = local_steps_of(
            [sources[number] for number in shared], self._schedule, *self._exchange
        )
        self._steps = VariableSteps(steps, variables)
        self._steps.begin(_FORGOTTEN)
        return self._steps.gradients(
            gradients,
            lambda: self._reduced(gradients, sources, shared),
            self._sparse_as_dense,
        )

    @as_it_is
    def end_step(self) -> None:
        """With a schedule: exchange the sources, if that is due; the optimizer has changed them.

        Call it once after each `gradient`. Without a schedule of local steps it does nothing.

        Raises:
            ValueError: `gradient` has not been called.
            HorovodInternalError: the ranks disagree, or communication failed.
        """
        if self._schedule is not None and not is_outside(self._process_set):
            self._scheduled_steps("end_step").end()

    @as_it_is
    def average_weights(self) -> None:
        """Average the sources over all ranks now: before an evaluation, or at the end.

        Afterwards they are the same bits on all ranks. All ranks call it, between the same steps.
        Those of a rank outside the process set stay its own.

        Raises:
            ValueError: `gradient` has not been called, or there is no schedule of local steps.
            HorovodInternalError: the ranks disagree, or communication failed.
        """
        if not is_outside(self._process_set):
            self._scheduled_steps("average_weights").average()

    def _scheduled_steps(self, call: str) -> VariableSteps:
        if self._steps is None:
            raise ValueError(
                f"{call}() is for a tape with a schedule of local steps, after its gradient()"
            )
        return self._steps

    def _locals(self) -> set[int]:
        """The identities of all local sources; layers are asked now, when they are built."""
        of_layers = [variable for layer in self._local_layers for variable in layer.variables]
        return {id(value_of(source)) for source in (*self._local_sources, *of_layers)}

    def __enter__(self) -> DistributedGradientTape:
        self._inner.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._inner.__exit__(kind, error, trace)

    def watch(self, tensor: Any) -> None:
        """Record what depends on a tensor."""
        self._inner.watch(tensor)

    def watched_variables(self) -> Any:
        """The variables that are watched."""
        return self._inner.watched_variables()

    def stop_recording(self) -> AbstractContextManager[None]:
        """Pause the recording."""
        return self._inner.stop_recording()

    def reset(self) -> None:
        """Forget what has been recorded."""
        self._inner.reset()

    def jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """As ``tf.GradientTape.jacobian``; nothing is exchanged."""
        return self._inner.jacobian(*args, **kwargs)

    def batch_jacobian(self, *args: Any, **kwargs: Any) -> Any:
        """As ``tf.GradientTape.batch_jacobian``; nothing is exchanged."""
        return self._inner.batch_jacobian(*args, **kwargs)

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
        gradtape: as there, like all other arguments.
        local_layers: a layer or ``tf.Module``, or several; built or not.

    Raises:
        ValueError, TypeError: as there; and one of the layers is none.
    """
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
        schedule,
    )
    if local_layers is not None:
        single = not isinstance(local_layers, list | tuple | set | frozenset)
        for layer in [local_layers] if single else local_layers:
            tape.register_local_layer(layer)
    return tape


def _checked(
    compression: CompressionArgument,
    schedule: ExchangeSchedule | None,
    reduction: Reduction,
    sparse_as_dense: bool,
) -> tuple[Strategy, ExchangeSchedule | None]:
    """The strategy, and the schedule if it has local steps, and a tape can follow it."""
    strategy, chosen, passes = check_exchange(
        compression, schedule, CONVERSION, reduction, 1, sparse_as_dense
    )
    if passes > 1:
        raise ValueError(
            f"{schedule!r} is for optimizers: a tape cannot keep its gradients from being applied; "
            "add up gradients of several tapes yourself, or use hvd.DistributedOptimizer"
        )
    if chosen is not None and chosen.momentum:
        raise ValueError(
            f"{chosen!r} averages what an optimizer keeps, which a tape does not know; use "
            "hvd.DistributedOptimizer, or leave out momentum"
        )
    return strategy, chosen
