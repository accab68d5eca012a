"""Virtual ranks of a Keras optimizer on TensorFlow: several parts of each step in a process."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import tensorflow as tf
from tensorflow.python.eager.record import could_possibly_record

from hvdlite.compression import Parameter
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import global_process_set
from hvdlite.errors import HorovodInternalError, NotFiniteError
from hvdlite.gradients.finite import tell_left_out
from hvdlite.gradients.keras_exchange import LABEL, GradientPath, Synchronizer
from hvdlite.gradients.options import Options
from hvdlite.recipe.seeding import seed_part
from hvdlite.recipe.variables import generators, state_of
from hvdlite.tensorflow.gradients import densified
from hvdlite.tensorflow.graphs import when
from hvdlite.tensorflow.tensors import dtype_of, engine, like, run, unconverted, value_of
from hvdlite.tensorflow.variables import ReplicaChecks, parameters_of, read
from hvdlite.virtual.gradients import VirtualExchange, refuse_options
from hvdlite.world import parts


class VirtualSteps(GradientPath):
    """A `GradientPath` with virtual ranks: each step takes the gradients of all of them."""

    steps = None

    def __init__(self, synchronizer: Synchronizer, backend: Any) -> None:
        options = self._options = synchronizer.options
        self._checks: ReplicaChecks = backend.checks
        self._buffers = ModelBuffers(options.model)
        self.exchange = self.state = VirtualExchange(LABEL, options.strategy, options.reduction)
        self._compared: list[Any] = []
        self._generators: list[Any] | None = None
        self.stepped = False
        seed_part(all_frameworks=True)

    @staticmethod
    def check(options: Options, accumulates: bool, scales_loss: bool) -> None:
        refuse_options(options, accumulates)
        if scales_loss:
            parts.current.refuse(
                "a LossScaleOptimizer, by which parts of one step get different factors,",
                "use mixed_bfloat16, which needs no loss scaling",
            )

    @unconverted
    def step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        batch_size: Any,
        apply: Callable[[list[Any]], Any],
    ) -> None:
        """End the part of a virtual rank; after the last one, apply the averages."""
        engine()
        dense = densified(gradients, self._options)
        if any(isinstance(gradient, tf.IndexedSlices) for gradient in dense):
            parts.current.refuse("a gradient of tf.IndexedSlices", "pass sparse_as_dense=True")
        here = [number for number, gradient in enumerate(dense) if gradient is not None]
        own = [tf.convert_to_tensor(dense[number]) for number in here]
        buffers, begins = self._buffers.variables, self._buffers.begins
        counts = [] if batch_size is None else [tf.cast(tf.convert_to_tensor(batch_size), tf.int64)]
        parameters = parameters_of(variables)
        self._compared = [*variables, *self._buffers.begins]
        if self._generators is None or not tf.executing_eagerly():
            self._generators = generators()
        states = [value_of(generator.state) for generator in self._generators]

        end_part = functools.partial(self._end_part, parameters, here, bool(counts))
        reads = [read(variable) for variable in (*buffers, *begins)]
        results_like = [*own, *reads[: len(buffers)], *states]
        specs = [tf.TensorSpec((), tf.bool), *map(like, results_like)]
        complete, *results = run(end_part, [*own, *reads, *counts], specs)
        for variable, value in zip([*buffers, *states], results[len(here) :], strict=True):
            variable.assign(value)
        for begin, value in zip(begins, results[len(here) :], strict=False):
            begin.assign(value)
        averages: list[Any] = [None] * len(parameters)
        for number, average in zip(here, results, strict=False):
            averages[number] = average
        when(complete, functools.partial(apply, averages))

    def _end_part(
        self, parameters: Sequence[Parameter], here: list[int], is_weighted: bool, *arrays: Any
    ) -> list[Any]:
        """Return whether the step is complete, averages or zeros, and what buffers begin with.

        Args:
            here: The numbers of the parameters that have a gradient.
            arrays: These gradients; what buffers hold, and what they have begun with; and the
                number of samples, if gradients are weighted by it.
        """
        exchange, count = self.exchange, len(self._buffers.parameters)
        own = dict(zip(here, arrays, strict=False))
        values = arrays[len(here) :][:count]
        begins: Sequence[Any] = arrays[len(here) + count :][:count]
        samples = int(arrays[-1]) if is_weighted else None
        pairs = enumerate(zip(values, begins, strict=True))
        changed = [number for number, pair in pairs if not np.array_equal(*pair)]
        gradients = [own.get(number) for number in range(len(parameters))]
        exchange.follow(parameters, self._buffers.parameters)
        exchange.check, _ = self._checks.of(self._compared, global_process_set)
        self._buffers.end_part()
        self.stepped = False
        outcome = None
        try:
            outcome = exchange.end_part(gradients, values, changed, samples)
        except NotFiniteError as error:
            if runtime.engine().settings.not_finite != "skip":
                raise
            tell_left_out(error)
        if outcome is None:
            averages = [np.zeros_like(own[number]) for number in here]
        else:
            foreign = [n for n, a in enumerate(outcome.averages) if a is not None and n not in here]
            if foreign:
                raise HorovodInternalError(
                    f"another process has a gradient of {parameters[foreign[0]].name!r}, and this "
                    "one has none; with virtual ranks, all parts need gradients of the same "
                    "variables"
                )
            averages = [np.array(outcome.averages[number]) for number in here]
            begins = [
                before if average is None else average
                for before, average in zip(begins, outcome.buffers, strict=True)
            ]
            self.stepped = True
        number = seed_part()
        return [
            np.bool_(self.stepped),
            *averages,
            *map(np.array, begins),
            *(
                np.array(state_of(generator, number), dtype_of(generator.state.dtype))
                for generator in self._generators or ()
            ),
        ]


class ModelBuffers:
    """The weights of a model that are not trained, such as moving averages.

    Each part of a step begins with the same values, and ends with its own. Their average is what
    the next step begins with, as far as any part has changed them. A script may change them
    between steps, by loading a file, say, or by a forward pass. Therefore layers note what they
    have when the first forward pass of a part begins, which is the first one under a tape.

    Args:
        model: of Keras, built; None: there are none.

    Attributes:
        begins: variables that keep what this part has begun with.
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
        self.begins = [
            tf.Variable(read(each), trainable=False, name=parameter.name)
            for each, parameter in zip(self.variables, self.parameters, strict=True)
        ]
        self._noted: set[tuple[int, ...]] = set()
        self._noted_in: WeakKeyDictionary[tf.Graph, set[tuple[int, ...]]] = WeakKeyDictionary()
        numbers = {id(weight): number for number, weight in enumerate(weights)}
        for layer in () if model is None else model._flatten_layers():
            own = (*layer._trainable_variables, *layer._non_trainable_variables)
            here = tuple(numbers[id(weight)] for weight in own if id(weight) in numbers)
            if here:
                _note_before(layer, weakref.WeakMethod(self.note), here)

    @unconverted
    def note(self, numbers: tuple[int, ...]) -> None:
        """Keep what some of them have, if this is their layer's first forward pass of a part."""
        if not could_possibly_record():
            return
        noted = self._noted
        if not tf.executing_eagerly():
            noted = self._noted_in.setdefault(tf.compat.v1.get_default_graph(), set())
        if numbers not in noted:
            noted.add(numbers)
            for number in numbers:
                self.begins[number].assign(read(self.variables[number]))

    def end_part(self) -> None:
        """Expect another part."""
        self._noted.clear()


def _note_before(layer: Any, note: weakref.WeakMethod[Any], numbers: tuple[int, ...]) -> None:
    """Have a layer call a function before each forward pass, as long as that exists."""
    original = layer.call

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        living = note()
        if living is not None:
            living(numbers)
        return original(*args, **kwargs)

    object.__setattr__(layer, "call", call)  # Keras would track it
