"""Keras 3: optimizers that average gradients in ``apply``, on TensorFlow and on PyTorch.

Methods of Keras are replaced when the first optimizer becomes distributed:
``LossScaleOptimizer.apply``, ``Model.make_train_function`` and ``__reduce__``, and ``from_config``
of optimizers. With other optimizers they do what they did before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras as keras
from keras import ops

from hvdlite.gradients.keras_exchange import Synchronizer, overwrites
from hvdlite.gradients.options import Options
from hvdlite.keras._backends import check_backend
from hvdlite.keras._optimizer import (
    DistributedKeras,
    KerasAdapter,
    keep_wrapping,
    kept_in,
    make_distributed,
    with_recompilation,
    with_wrapping,
)
from hvdlite.world import world

_log = logging.getLogger("hvdlite")

_NAME = keras.backend.backend()
check_backend(_NAME)
framework: Any = importlib.import_module(f"hvdlite.keras._{_NAME}")


def distribute(optimizer: Any, options: Options) -> Any:
    """Make an optimizer of Keras 3, or the one of a name, distributed."""
    if isinstance(optimizer, str):
        optimizer = keras.optimizers.get(optimizer)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        found = type(optimizer).__name__
        if any(base.__module__.startswith("tf_keras.") for base in type(optimizer).__mro__):
            found = f"{found} of legacy Keras; import hvdlite.tensorflow.keras as hvd for that"
        raise TypeError(f"expected a Keras optimizer, found {found}")
    scales_loss = hasattr(optimizer, "inner_optimizer")
    synchronizer = Synchronizer(
        optimizer,
        options,
        framework.connect,
        accumulates=_accumulates(optimizer),
        scales_loss=scales_loss,
    )
    if options.passes > 1:
        _accumulate(getattr(optimizer, "inner_optimizer", optimizer), options.passes)
    _install()
    make_distributed(optimizer, DistributedKeras3, synchronizer, distribute)
    # torch.compile looks for methods in the object, then in the class without hvdlite.
    for name in ("apply", "apply_gradients"):
        object.__setattr__(optimizer, name, framework.unconverted(getattr(optimizer, name)))
    return optimizer


ADAPTER = KerasAdapter(framework.CONVERSION, distribute, lambda: keras)


class DistributedKeras3(DistributedKeras):
    """A mixin that averages gradients in ``apply``."""

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], batch_size: Any = None
    ) -> Any:
        """Call `apply` with pairs of gradients and variables; return the number of steps."""
        grads, trainable_variables = zip(*grads_and_vars, strict=True)
        self.apply(grads, trainable_variables, batch_size)
        return self.iterations  # type: ignore[attr-defined]

    def apply(
        self,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
        batch_size: Any = None,
    ) -> None:
        """Average the gradients over all ranks and apply them as Keras does.

        Args:
            grads: Gradients of this rank.
            trainable_variables: Their variables; None: all variables of the optimizer.
            batch_size: Number of samples that this rank's gradients average, a number or a scalar
                tensor. Gradients are weighted by it, so the result is the gradient of all samples.
                Pass it on all ranks or on none.

        Raises:
            HorovodInternalError: The ranks disagree, or communication failed.
            ValueError: The numbers of gradients and variables differ; or ``batch_size`` is no
                number of samples, or is combined with another op than Average, a schedule,
                accumulation, or local variables whose gradients are divided by the number of ranks.
        """
        synchronizer = self._hvdlite
        variables = _variables_for(self, grads, trainable_variables)
        accumulates = _accumulates(self)
        synchronizer.check_batch_size(batch_size, accumulates)
        gradients = list(grads)
        passes = synchronizer.options.passes
        if passes > 1 and not synchronizer.options.average_passes:
            # Keras divides by the number of passes.
            gradients = [
                g if g is None or overwrites(v) else ops.multiply(g, passes)
                for g, v in zip(gradients, variables, strict=True)
            ]
        apply = super().apply  # type: ignore[misc]
        _build(self, variables)  # ranks compare its variables
        if synchronizer.path is not None:
            _refuse_overwritten(variables)
            synchronizer.path.step(
                gradients,
                variables,
                batch_size,
                lambda chosen: apply(chosen, variables),
            )
            return
        finite: Any = True
        if not synchronizer.is_suspended:
            if accumulates:
                gradients, finite = _reduce_accumulated(self, gradients, variables)
            else:
                gradients = synchronizer.reduce(gradients, variables, batch_size)
                finite = synchronizer.are_finite(gradients, variables)
        if finite is True:
            with framework.after(gradients):
                apply(gradients, variables)
            return

        def leave_out() -> None:
            if accumulates:  # Keras counts the passes: back to the first one of an update
                count = self.gradient_accumulation_steps  # type: ignore[attr-defined]
                self._iterations.assign_sub(count - 1)  # type: ignore[attr-defined]

        ops.cond(finite, lambda: apply(gradients, variables), leave_out)

    def _kept_for(self, variable: Any) -> dict[str, Any]:
        optimizer: Any = getattr(self, "inner_optimizer", self)
        indices = optimizer._trainable_variables_indices
        if (index := indices.get(optimizer._var_key(variable))) is None:
            return {}
        return kept_in(vars(optimizer), index, len(indices))

    def _kept(self) -> list[dict[str, Any]]:
        optimizer: Any = getattr(self, "inner_optimizer", self)
        return list(map(self._kept_for, optimizer._trainable_variables))


def _variables_for(optimizer: Any, grads: Sequence[Any], given: Sequence[Any] | None) -> list[Any]:
    """Return the variables of gradients, by default all of the optimizer's."""
    variables = list(optimizer._trainable_variables if given is None else given)
    if len(grads) != len(variables):
        raise ValueError(
            f"apply() found {len(grads)} gradients for {len(variables)} variables; pass one, or "
            "None, for each of them, and the variables themselves if the optimizer is not built"
        )
    return variables


