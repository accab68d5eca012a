"""Where Keras has to know that an optimizer is distributed.

Two of its methods are replaced, once, when the first optimizer is made distributed. For other
optimizers they do what they did.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from hvdlite import world
from hvdlite._keras.distributed import Distributed
from hvdlite._keras.options import check_steps, check_unweighted
from hvdlite._keras.training import exchanging
from hvdlite.keras.backend import NAME, as_it_is

_log = logging.getLogger("hvdlite")


@functools.cache
def install() -> None:
    """Replace the methods."""
    model, scaling = keras.Model, keras.optimizers.LossScaleOptimizer
    model.make_train_function = exchanging(model.make_train_function, _without_xla)
    scaling.apply = _averaging_first(scaling.apply)


@contextlib.contextmanager
def _without_xla(model: Any) -> Iterator[None]:
    """Training steps alone are compiled without XLA; evaluation and prediction may have it."""
    if NAME != "tensorflow" or not model.jit_compile:
        yield
        return
    _say_that_xla_is_off()
    model.jit_compile = False
    try:
        yield
    finally:
        model.jit_compile = True


@functools.cache
def _say_that_xla_is_off() -> None:
    if world.rank() == 0:
        _log.warning(
            "training steps are compiled without XLA, which cannot exchange gradients with other "
            "ranks; model.compile(..., jit_compile=False) says that this is meant"
        )


def _averaging_first(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    @as_it_is
    def apply(
        self: Any,
        grads: Sequence[Any],
        trainable_variables: Sequence[Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Average before Keras looks whether gradients are finite: all ranks find the same."""
        inner = self.inner_optimizer
        if not isinstance(inner, Distributed) or inner._hvdlite.finished:
            original(self, grads, trainable_variables, **kwargs)
            return
        check_steps(inner._hvdlite.options, adds_up=False, scales=True)
        batch_size = kwargs.pop("batch_size", None)
        adds_up = bool(getattr(inner, "gradient_accumulation_steps", None))
        check_unweighted(inner._hvdlite.options, adds_up, batch_size)
        variables = variables_of(self, grads, trainable_variables)
        reduced = inner._hvdlite.reduce(list(grads), variables, batch_size)
        with inner._hvdlite.elsewhere():
            original(self, reduced, variables, **kwargs)

    return apply


def variables_of(optimizer: Any, grads: Sequence[Any], given: Sequence[Any] | None) -> list[Any]:
    """Return the variables that gradients are of; by default all that the optimizer has.

    Raises:
        ValueError: there are not as many: Keras would leave out the last ones.
    """
    variables = list(optimizer._trainable_variables if given is None else given)
    if len(grads) != len(variables):
        raise ValueError(
            f"apply() found {len(grads)} gradients for {len(variables)} variables; pass one, or "
            "None, for each of them, and the variables themselves if the optimizer is not built"
        )
    return variables
