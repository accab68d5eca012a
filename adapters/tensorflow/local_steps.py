"""Schedules of local steps on TensorFlow's variables, in eager mode and inside ``tf.function``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import tensorflow as tf

from hvdlite.gradients.options import Options
from hvdlite.schedule.local_steps import LocalSteps, Moment, Weights, check_unweighted
from hvdlite.schedule.schedules import LocalSchedule
from hvdlite.tensorflow.exchange_state import exchange_state
from hvdlite.tensorflow.gradients import Gradient, densified
from hvdlite.tensorflow.graphs import refuse_session, when
from hvdlite.tensorflow.rank_ops import integer
from hvdlite.tensorflow.tensors import run, value_of
from hvdlite.tensorflow.variables import parameters_of

_FORGOTTEN = (
    "the step before has not ended, so ranks would train apart; with a schedule, call "
    "tape.end_step() after the optimizer has applied what tape.gradient() returned, once for each "
    "call of it"
)


class VariableSteps:
    """Steps of `LocalSteps` that change TensorFlow variables.

    Inside ``tf.function``, all that depends on the number of steps is decided when the graph runs.
    """

    def __init__(
        self,
        steps: LocalSteps,
        variables: Sequence[Any],
        moments: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        refuse_session("a schedule of local steps")
        self.steps = steps
        self._variables = [value_of(variable) for variable in variables]
        self._moments = [{name: value_of(each) for name, each in own.items()} for own in moments]

    def begin(self, forgotten: str | None = None) -> None:
        """Begin a step.

        Args:
            forgotten: The error message if the step before has not ended; None: that is no error.
        """

        def begin(*arrays: Any) -> list[Any]:
            if self.steps.in_step and forgotten is not None:
                raise ValueError(forgotten)
            self.steps.begin(arrays.__getitem__)
            return []

        remembered = self._variables if self.steps.schedule.sends_changes else []
        run(begin, list(map(tf.convert_to_tensor, remembered)), [], self.steps.process_set)

    def gradients(
        self, own: Sequence[Gradient], reduce: Callable[[], list[Gradient]]
    ) -> list[Gradient]:
        """Return the gradients for the step: this rank's own, or reduced ones."""
        if self.steps.schedule.is_local(0):  # and so are all steps
            return list(own)

        of_this_rank = partial(densified, options=self.steps.options)
        if tf.executing_eagerly():
            return of_this_rank(own) if self.steps.is_local else reduce()
        here = [number for number, gradient in enumerate(own) if gradient is not None]

        def of_all_ranks() -> list[Gradient]:
            reduced = reduce()
            return [reduced[number] for number in here]

        is_local = integer(lambda: self.steps.is_local, self.steps.process_set) > 0
        local = [own[number] for number in here]
        chosen = tf.cond(is_local, lambda: of_this_rank(local), of_all_ranks)
        result: list[Gradient] = [None] * len(own)
        for number, gradient in zip(here, chosen, strict=True):
            result[number] = gradient
        return result

    def end(self) -> None:
        """Count a step, after it has changed the variables, and exchange them if that is due."""
        due = integer(self.steps.count, self.steps.process_set) > 0
        when(due, partial(self._update, self.steps.exchange))

    def average(self) -> None:
        """Average all variables now."""
        self._update(self.steps.average)

    def _update(self, exchange: Callable[[Weights], None]) -> None:
        # The variables, and behind them the optimizer's, each with its owner's number and a name.
        names = [(n, key) for n, own in enumerate(self._moments) for key in sorted(own)]
        targets = self._variables + [self._moments[number][key] for number, key in names]
        changed: list[int] = list(range(len(targets)))
        eager = tf.executing_eagerly()

        def update(*arrays: Any) -> list[Any]:
            written: dict[int, Any] = {}
            write = written.__setitem__

            def moments(number: int) -> list[Moment]:
                return [
                    Moment(key, arrays[position], partial(write, position))
                    for position, (owner, key) in enumerate(names, len(self._variables))
                    if owner == number
                ]

            exchange(Weights(arrays.__getitem__, write, moments))
            if eager:
                changed[:] = sorted(written)
            # TensorFlow goes on using the memory of results, so none may be that of an argument.
            return [written[n] if n in written else np.array(arrays[n]) for n in changed]

        specs = [tf.TensorSpec(target.shape, target.dtype) for target in targets]
        results = run(
            update, list(map(tf.convert_to_tensor, targets)), specs, self.steps.process_set
        )
        for position, result in zip(changed, results, strict=True):
            targets[position].assign(result)


class TapeSteps:
    """The steps of the tapes of some variables, of which each step makes a new one.

    Args:
        label: Unique, and the same on all ranks.

    Attributes:
        last: The step that has begun last; None: none has.

    Raises:
        ValueError: The schedule needs what a tape does not know.
    """

    def __init__(self, options: Options, label: str) -> None:
        schedule = cast(LocalSchedule, options.schedule)
        if schedule.momentum:
            raise ValueError(
                f"{schedule!r} averages what an optimizer keeps, which a tape does not know; use "
                "hvd.DistributedOptimizer, or leave out momentum"
            )
        self._options = options
        self._label = label
        self.last: VariableSteps | None = None

    def gradients(
        self,
        own: Sequence[Gradient],
        sources: Sequence[Any],
        reduce: Callable[[], list[Gradient]],
        batch_size: Any,
    ) -> list[Gradient]:
        """Begin a step of the sources, and return its gradients: own or reduced ones."""
        check_unweighted(batch_size)
        for variable in map(value_of, sources):
            if not isinstance(variable, tf.Variable):
                raise ValueError(
                    "a schedule exchanges what the sources are, and one is no variable but "
                    f"{variable!r}; leave out the schedule, or the source"
                )
        self.last = VariableSteps(self._count_for(sources), sources)
        self.last.begin(_FORGOTTEN)
        return self.last.gradients(own, reduce)

    def _count_for(self, variables: Sequence[Any]) -> LocalSteps:
        """Return the steps of some variables so far, dropped with the first of the variables."""
        state, options = exchange_state(variables), self._options
        steps: LocalSteps | None = state.steps
        if steps is not None and steps.options == options:
            return steps
        if steps is not None and variables and steps.process_set is options.process_set:
            before, now = ((each.schedule, each.strategy) for each in (steps.options, options))
            raise ValueError(
                f"the tapes of these variables had the schedule and the compression {before}, and "
                f"this one has {now}: with a count of its own, ranks would train apart; make all "
                "tapes with the same arguments, and a strategy of your own once"
            )
        steps = LocalSteps(options, self._label)
        steps.add(parameters_of(variables))
        state.follow(steps)
        return steps
