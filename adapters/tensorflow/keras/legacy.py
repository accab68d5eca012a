"""Optimizers of legacy Keras (``tf_keras``) that apply the average of all ranks' gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
import tf_keras

from hvdlite._keras.distributed import Distributed, make_distributed
from hvdlite._keras.options import Options, check_steps, check_unweighted
from hvdlite._keras.synchronizer import Synchronizer
from hvdlite._keras.training import exchanging, moments_in
from hvdlite.tensorflow.backend import TensorFlowBackend
from hvdlite.tensorflow.passes import PassCounter
from hvdlite.tensorflow.tensors import as_it_is

_Pairs = list[tuple[Any, Any]]

# The class that users name, and those of which it makes instances.
_LOSS_SCALING: tuple[type[Any], ...] = (
    tf_keras.mixed_precision.LossScaleOptimizer,
    *tf_keras.mixed_precision.LossScaleOptimizer.__subclasses__(),
)


def is_legacy(optimizer: Any) -> bool:
    """Whether it is an optimizer of ``tf_keras``, of either kind."""
    kinds = tf_keras.optimizers
    return isinstance(optimizer, (kinds.Optimizer, kinds.legacy.Optimizer))


def distribute(optimizer: Any, options: Options) -> Any:
    """Do what `DistributedOptimizer` does, for an optimizer of ``tf_keras``.

    Raises:
        ValueError: it is distributed already.
    """
    if isinstance(optimizer, Distributed) or isinstance(_inner(optimizer), Distributed):
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap it once")
    check_steps(options, adds_up=False, scales=_inner(optimizer) is not None)
    _install()
    # The class of one that scales is tied to its kind of inner optimizer, and asks that one first.
    stepping = _inner(optimizer) or optimizer
    synchronizer = Synchronizer(stepping, options, TensorFlowBackend)
    make_distributed(stepping, LegacyDistributed, synchronizer)
    return optimizer


class LegacyDistributed(Distributed):
    """What `DistributedOptimizer` adds to the class of an optimizer of ``tf_keras``."""

    iterations: tf.Variable

    @as_it_is
    def _compute_gradients(
        self, loss: Any, var_list: Any, grad_loss: Any = None, tape: Any = None
    ) -> _Pairs:
        """Compute gradients as Keras does, and average them over all ranks, as in Horovod.

        What `apply_gradients` then gets of them is not averaged again.

        Raises:
            HorovodInternalError: the ranks disagree, or communication failed.
        """
        if isinstance(self, tf_keras.optimizers.legacy.Optimizer):
            pairs = super()._compute_gradients(loss, var_list, grad_loss, tape)
        elif grad_loss is None:
            pairs = self.compute_gradients(loss, var_list, tape)  # type: ignore[attr-defined]
        else:
            raise ValueError(f"{type(self).__name__} takes no grad_loss; leave it out")
        return _reduced_early(self._hvdlite, pairs)

    @as_it_is
    def get_gradients(self, loss: Any, params: Any) -> list[Any]:
        """Do what `_compute_gradients` does for tensors of a graph, and return gradients alone."""
        params = tf.nest.flatten(params)
        gradients = getattr(super(), "get_gradients", tf.gradients)(loss, params)
        return self._hvdlite.reduce_early(gradients, params)

    @as_it_is
    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        *args: Any,
        batch_size: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Average the gradients over all ranks, and apply them as Keras does.

        Args:
            grads_and_vars: pairs of this rank's gradients and of variables.
            *args: as in Keras, like all further keywords.
            batch_size: as in `hvdlite.keras.optimizer.KerasDistributed.apply`.
            **kwargs: see there.

        Raises:
            HorovodInternalError: the ranks disagree, or communication failed.
            ValueError: as there.
        """
        synchronizer, pairs = self._hvdlite, list(grads_and_vars)
        check_unweighted(synchronizer.options, synchronizer.options.passes > 1, batch_size)
        gradients = [gradient for gradient, _ in pairs]
        exchanged = synchronizer.finished or synchronizer.reduced_early(gradients, batch_size)
        apply = super().apply_gradients  # type: ignore[misc]

        def step(pairs: _Pairs) -> Any:
            if not exchanged:
                pairs = reduced(synchronizer, pairs, batch_size)
            return apply(pairs, *args, **kwargs)

        if synchronizer.options.schedule is not None:
            return self._scheduled_step(pairs, lambda own: apply(own, *args, **kwargs))
        if synchronizer.options.passes == 1:
            return step(pairs)
        if synchronizer.passes is None:
            options = synchronizer.options
            synchronizer.passes = PassCounter(options.passes, options.average_passes)
        variables = [variable for _, variable in pairs]
        synchronizer.passes.build(variables)
        with tf.init_scope():
            _build(self, variables)
        # As in Keras 3, each pass counts as an iteration.
        done = synchronizer.passes.run(pairs, step, lambda: self.iterations.assign_add(1))
        is_older = isinstance(self, tf_keras.optimizers.legacy.Optimizer)
        return tf.group(done) if is_older else self.iterations

    def _scheduled_step(self, pairs: _Pairs, apply: Callable[[_Pairs], Any]) -> Any:
        gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
        with tf.init_scope():
            _build(self, variables)
        return self._hvdlite.step(
            gradients,
            variables,
            self._moments_of,
            lambda chosen: apply(list(zip(chosen, variables, strict=True))),
        )

    def _moments_of(self, variable: tf.Variable) -> dict[str, tf.Variable]:
        """What the optimizer keeps for a variable, in its shape, by name."""

        def fits(kept: Any) -> bool:
            return isinstance(kept, tf.Variable) and kept.shape == variable.shape

        if isinstance(self, tf_keras.optimizers.legacy.Optimizer):
            slots = {name: self.get_slot(variable, name) for name in self.get_slot_names()}
            return {name: slot for name, slot in slots.items() if fits(slot)}
        indices = self._index_dict  # type: ignore[attr-defined]
        index = indices[self._var_key(variable)]  # type: ignore[attr-defined]
        return moments_in(vars(self), index, len(indices), fits)


