"""Steps that ranks make by themselves on TensorFlow's variables, eagerly and in ``tf.function``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.compression import Parameter, Reduction, Strategy
from hvdlite.process_sets import ProcessSet
from hvdlite.schedule import ExchangeSchedule, LocalSteps
from hvdlite.schedule.local_steps import Moment
from hvdlite.tensorflow.graphs import refuse_session
from hvdlite.tensorflow.memory import ByVariables, state_of
from hvdlite.tensorflow.names import unique_names
from hvdlite.tensorflow.reducer import Gradient
from hvdlite.tensorflow.tensors import dtype_of, run, value_of

_Values = Sequence[tf.Tensor]


class VariableSteps:
    """The steps by which some variables change.

    Inside ``tf.function`` whatever depends on the number of steps is decided when the graph runs.

    Args:
        steps: that are followed.
        variables: one for each of their parameters.
        moments: for each variable those of the optimizer that are averaged with it, by name.

    Raises:
        NotImplementedError: in a graph for a ``tf.compat.v1.Session``.
    """

    def __init__(
        self,
        steps: LocalSteps,
        variables: Sequence[tf.Variable],
        moments: Sequence[dict[str, tf.Variable]] = (),
    ) -> None:
        refuse_session("a schedule of local steps")
        self.steps = steps
        self._variables = list(variables)
        self._moments = list(moments) or [{} for _ in variables]

    def begin(self, forgotten: str | None = None) -> None:
        """Get ready for a step.

        Args:
            forgotten: what to say if the step before has not ended; None: it may be begun anew.

        Raises:
            ValueError: the step before has not ended.
            HorovodInternalError: the ranks differ, or communication failed.
        """

        def begin(*arrays: Any) -> list[Any]:
            if self.steps.in_step and forgotten is not None:
                raise ValueError(forgotten)
            self.steps.begin(_Arrays(arrays, {}))
            return []

        remembered = self._variables if self.steps.schedule.sends_changes else []
        run(begin, _read(remembered), [], self.steps.process_set)

    def gradients(
        self,
        own: Sequence[Gradient],
        reduce: Callable[[], list[Gradient]],
        sparse_as_dense: bool = False,
    ) -> list[Gradient]:
        """Return the gradients that the step is made on.

        Args:
            own: those of this rank.
            reduce: makes those of all ranks of them, by `Reducer`.
            sparse_as_dense: whether that makes dense ones of sparse ones.
        """
        if self.steps.schedule.is_local(0):  # and so are all steps
            return list(own)
        if tf.executing_eagerly():
            return _alike(own, sparse_as_dense) if self.steps.is_local else reduce()
        here = [number for number, gradient in enumerate(own) if gradient is not None]

        def of_all() -> list[Gradient]:
            reduced = reduce()
            return [reduced[number] for number in here]

        def of_this_rank() -> list[Gradient]:
            return _alike([own[number] for number in here], sparse_as_dense)

        is_local = self._ask(lambda: self.steps.is_local)
        chosen = tf.cond(is_local, of_this_rank, of_all)
        result: list[Gradient] = [None] * len(own)
        for number, gradient in zip(here, chosen, strict=True):
            result[number] = gradient
        return result

    def end(self) -> None:
        """Count a step, which has changed the variables, and exchange what is due.

        Raises:
            HorovodInternalError: the ranks differ, or communication failed.
        """
        due = self._ask(self.steps.count)
        if not tf.executing_eagerly():
            tf.cond(due, self._exchange, _nothing)
        elif due:
            self._exchange()

    def average(self) -> None:
        """Average all variables now.

        Raises:
            HorovodInternalError: as `end`.
        """
        self._update(self.steps.average)

    def _ask(self, question: Callable[[], bool]) -> tf.Tensor:
        def answer() -> list[Any]:
            return [np.bool_(question())]

        return run(answer, [], [tf.TensorSpec((), tf.bool)], self.steps.process_set)[0]

    def _exchange(self) -> tf.Tensor:
        self._update(self.steps.exchange)
        return tf.constant(True)

    def _update(self, exchange: Callable[[_Arrays], None]) -> None:
        """Run an exchange on the variables' values, and assign what comes of them."""
        names = [(n, key) for n, own in enumerate(self._moments) for key in sorted(own)]
        targets = self._variables + [self._moments[number][key] for number, key in names]
        changed: list[int] = list(range(len(targets)))
        eager = tf.executing_eagerly()

        def update(*arrays: Any) -> list[Any]:
            positions = {name: len(self._variables) + n for n, name in enumerate(names)}
            weights = _Arrays(arrays, positions)
            exchange(weights)
            if eager:
                changed[:] = sorted(weights.written)
            # TensorFlow goes on using the memory of results, so none may be that of an argument.
            return [
                weights.written[n] if n in weights.written else np.array(arrays[n]) for n in changed
            ]

        specs = [tf.TensorSpec(target.shape, target.dtype) for target in targets]
        results = run(update, _read(targets), specs, self.steps.process_set)
        for position, result in zip(changed, results, strict=True):
            targets[position].assign(result)


