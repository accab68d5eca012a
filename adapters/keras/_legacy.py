"""Legacy Keras (``tf_keras``): optimizers that average gradients in ``apply_gradients``.

It has two kinds of optimizers, and none of them accumulates gradients; `PassCounter` does.

Methods of Keras are replaced when the first optimizer becomes distributed:
``make_train_function`` and those that copy a ``Model``, ``from_config`` of optimizers, and
``apply_gradients``, ``_compute_gradients`` and ``get_gradients`` of loss scaling ones. With other
optimizers they do what they did before.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from hvdlite.gradients.keras_exchange import Synchronizer
from hvdlite.gradients.options import Options
from hvdlite.keras._optimizer import (
    DistributedKeras,
    distributed_part,
    keep_wrapping,
    kept_in,
    make_distributed,
    with_recompilation,
    with_wrapping,
)
from hvdlite.keras._tensorflow import after, connect
from hvdlite.tensorflow.graphs import refuse_session, when
from hvdlite.tensorflow.tensors import unconverted
from hvdlite.tensorflow.variables import WeakVariablesDict
from hvdlite.world import parts

# The class that users name, and the classes of its instances.
_LOSS_SCALING: tuple[type[Any], ...] = (
    tf_keras.mixed_precision.LossScaleOptimizer,
    *tf_keras.mixed_precision.LossScaleOptimizer.__subclasses__(),
)


def is_legacy(optimizer: Any) -> bool:
    """Return whether this is an optimizer of ``tf_keras``, of either kind."""
    kinds = tf_keras.optimizers
    return isinstance(optimizer, (kinds.Optimizer, kinds.legacy.Optimizer))


def distribute(optimizer: Any, options: Options) -> Any:
    """Make an optimizer of ``tf_keras`` distributed."""
    inner = optimizer.inner_optimizer if isinstance(optimizer, _LOSS_SCALING) else None
    parts.current.refuse("legacy Keras", "use Keras 3")
    # A loss scaling class is tied to its kind of inner optimizer, which it asks first.
    stepping = inner or optimizer
    synchronizer = Synchronizer(stepping, options, connect, scales_loss=inner is not None)
    synchronizer.pass_counters = WeakVariablesDict()
    _install()
    make_distributed(stepping, DistributedLegacy, synchronizer, distribute)
    return optimizer


def _reducing_early(original: Any) -> Any:
    """Return a method that computes gradients and averages them, as in Horovod.

    `apply_gradients` does not average them again. If the optimizer scales the loss, they are
    averaged after Keras has unscaled them.
    """

    @functools.wraps(original)
    @unconverted
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        part = distributed_part(self)
        if part is None:
            return original(self, *args, **kwargs)
        synchronizer = part._hvdlite
        with synchronizer.suspended():
            found = list(original(self, *args, **kwargs))
        if found and isinstance(found[0], tuple):
            gradients, variables = _separated(found)
            reduced = synchronizer.reduce_early(gradients, variables)
            return list(zip(reduced, variables, strict=True))
        params = kwargs["params"] if "params" in kwargs else args[1]
        return synchronizer.reduce_early(found, tf.nest.flatten(params))

    return compute


class DistributedLegacy(DistributedKeras):
    """A mixin that averages gradients in ``apply_gradients``."""

    iterations: tf.Variable

    @_reducing_early
    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> Any:
        if isinstance(self, tf_keras.optimizers.legacy.Optimizer):
            return super()._compute_gradients(loss, var_list, grad_loss, tape)  # type: ignore[misc]
        if grad_loss is not None:
            raise ValueError(f"{type(self).__name__} takes no grad_loss; leave it out")
        return self.compute_gradients(loss, var_list, tape)  # type: ignore[attr-defined]

    @_reducing_early
    def get_gradients(self, loss: Any, params: Any) -> Any:
        """Return averaged gradients of tensors in a graph."""
        compute = getattr(super(), "get_gradients", tf.gradients)
        return compute(loss, tf.nest.flatten(params))

    @unconverted
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        *args: Any,
        batch_size: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Average the gradients over all ranks and apply them as Keras does.

        Args:
            grads_and_vars: Pairs of this rank's gradients and of variables.
            *args, **kwargs: Keras' other arguments.
            batch_size: As for `hvdlite.keras.DistributedOptimizer`.

        Raises:
            HorovodInternalError, ValueError: As for ``apply`` in Keras 3.
        """
        synchronizer, options = self._hvdlite, self._hvdlite.options
        gradients, variables = _separated(grads_and_vars)
        synchronizer.check_batch_size(batch_size, options.passes > 1)
        exchanged = synchronizer.is_suspended or synchronizer.are_reduced(gradients, batch_size)
        apply_pairs = super().apply_gradients  # type: ignore[misc]

        def apply(gradients: Sequence[Any]) -> Any:
            return apply_pairs(list(zip(gradients, variables, strict=True)), *args, **kwargs)

        def step(gradients: list[Any]) -> Any:
            if not exchanged:
                gradients = synchronizer.reduce(gradients, variables, batch_size)
            finite = synchronizer.are_finite(gradients, variables)
            if finite is True:
                with after(gradients):
                    return apply(gradients)
            refuse_session("HVDLITE_NOT_FINITE=skip")
            self._build_variables(variables)  # which is impossible inside a branch
            return result(when(finite, functools.partial(apply, gradients)))

        def result(done: tf.Tensor) -> Any:
            is_older = isinstance(self, tf_keras.optimizers.legacy.Optimizer)
            return tf.group(done) if is_older else self.iterations

        if synchronizer.path is not None:
            self._build_variables(variables)
            return synchronizer.path.step(gradients, variables, batch_size, apply)
        if options.passes == 1:
            return step(gradients)
        counter = synchronizer.pass_counters.of(variables, lambda: PassCounter(options, variables))
        self._build_variables(variables)
        # As in Keras 3, each pass counts as an iteration.
        skip = functools.partial(self.iterations.assign_add, 1)
        return result(counter.run(gradients, step, skip))

    def _build_variables(self, variables: list[Any]) -> None:
        """Create the optimizer's variables, which is impossible inside a branch of a graph."""
        with tf.init_scope():
            if isinstance(self, tf_keras.optimizers.legacy.Optimizer):
                self._create_all_weights(variables)
            else:
                self.build(variables)  # type: ignore[attr-defined]

    def _kept_for(self, variable: tf.Variable) -> dict[str, tf.Variable]:
        if isinstance(self, tf_keras.optimizers.legacy.Optimizer):
            slots = self._slots.get(variable._unique_id, {})
            return {name: slot for name, slot in slots.items() if isinstance(slot, tf.Variable)}
        indices = getattr(self, "_index_dict", {})
        if (index := indices.get(variable._unique_id)) is None:
            return {}
        return kept_in(vars(self), index, len(indices))

    def _kept(self) -> Iterable[Mapping[str, Any]]:
        if isinstance(self, tf_keras.optimizers.legacy.Optimizer):
            slots: Iterable[Mapping[str, Any]] = self._slots.values()
            return slots
        size = len(getattr(self, "_index_dict", {}))
        return [kept_in(vars(self), number, size) for number in range(size)]


