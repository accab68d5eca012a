"""Steps that ranks make by themselves, and the exchanges that bring their weights together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from hvdlite import gradients, runtime
from hvdlite.arrays import describe
from hvdlite.compression import DENSE, Parameter, Reduction, Strategy, StrategyState, check_op
from hvdlite.engine import Engine
from hvdlite.engine.operation import Signature
from hvdlite.errors import GradientError, HorovodInternalError
from hvdlite.gradients import GradientBuckets
from hvdlite.interrupts import leave, uninterrupted
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import check
from hvdlite.schedule.base import ExchangeSchedule
from hvdlite.schedule.outer_step import OuterSteps
from hvdlite.schedule.turn import Turn

_AVERAGE = Reduction()


class Moment(NamedTuple):
    """An array of an optimizer's state that belongs to a weight, and has its shape.

    Attributes:
        name: what it is, unique for the weight.
        array: as it is.
        write: replaces it by another of its shape.
    """

    name: str
    array: Any
    write: Callable[[Any], None]


class Weights(Protocol):
    """The weights of a model, by the number of the parameter."""

    def read(self, number: int) -> Any:
        """Return a weight as an array, which is not changed, and not kept."""

    def write(self, number: int, array: Any) -> None:
        """Replace a weight."""

    def moments(self, number: int) -> Sequence[Moment]:
        """What the optimizer keeps for a weight; asked where the schedule averages that too."""


class _Entry(NamedTuple):
    """Something that is averaged."""

    parameter: Parameter
    array: Any
    write: Callable[[Any], None]


class LocalSteps:
    """Follows the steps of a rank, and exchanges weights with the others when that is due.

    Before a step its owner calls `begin`, after it `end`. Ranks make them in the same order, and
    compare the schedule and the parameters at first and with every exchange. Exchanges are by
    the gradient lane; nothing is exchanged by a rank alone, unless the outer step does more than
    to take the change as it is.

    What a rank that joined lacks of its weights counts for nothing in an average. It may join after
    the first step only, in which all take part.

    Args:
        schedule: which steps are local, and what is exchanged when.
        strategy: how weights, or their changes, travel.
        reduction: of changes; weights are averaged.
        label: unique, and the same on all ranks; it begins the names of the exchanges.
        process_set: the ranks that take part.

    Attributes:
        schedule: as given.
        label: as given.
        process_set: as given.
        parameters: those that take part.
        steps: how many have been made.
        in_step: whether a step has begun that has not ended.
    """

    def __init__(
        self,
        schedule: ExchangeSchedule,
        strategy: Strategy,
        reduction: Reduction,
        label: str,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        self.schedule = schedule
        self.label = label
        self.process_set = process_set
        self.parameters: list[Parameter] = []
        self.steps = 0
        self.in_step = False
        self._strategy = strategy
        self._reduction = reduction
        self._outer = OuterSteps(*schedule.outer)
        self._state = StrategyState()
        # By engine: a new world begins with none, and the old one's go with it.
        self._exchanges: WeakKeyDictionary[Engine, dict[Any, GradientBuckets]] = WeakKeyDictionary()
        self._described: Signature | None = None  # what ranks compare
        self._agreed: Engine | None = None

    @property
    def is_local(self) -> bool:
        """Whether each rank makes the next step on its own gradients."""
        return self.schedule.is_local(self.steps)

    def add(self, parameters: Sequence[Parameter]) -> None:
        """Let further parameters take part; alike on all ranks, between the same steps.

        Raises:
            ValueError: the strategy does not compute the reduction, or that has no meaning for a
                parameter's dtype.
        """
        check_op(self._strategy, self._reduction.op)
        for parameter in parameters:
            check(self._reduction.op, parameter.dtype)
        self.parameters += parameters
        self._described = None
        self._agreed = None

    def convert(self, parameters: Sequence[Parameter]) -> None:
        """Go on with the same parameters, which have other dtypes now; alike on all ranks.

        Raises:
            ValueError: what is remembered of one is of another shape.
        """
        self.parameters[:] = parameters
        self._described = None
        self._check_names()
        for parameter in parameters:
            self._outer.convert(parameter.name, parameter.dtype)

    def begin(self, weights: Weights) -> None:
        """Get ready for a step, by which the weights have not changed yet.

        Raises:
            HorovodInternalError: the ranks differ, or communication failed.
            ValueError: a state was loaded that is another model's.
        """
        engine = runtime.engine(self.process_set)
        if engine is not self._agreed:
            self._check_names()
            # A rank that comes to its first step later would wait for the others there.
            self._agree("its parameters", ("the number of steps", self.steps), together=True)
            self._agreed = engine
        self.in_step = True
        if self.schedule.sends_changes and not self._is_idle(engine):
            for number, parameter in enumerate(self.parameters):
                self._outer.begin(parameter.name, weights.read(number))

    def end(self, weights: Weights) -> None:
        """Count a step that has been made, and exchange what is due.

        Raises:
            HorovodInternalError: as `exchange`.
        """
        if self.count():
            self.exchange(weights)

    def count(self) -> bool:
        """Count a step; return whether an exchange is due."""
        self.in_step = False
        self.steps += 1
        idle = self._is_idle(runtime.engine(self.process_set))
        return not idle and bool(self.schedule.due(self.steps, self.parameters))

    def exchange(self, weights: Weights) -> None:
        """Exchange what is due.

        Raises:
            HorovodInternalError: the ranks differ, or communication failed. The weights are as
                they were, and what has changed is a part of the next exchange.
            GradientError: on all ranks; a change is not finite, and there is an outer momentum.
        """
        self.steps = self._agree("its turn")
        numbers = self.schedule.due(self.steps, self.parameters)
        if self.schedule.sends_changes:
            self._step_outside(numbers, weights)
        else:
            self._average(numbers, weights, self._strategy, self.schedule.momentum)

    def average(self, weights: Weights) -> None:
        """Average all weights now, exactly alike on all ranks, without another effect.

        Raises:
            HorovodInternalError: the ranks differ, or communication failed; the weights are as
                they were.
        """
        if runtime.engine(self.process_set).size > 1:
            self._agree("an average in between")
            self._average(range(len(self.parameters)), weights, DENSE, False)

    def restart(self) -> None:
        """Forget a step that was given up, and how the weights have changed so far."""
        self.in_step = False
        self._agreed = None
        self._outer.restart()
        self._exchanges.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and copies of all arrays that are kept, by name."""
        return {
            "steps": self.steps,
            "outer": self._outer.state_dict(),
            "compression": gradients.save(self._state, self.process_set),
        }

    def consolidate_exchange_state(self) -> None:
        """Let all ranks remember the average of what the compression has left; collective.

        Raises:
            HorovodInternalError: communication failed.
        """
        gradients.consolidate(self._state, f"{self.label}: its compression", self.process_set)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` has returned, here or elsewhere; on all ranks alike."""
        self.steps = int(state["steps"])
        self._outer.load_state_dict(state["outer"])
        op = self._reduction.op
        gradients.load(self._state, state["compression"], op, self.process_set)
        self.in_step = False
        self._agreed = None

    def _check_names(self) -> None:
        shapes = {parameter.name: parameter.shape for parameter in self.parameters}
        for kind, name, array in self._outer.arrays():
            if shapes.get(name) != array.shape:
                raise ValueError(
                    f"the schedule's state has the {kind} of {name!r}, of shape {array.shape}, "
                    f"and the parameter is {self._describe(name)}; load the state that was saved "
                    "with this model, under the same names"
                )

    def _describe(self, name: str) -> str:
        own = [each for each in self.parameters if each.name == name]
        return describe(own[0]) if own else "none of this optimizer's"

    def _is_idle(self, engine: Engine) -> bool:
        """Whether all exchanges would leave the weights as they are."""
        return engine.size == 1 and self.schedule.outer == (1.0, 0.0)

    def _agree(self, what: str, *also: tuple[str, Any], together: bool = False) -> int:
        """Compare ranks' schedules and parameters; return the greatest number of steps.

        Args:
            what: is agreed on.
            *also: compared as well, in pairs.
            together: refuse to go on without ranks that have joined.
        """
        if self._described is None:
            entries = [
                (f"parameter {number}", f"{parameter.name!r} {describe(parameter)}")
                for number, parameter in enumerate(self.parameters)
            ]
            count = ("the number of parameters", len(entries))
            self._described = Signature((("schedule", self.schedule), *entries, count))
        schedule, *rest = self._described
        signature = Signature((schedule, *also, *rest)) if also else self._described
        stands_in = not together and not self.schedule.remembers
        turn = Turn(f"{self.label}: {what}", signature, self.steps, stands_in)
        return int(runtime.engine(self.process_set).gradients.run(turn))

    def _average(
        self, numbers: Sequence[int], weights: Weights, strategy: Strategy, momentum: bool
    ) -> None:
        entries = []
        for number in numbers:
            parameter = self.parameters[number]
            array = weights.read(number)
            entries.append(_Entry(parameter, array, _writer(weights, number)))
            for moment in weights.moments(number) if momentum else ():
                name = f"{parameter.name}: {moment.name}"
                described = Parameter(name, moment.array.shape, moment.array.dtype)
                entries.append(_Entry(described, moment.array, moment.write))
        exchange = self._connect([entry.parameter for entry in entries], strategy, _AVERAGE)
        _run(exchange, lambda number: entries[number].array)
        for number, entry in enumerate(entries):
            entry.write(exchange.result_slot(number))

    def _step_outside(self, numbers: Sequence[int], weights: Weights) -> None:
        parameters = [self.parameters[number] for number in numbers]
        exchange = self._connect(parameters, self._strategy, self._reduction)

        def gradient(position: int) -> Any:
            name = parameters[position].name
            return self._outer.gradient(name, weights.read(numbers[position]))

        before = self._state.state_dict() if self._strategy.stateful else {}
        try:
            _run(exchange, gradient)
            if self._outer.has_momentum:
                self._check_finite(exchange, parameters)
        except BaseException:
            # Of buckets that did arrive, too: all changes are a part of the next exchange.
            self._state.load_state_dict(before)
            raise
        for position, number in enumerate(numbers):
            result = exchange.result_slot(position)
            weights.write(number, self._outer.end(parameters[position].name, result))

    def _check_finite(self, exchange: GradientBuckets, parameters: Sequence[Parameter]) -> None:
        """Refuse, on all ranks, what would stay in the momentum of the outer step."""
        for position, parameter in enumerate(parameters):
            if not np.isfinite(exchange.result_slot(position)).all():
                raise GradientError(
                    f"{self.label}: the change of {parameter.name!r} since the last exchange is "
                    "not finite on a rank; the weights are as they were before the exchange; "
                    "return to a checkpoint, and lower the learning rate or clip the gradients"
                )

    def _connect(
        self, parameters: Sequence[Parameter], strategy: Strategy, reduction: Reduction
    ) -> GradientBuckets:
        """The exchange of some parameters in the world as it is now."""
        engine = runtime.engine(self.process_set)
        exchanges = self._exchanges.setdefault(engine, {})
        key = tuple(parameters), strategy
        if key not in exchanges:
            exchanges[key] = GradientBuckets(
                engine, self.label, parameters, strategy, reduction, state=self._state
            )
        return exchanges[key]


def _writer(weights: Weights, number: int) -> Callable[[Any], None]:
    return lambda array: weights.write(number, array)


def _run(exchange: GradientBuckets, value: Callable[[int], Any]) -> None:
    """Exchange a value for each parameter; to the last bucket, whatever becomes of one."""
    errors: list[Exception] = []
    try:
        started = _start(exchange, value, errors)
    finally:
        leave()
    for index in range(started):
        try:
            exchange.finish_bucket(index)
        except HorovodInternalError as error:
            errors.append(error)
    if errors:
        raise errors[0]


@uninterrupted  # all is sent, or nothing
def _start(exchange: GradientBuckets, value: Callable[[int], Any], errors: list[Exception]) -> int:
    """Start the exchange of buckets until one cannot be; return how many are on their way."""
    for index, members in enumerate(exchange.plan):
        try:
            # One sample each: ranks that have joined have none, and do not count.
            exchange.start_bucket(index, {number: value(number) for number in members}, samples=1)
        except Exception as error:
            errors.append(error)
            return index
    return len(exchange.plan)