class _Arrays:
    """Weights as `LocalSteps` takes them: arrays that came as arguments.

    Args:
        arrays: of the variables, and then of what the optimizer keeps.
        moments: where those are among the arrays, by the number of the variable and the name.

    Attributes:
        written: what replaces some of them, by position.
    """

    def __init__(self, arrays: Sequence[Any], moments: dict[tuple[int, str], int]) -> None:
        self._arrays = arrays
        self._moments = moments
        self.written: dict[int, Any] = {}

    def read(self, number: int) -> Any:
        return self._arrays[number]

    def write(self, number: int, array: Any) -> None:
        self.written[number] = array

    def moments(self, number: int) -> list[Moment]:
        return [
            Moment(key, self._arrays[position], self._writer(position))
            for (owner, key), position in self._moments.items()
            if owner == number
        ]

    def _writer(self, position: int) -> Callable[[Any], None]:
        return lambda array: self.write(position, array)


def _read(variables: Sequence[tf.Variable]) -> _Values:
    return [tf.convert_to_tensor(variable) for variable in variables]


def _alike(gradients: Sequence[Gradient], sparse_as_dense: bool) -> list[Gradient]:
    """Gradients of this rank, dense where they would be so if they were of all ranks."""
    return [
        tf.convert_to_tensor(gradient)
        if sparse_as_dense and isinstance(gradient, tf.IndexedSlices)
        else gradient
        for gradient in gradients
    ]


def _nothing() -> tf.Tensor:
    return tf.constant(False)


def describe(variables: Sequence[Any]) -> list[Parameter]:
    """What is known of variables, of Keras or of TensorFlow."""
    return [
        Parameter(name, tuple(variable.shape), dtype_of(variable.dtype))
        for name, variable in zip(unique_names(variables), variables, strict=True)
    ]


def steps_of(
    variables: Sequence[Any],
    schedule: ExchangeSchedule,
    strategy: Strategy,
    reduction: Reduction,
    process_set: ProcessSet,
    label: str,
) -> LocalSteps:
    """The steps of these variables so far, for tapes, which are made anew for every step.

    They are forgotten with the first of the variables that is no more.

    Args:
        variables: on all ranks in the same order, of the same names, shapes and dtypes.
        schedule: as `LocalSteps` has it, like all that follow.
        strategy: see there.
        reduction: see there.
        process_set: see there.
        label: see there.
    """
    inner = [value_of(variable) for variable in variables]
    key = (*map(id, inner), schedule, strategy, reduction, process_set, label)
    if key not in _steps:
        steps = LocalSteps(schedule, strategy, reduction, label, process_set)
        steps.add(describe(variables))
        state_of(variables).follow(steps)
        _steps.keep(key, steps, inner)
    return _steps[key]


_steps: ByVariables[LocalSteps] = ByVariables()