def reduced(synchronizer: Synchronizer, pairs: _Pairs, batch_size: Any = None) -> _Pairs:
    """Pairs of gradients and variables, with the gradients of all ranks."""
    gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
    average = synchronizer.reduce(gradients, variables, batch_size)
    return list(zip(average, variables, strict=True))


def _reduced_early(synchronizer: Synchronizer, pairs: _Pairs) -> _Pairs:
    gradients, variables = [g for g, _ in pairs], [v for _, v in pairs]
    return list(zip(synchronizer.reduce_early(gradients, variables), variables, strict=True))


def _build(optimizer: Any, variables: list[Any]) -> None:
    """Make the optimizer's variables: inside a branch of a graph they could not be made."""
    if isinstance(optimizer, tf_keras.optimizers.legacy.Optimizer):
        optimizer._create_all_weights(variables)
    else:
        optimizer.build(variables)


def _inner(optimizer: Any) -> Any:
    return optimizer.inner_optimizer if isinstance(optimizer, _LOSS_SCALING) else None


@functools.cache
def _install() -> None:
    """Replace methods of Keras that have to know of distributed optimizers."""
    model = tf_keras.Model
    # An explicit jit_compile=True is refused where the step is traced.
    model.make_train_function = exchanging(model.make_train_function, contextlib.nullcontext)
    for kind in _LOSS_SCALING[1:]:
        kind.apply_gradients = _averaging_first(kind.apply_gradients)
        if issubclass(kind, tf_keras.optimizers.legacy.Optimizer):
            kind._compute_gradients = _averaging_unscaled(kind._compute_gradients)
            kind.get_gradients = _averaging_unscaled(kind.get_gradients)


def _averaging_first(original: Any) -> Any:
    @functools.wraps(original)
    @as_it_is
    def apply_gradients(
        self: Any, grads_and_vars: Iterable[tuple[Any, Any]], *args: Any, **kwargs: Any
    ) -> Any:
        inner = self.inner_optimizer
        if not isinstance(inner, Distributed) or inner._hvdlite.finished:
            return original(self, grads_and_vars, *args, **kwargs)
        check_steps(inner._hvdlite.options, adds_up=False, scales=True)
        batch_size = kwargs.pop("batch_size", None)
        check_unweighted(inner._hvdlite.options, inner._hvdlite.options.passes > 1, batch_size)
        pairs = list(grads_and_vars)
        if not inner._hvdlite.reduced_early([gradient for gradient, _ in pairs], batch_size):
            pairs = reduced(inner._hvdlite, pairs, batch_size)
        with inner._hvdlite.elsewhere():
            return original(self, pairs, *args, **kwargs)

    return apply_gradients


def _averaging_unscaled(original: Any) -> Any:
    """Make of a method that computes gradients one that averages them when they are unscaled."""

    @functools.wraps(original)
    @as_it_is
    def compute(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner_optimizer
        if not isinstance(inner, Distributed):
            return original(self, *args, **kwargs)
        with inner._hvdlite.elsewhere():
            found = list(original(self, *args, **kwargs))
        if found and isinstance(found[0], tuple):
            return _reduced_early(inner._hvdlite, found)
        params = kwargs["params"] if "params" in kwargs else args[1]
        return inner._hvdlite.reduce_early(found, tf.nest.flatten(params))

    return compute
