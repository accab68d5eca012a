"""Virtual ranks of a Keras optimizer on TensorFlow: several parts of each step in a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import HorovodInternalError, runtime, virtual_ranks
from hvdlite.compression import Parameter
from hvdlite.errors import NotFiniteError
from hvdlite.gradients.finite import tell_left_out
from hvdlite.gradients.virtual import VirtualExchange
from hvdlite.gradients.virtual_state import VirtualState
from hvdlite.keras._seeding import generators, state_of
from hvdlite.keras._synchronizer import Options
from hvdlite.process_sets import global_process_set
from hvdlite.recipe.seeding import seed_frameworks, seed_part
from hvdlite.tensorflow.gradients import densified
from hvdlite.tensorflow.tensors import dtype_of, engine, like, run, unconverted, value_of
from hvdlite.tensorflow.variables import ReplicaChecks, parameters_of


class VirtualSteps:
    """The steps of an optimizer, each of which takes the gradients of all virtual ranks.

    Args:
        options: of the exchange.
        label: unique, and the same on all processes.
        checks: compare the variables across processes; None: they may differ.

    Attributes:
        exchange: of the gradients.
        stepped: whether the last part has ended a step.
    """

    def __init__(self, options: Options, label: str, checks: ReplicaChecks | None) -> None:
        self._options = options
        self._checks = checks
        self._buffers = ModelBuffers(options.model)
        self.exchange = VirtualExchange(
            runtime.engine(),
            label,
            virtual_ranks.virtual_size(),
            [],
            options.strategy,
            options.reduction,
            self._buffers.parameters,
        )
        self._variables: list[Any] = []
        self._generators: list[Any] | None = None
        self.stepped = False
        seed_frameworks()

    def state(self) -> VirtualState:
        """Return what is saved and loaded."""
        return VirtualState(self.exchange)

    @unconverted
    def step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        samples: Any,
        apply: Callable[[list[Any]], Any],
    ) -> None:
        """End the part of a virtual rank; after the last one, apply the averages.

        Args:
            gradients: of this part; None where there is none.
            variables: to which they belong.
            samples: the number of samples that they are averages of, or None.
            apply: applies averages.

        Raises:
            ValueError: an option cannot be used with virtual ranks.
        """
        self._check_options()
        engine()
        dense = densified(gradients) if self._options.sparse_as_dense else list(gradients)
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in dense):
            virtual_ranks.refuse("a gradient of tf.IndexedSlices", "pass sparse_as_dense=True")
        here = [number for number, gradient in enumerate(dense) if gradient is not None]
        own = [tf.convert_to_tensor(dense[number]) for number in here]
        buffers = self._buffers.variables
        counts = [] if samples is None else [tf.cast(tf.convert_to_tensor(samples), tf.int64)]
        parameters = parameters_of(variables)
        self._variables = [value_of(variable) for variable in variables]
        if self._generators is None or not tf.executing_eagerly():
            self._generators = generators()
        states = [value_of(generator.state) for generator in self._generators]

        def end_part(*arrays: Any) -> list[Any]:
            given = dict(zip(here, arrays, strict=False))
            values = arrays[len(here) : len(here) + len(buffers)]
            count = int(arrays[-1]) if counts else None
            whole = [given.get(number) for number in range(len(parameters))]
            return self._end_part(parameters, whole, here, values, count)

        reads = [tf.convert_to_tensor(buffer) for buffer in buffers]
        specs = [tf.TensorSpec((), tf.bool), *map(like, own), *map(like, [*reads, *states])]
        complete, *results = run(end_part, [*own, *reads, *counts], specs)
        for variable, value in zip([*buffers, *states], results[len(here) :], strict=True):
            variable.assign(value)
        averages: list[Any] = [None] * len(parameters)
        for number, average in zip(here, results, strict=False):
            averages[number] = average
        if not tf.executing_eagerly():
            tf.cond(complete, lambda: _done(apply(averages)), lambda: tf.constant(False))
        elif bool(complete):
            apply(averages)

    def _check_options(self) -> None:
        options = self._options
        refused = {
            "backward_passes_per_step": options.passes > 1,
            "schedule": options.schedule is not None,
        }
        for argument, is_given in refused.items():
            if is_given:
                virtual_ranks.refuse(argument, "leave one of the two out")

    def _end_part(
        self,
        parameters: Sequence[Parameter],
        gradients: Sequence[Any],
        here: Sequence[int],
        buffers: Sequence[Any],
        samples: int | None,
    ) -> list[Any]:
        """Return whether the step is complete, averages or zeros, and what buffers begin with."""
        exchange = self.exchange
        exchange.follow(runtime.engine(), parameters)
        if self._checks is not None:
            exchange.check = self._checks.of(self._variables, global_process_set)
        changed = self._buffers.changed(buffers)
        self.stepped = False
        outcome = None
        try:
            outcome = exchange.end_part(gradients, buffers, changed, samples)
        except NotFiniteError as error:
            if runtime.engine().settings.not_finite != "skip":
                raise
            tell_left_out(error)
        if outcome is None:
            averages = [np.zeros_like(gradients[number]) for number in here]
        else:
            foreign = [n for n, a in enumerate(outcome.averages) if a is not None and n not in here]
            if foreign:
                raise HorovodInternalError(
                    f"another process has a gradient of {parameters[foreign[0]].name!r}, and this "
                    "one has none; with virtual ranks, all parts need gradients of the same "
                    "variables"
                )
            averages = [np.array(outcome.averages[number]) for number in here]
            self._buffers.begin_step(outcome.buffers)
            self.stepped = True
        number = seed_part()
        return [
            np.bool_(self.stepped),
            *averages,
            *map(np.array, self._buffers.values),
            *(
                np.array(state_of(generator, number), dtype_of(generator.state.dtype))
                for generator in self._generators or ()
            ),
        ]


class ModelBuffers:
    """The weights of a model that are not trained, such as moving averages.

    Each part of a step begins with the same values, and ends with its own. Their average is what
    the next step begins with, as far as any part has changed them.

    Args:
        model: of Keras, built, with the weights that training begins with; None: there are none.

    Attributes:
        variables: of TensorFlow.
        parameters: describe them.
        values: with which each part of this step begins.

    Raises:
        ValueError: the model is not built.
    """

    def __init__(self, model: Any) -> None:
        weights: list[Any] = []
        if model is not None:
            if not model.built:
                raise ValueError(
                    f"the model {model.name!r} has no weights yet; build it, for example by "
                    "model.build((None, 28, 28, 1)), before hvd.DistributedOptimizer(model=...)"
                )
            weights = model.non_trainable_weights
        self.variables = [value_of(weight) for weight in weights]
        self.parameters = parameters_of(weights)
        self.values = [np.array(variable.numpy()) for variable in self.variables]

    def changed(self, values: Sequence[Any]) -> frozenset[int]:
        """Return the numbers of those that differ from what the part has begun with."""
        pairs = enumerate(zip(values, self.values, strict=True))
        return frozenset(n for n, (now, before) in pairs if not np.array_equal(now, before))

    def begin_step(self, averages: Sequence[Any]) -> None:
        """Take over the averages, which are None where nothing has changed."""
        self.values = [
            value if average is None else np.array(average)
            for value, average in zip(self.values, averages, strict=True)
        ]


def _done(result: Any) -> tf.Tensor:
    return tf.constant(True)
