"""A Keras 3 optimizer that applies the average of all ranks' gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras import ops

from hvdlite._keras.distributed import Distributed, make_distributed
from hvdlite._keras.options import Options, check_options, check_steps, check_unweighted
from hvdlite._keras.synchronizer import Synchronizer
from hvdlite._keras.training import distributed_part, keep_local, moments_in
from hvdlite.compression import Compression
from hvdlite.keras.backend import CONVERSION, Backend, as_dense, as_it_is, is_traced
from hvdlite.keras.training import install, variables_of
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import Average, ReduceOp
from hvdlite.schedule import CompressionArgument, ExchangeSchedule


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
    """Make a Keras optimizer average its gradients over all ranks before it applies them.

    That is where ``apply`` begins, which ``fit``, ``train_on_batch``, ``apply_gradients`` and
    loops of one's own come to. What Keras does after it (clipping, weight decay, moving
    averages) works on the averages. Where Keras adds up gradients itself
    (``gradient_accumulation_steps``), they are exchanged once for each update. Where it scales
    the loss (``LossScaleOptimizer``, around this or inside), they are averaged first and looked
    at then, so all ranks apply a step or none does; there every pass is exchanged.

    The optimizer itself is changed and returned: its class becomes a subclass of what it was,
    of the same name, and its variables, schedules and settings stay. A model that is saved with
    it can be loaded without hvdlite; `load_model` makes it distributed again.

    Ranks whose batches differ in size tell it, in every step: ``apply(gradients, variables,
    batch_size=n)``, or ``apply_gradients(pairs, batch_size=n)``, in a loop of one's own or in a
    model's own ``train_step``. What ``fit`` does by itself cannot: there all ranks count alike, so
    give them batches of one size, and leave a smaller last one out.

    XLA cannot compile the exchange: ``fit`` compiles its steps without it, and says so.

    Args:
        optimizer: any Keras optimizer, or the name of one.
        name: accepted for Horovod's sake, without effect; so are the devices.
        device_dense: see above.
        device_sparse: see above.
        compression: how dense gradients travel.
        sparse_as_dense: exchange ``tf.IndexedSlices`` as dense gradients.
        gradient_predivide_factor: with Average, the part of the division that happens before
            the sum.
        op: Average or Sum.
        backward_passes_per_step: calls of ``apply`` whose gradients add up before an exchange and
            an update. It sets the optimizer's ``gradient_accumulation_steps``.
        average_aggregated_gradients: whether these gradients are averaged, not summed.
        num_groups: accepted for Horovod's sake: buckets do what groups are for.
        groups: likewise.
        process_set: the ranks that take part. The optimizer of any other rank works by itself, as
            in Horovod.
        scale_local_gradients: divide the gradients of local variables by the number of ranks, so
            that they count as much as an average does. In a local step they stay whole.
        schedule: when to exchange what, one of ``hvd.Schedule``; None: gradients, for every
            update. With local steps it is where ``apply`` ends that weights are exchanged.

    Returns:
        The optimizer, with ``register_local_var(variable)``, and ``average_weights()`` for one
        with local steps.

    Raises:
        ValueError: it is distributed already, an argument is out of range, or the schedule does
            not go together with another one, with accumulation or loss scaling by Keras.
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


def distribute(optimizer: Any, options: Options) -> Any:
    """Do what `DistributedOptimizer` does, with arguments that have been checked.

    Raises:
        ValueError: it is distributed already, or cannot add up gradients.
        TypeError: it is no Keras optimizer.
    """
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"expected a Keras optimizer, found {type(optimizer).__name__}")
    if distributed_part(optimizer) is not None:
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap it once")
    check_steps(
        options,
        adds_up=bool(getattr(optimizer, "gradient_accumulation_steps", None)),
        scales=hasattr(optimizer, "inner_optimizer"),
    )
    if options.passes > 1:
        _accumulate(getattr(optimizer, "inner_optimizer", optimizer), options.passes)
    install()
    synchronizer = Synchronizer(optimizer, options, Backend)
    return make_distributed(optimizer, KerasDistributed, synchronizer)