class PassCounter:
    """Accumulates gradients of these variables and makes a step in every n-th pass."""

    def __init__(self, options: Options, variables: Sequence[Any]) -> None:
        refuse_session("backward_passes_per_step")
        self._passes = options.passes
        self._divisor = options.passes if options.average_passes else 1
        self._pending: set[int] = set()
        with tf.init_scope():  # outside of any graph
            self._count = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._sums = [
                tf.Variable(tf.zeros(variable.shape, variable.dtype), trainable=False)
                for variable in variables
            ]

    def run(
        self,
        gradients: Sequence[Any],
        step: Callable[[list[Any]], Any],
        skip: Callable[[], Any],
    ) -> tf.Tensor:
        """Accumulate gradients; step on the sum, or skip the step; return whether there was one."""
        eager = tf.executing_eagerly()
        if not eager:
            self._pending.clear()
        for number, gradient in enumerate(gradients):
            if gradient is not None:
                self._pending.add(number)
                self._sums[number].assign_add(tf.convert_to_tensor(gradient))
        complete = self._count.assign_add(1) % self._passes == 0
        numbers = range(len(gradients))
        stepped = when(complete, lambda: step(list(map(self._take, numbers))), skip)
        if eager and stepped:
            self._pending.clear()
        return stepped

    def _take(self, number: int) -> tf.Tensor | None:
        if number not in self._pending:
            return None
        total = self._sums[number]
        # Computed before the variable is reset.
        result = tf.identity(total) / tf.cast(self._divisor, total.dtype)
        total.assign(tf.zeros_like(total))
        return result


def _separated(pairs: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    listed = list(pairs)
    return [gradient for gradient, _ in listed], [variable for _, variable in listed]


@functools.cache
def _install() -> None:
    model = tf_keras.Model
    # An explicit jit_compile=True is refused where the step is traced.
    model.make_train_function = with_recompilation(
        model.make_train_function, contextlib.nullcontext
    )
    model.__reduce__ = with_wrapping(model.__reduce__)
    model.__deepcopy__ = with_wrapping(model.__deepcopy__)
    for base in (tf_keras.optimizers.Optimizer, tf_keras.optimizers.legacy.Optimizer):
        keep_wrapping(base)
    for kind in _LOSS_SCALING[1:]:
        kind.apply_gradients = _with_reduction(kind.apply_gradients)
        if issubclass(kind, tf_keras.optimizers.legacy.Optimizer):
            kind._compute_gradients = _reducing_early(kind._compute_gradients)
            kind.get_gradients = _reducing_early(kind.get_gradients)


def _with_reduction(original: Any) -> Any:
    """Return an ``apply_gradients`` that averages before Keras looks for overflows."""

    @functools.wraps(original)
    @unconverted
    def apply_gradients(
        self: Any, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        inner = self.inner_optimizer
        if not isinstance(inner, DistributedKeras) or inner._hvdlite.is_suspended:
            return original(self, grads_and_vars, *args, **kwargs)
        synchronizer, batch_size = inner._hvdlite, kwargs.pop("batch_size", None)
        gradients, variables = _separated(grads_and_vars)
        accumulates = synchronizer.options.passes > 1
        with synchronizer.reduced(gradients, variables, batch_size, accumulates) as reduced:
            return original(self, list(zip(reduced, variables, strict=True)), *args, **kwargs)

    return apply_gradients