def _refuse_overwritten(variables: Sequence[Any]) -> None:
    if found := [*filter(overwrites, variables)]:
        raise ValueError(
            f"the next value of {found[0].path!r} is what Keras calls its gradient (the model is "
            "quantized to float8, perhaps), which neither virtual ranks nor a schedule combines; "
            "leave them out"
        )


def _accumulates(optimizer: Any) -> bool:
    return bool(getattr(optimizer, "gradient_accumulation_steps", None))


def _build(optimizer: Any, variables: list[Any]) -> None:
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)


def _accumulate(optimizer: Any, passes: int) -> None:
    """Make Keras accumulate the gradients of so many passes."""
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


def _reduce_accumulated(
    optimizer: Any, gradients: list[Any], variables: list[Any]
) -> tuple[list[Any], Any]:
    """Let Keras accumulate gradients, and exchange the sums in the pass in which it will update.

    In that pass its accumulators, with this pass's gradients, are exchanged and then reset.

    Returns:
        The gradients to apply, and whether to apply them, as `Synchronizer.are_finite`.
    """
    synchronizer, traced = optimizer._hvdlite, framework.is_traced()
    pending: set[int] = set() if traced else synchronizer.pending
    known = optimizer._trainable_variables_indices
    indices = [known.get(optimizer._var_key(variable)) for variable in variables]
    if None in indices:  # a layer has been thawed, say, which Keras refuses
        return gradients, True
    pending.update(i for i, g in zip(indices, gradients, strict=True) if g is not None)
    accumulators = [optimizer._accumulated_gradients[index] for index in indices]
    # Keras divides by this before it accumulates a gradient.
    scale = getattr(optimizer, "loss_scale_factor", None) or 1.0

    def total(number: int) -> Any:
        if indices[number] not in pending:
            return None
        earlier, combine = accumulators[number], ops.maximum
        if not overwrites(variables[number]):
            earlier, combine = ops.multiply(earlier, scale), ops.add
        gradient = gradients[number]
        return earlier if gradient is None else combine(framework.as_dense(gradient), earlier)

    def exchange() -> tuple[list[Any], Any]:
        sums = [total(number) for number in range(len(variables))]
        reduced = synchronizer.reduce(sums, variables)
        for accumulator in accumulators:
            accumulator.assign(ops.zeros(accumulator.shape, accumulator.dtype))
        finite = synchronizer.are_finite(reduced, variables)
        return [None if g is None else framework.as_dense(g) for g in reduced], finite

    def keep() -> tuple[list[Any], Any]:
        if all(gradient is None for gradient in gradients):  # Keras would refuse to count the pass
            return [ops.zeros_like(variable) for variable in variables], True
        return [None if g is None else framework.as_dense(g) for g in gradients], True

    updates = (optimizer._iterations + 1) % optimizer.gradient_accumulation_steps == 0
    if traced:
        chosen, finite = ops.cond(updates, exchange, keep)
        return list(chosen), finite if synchronizer.may_leave_out else True
    if not bool(updates):
        return keep()
    result = exchange()
    synchronizer.pending.clear()
    return result


@functools.cache
def _install() -> None:
    model, scaling = keras.Model, keras.optimizers.LossScaleOptimizer
    model.make_train_function = with_recompilation(model.make_train_function, _without_xla)
    model.__reduce__ = with_wrapping(model.__reduce__)
    scaling.apply = _with_reduction(scaling.apply)
    keep_wrapping(keras.optimizers.Optimizer)


@contextlib.contextmanager
def _without_xla(model: Any) -> Iterator[None]:
    """Compile training steps without XLA; evaluation and prediction may still use it."""
    if _NAME != "tensorflow" or not model.jit_compile:
        yield
        return
    _warn_that_xla_is_off()
    model.jit_compile = False
    try:
        yield
    finally:
        model.jit_compile = True


@functools.cache
def _warn_that_xla_is_off() -> None:
    if world.rank() == 0:
        _log.warning(
            "training steps are compiled without XLA, which cannot exchange gradients with other "
            "ranks; model.compile(..., jit_compile=False) says that this is meant"
        )


def _with_reduction(original: Callable[..., None]) -> Callable[..., None]:
    """Return an ``apply`` of `LossScaleOptimizer` that averages first.

    Keras skips the step if a gradient is not finite, which has to be the same on all ranks.
    """

    @functools.wraps(original)
    @framework.unconverted
    def apply(
        self: Any,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        inner = self.inner_optimizer
        if not isinstance(inner, DistributedKeras) or inner._hvdlite.is_suspended:
            original(self, grads, trainable_variables, **kwargs)
            return
        batch_size = kwargs.pop("batch_size", None)
        variables = _variables_for(self, grads, trainable_variables)
        exchange = inner._hvdlite.reduced(grads, variables, batch_size, _accumulates(inner))
        with exchange as reduced, framework.after(reduced):
            original(self, reduced, variables, **kwargs)

    return apply