class KerasDistributed(Distributed):
    """What `DistributedOptimizer` adds to an optimizer's class."""

    @as_it_is
    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], batch_size: Any = None
    ) -> Any:
        """Do what `apply` does, with pairs of gradients and variables.

        Returns:
            The number of steps so far, as Keras does.

        Raises:
            HorovodInternalError, ValueError: as there.
        """
        grads, trainable_variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, trainable_variables, batch_size)
        return self.iterations  # type: ignore[attr-defined]

    @as_it_is
    def apply(
        self,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
        batch_size: Any = None,
    ) -> None:
        """Average the gradients over all ranks, and apply them as Keras does.

        Args:
            grads: of this rank.
            trainable_variables: what they are the gradients of; None: all that the optimizer has.
            batch_size: of how many samples this rank's gradients are averages, a number or a
                scalar tensor. Each rank's gradients then count as much as it has samples, and the
                result is the gradient of all samples. Given on all ranks, or on none.

        Raises:
            HorovodInternalError: the ranks disagree, or communication failed.
            ValueError: there are not as many gradients as variables. ``batch_size`` is no number of
                samples, or comes with another op than Average, a schedule, accumulation, or local
                variables whose gradients are divided by the number of ranks.
        """
        variables = variables_of(self, grads, trainable_variables)
        adds_up = bool(getattr(self, "gradient_accumulation_steps", None))
        check_unweighted(self._hvdlite.options, adds_up, batch_size)
        gradients = list(grads)
        factor = self._hvdlite.options.pass_factor
        if factor != 1:  # Keras will divide by as much
            gradients = [None if g is None else ops.multiply(g, factor) for g in gradients]
        apply = super().apply  # type: ignore[misc]
        if self._hvdlite.options.schedule is not None:
            _build(self, variables)
            self._hvdlite.step(
                gradients, variables, self._moments_of, lambda chosen: apply(chosen, variables)
            )
            return
        if not self._hvdlite.finished:
            if adds_up:
                gradients = accumulated(self, gradients, variables)
            else:
                gradients = self._hvdlite.reduce(gradients, variables, batch_size)
        apply(gradients, variables)

    def _moments_of(self, variable: Any) -> dict[str, Any]:
        """What the optimizer keeps for a variable, in its shape, by the name of the attribute."""
        index = self._get_variable_index(variable)  # type: ignore[attr-defined]
        return moments_in(
            vars(self),
            index,
            len(self._trainable_variables),  # type: ignore[attr-defined]
            lambda kept: isinstance(kept, keras.Variable) and kept.shape == variable.shape,
        )


def accumulated(optimizer: Any, gradients: list[Any], variables: list[Any]) -> list[Any]:
    """Leave the adding up to Keras, and exchange the sums where it will update.

    There its accumulators, with this pass's gradients, are what is exchanged, and are zeros then.

    Args:
        optimizer: a distributed one.
        gradients: of this rank and pass.
        variables: what they are the gradients of.

    Returns:
        What to hand to Keras.
    """
    _build(optimizer, variables)
    synchronizer, traced = optimizer._hvdlite, is_traced()
    pending: set[int] = set() if traced else synchronizer.pending
    indices = [optimizer._get_variable_index(variable) for variable in variables]
    pending.update(i for i, g in zip(indices, gradients, strict=True) if g is not None)
    slots = [optimizer._accumulated_gradients[index] for index in indices]
    # Keras divides by this before it adds a gradient up.
    scale = getattr(optimizer, "loss_scale_factor", None) or 1.0

    def total(number: int) -> Any:
        if indices[number] not in pending:
            return None
        earlier = ops.multiply(slots[number], scale)
        gradient = gradients[number]
        return earlier if gradient is None else ops.add(as_dense(gradient), earlier)

    def exchange() -> list[Any]:
        sums = [total(number) for number in range(len(variables))]
        reduced = synchronizer.reduce(sums, variables)
        for slot in slots:
            slot.assign(ops.zeros(slot.shape, slot.dtype))
        return [None if g is None else as_dense(g) for g in reduced]

    def keep() -> list[Any]:
        if all(gradient is None for gradient in gradients):  # Keras would refuse to count the pass
            return [ops.zeros_like(variable) for variable in variables]
        return [None if g is None else as_dense(g) for g in gradients]

    updates = (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0
    if traced:
        return list(ops.cond(updates, exchange, keep))
    if not bool(updates):
        return keep()
    result = exchange()
    synchronizer.pending.clear()
    return result


def _build(optimizer: Any, variables: list[Any]) -> None:
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)


def _accumulate(optimizer: Any, passes: int) -> None:
    """Let Keras add up the gradients of so many passes.

    Raises:
        ValueError: it does so already, of another number, or cannot.
    """
    if isinstance(optimizer, keras.optimizers.Optimizer) and hasattr(optimizer, "optimizers"):
        raise ValueError(
            f"backward_passes_per_step={passes} with a {type(optimizer).__name__}: pass "
            "gradient_accumulation_steps to the optimizers that it consists of"
        )
    own = optimizer.gradient_accumulation_steps
    if own not in (None, passes):
        raise ValueError(
            f"backward_passes_per_step={passes}, and the optimizer has "
            f"gradient_accumulation_steps={own}; leave one of them out"
        )
    optimizer.gradient_accumulation_steps = passes
    if optimizer.built and not own:
        optimizer._accumulated_gradients = [
            optimizer.add_variable_from_reference(variable, name="gradient_accumulator")
            for variable in optimizer._trainable_variables
        ]
