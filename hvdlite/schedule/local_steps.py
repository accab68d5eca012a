"""Local steps: each rank steps on its own gradients, and ranks exchange weights when due."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np

from hvdlite.base.arrays import describe
from hvdlite.base.interrupts import leave, uninterrupted
from hvdlite.base.reduction import accumulator, check
from hvdlite.compression import DENSE, Parameter, Reduction, Strategy, StrategyState
from hvdlite.engine import Engine, runtime
from hvdlite.engine.operation import Gather, Signature
from hvdlite.errors import GradientError
from hvdlite.gradients import exchange_state
from hvdlite.gradients.buckets import GradientBuckets
from hvdlite.gradients.options import Options
from hvdlite.observe import status
from hvdlite.schedule.schedules import LocalSchedule

_AVERAGE = Reduction()
_STEP_COUNT = struct.Struct("<q")


class Moment(NamedTuple):
    """An array of an optimizer's state that has the shape of its weight."""

    name: str  # unique for the weight, such as exp_avg
    array: Any
    write: Callable[[Any], object]


class Weights(NamedTuple):
    """The weights of a model, by parameter index.

    Attributes:
        read: Returns a weight as an array, which the caller neither changes nor keeps.
        write: Replaces a weight by an array.
        moments: Returns the optimizer's state of a weight, for schedules that average it.
    """

    read: Callable[[int], Any]
    write: Callable[[int, Any], object]
    moments: Callable[[int], Sequence[Moment]]


def check_unweighted(batch_size: Any) -> None:
    """Raise if ``batch_size`` is given to an optimizer or tape with local steps, or with Adasum."""
    if batch_size is not None:
        raise ValueError(
            "batch_size weights the gradients of all ranks, and with a schedule or hvd.Adasum each "
            "rank steps on its own; leave it out"
        )


class LocalSteps:
    """Counts the steps of a rank, and exchanges weights with the other ranks when due.

    The owner calls `begin` before a step and `end` after it. Ranks make steps in the same order;
    they compare the schedule and the parameters before the first step and in every exchange.
    Exchanges run in the gradient lane. A single rank exchanges nothing, unless the outer optimizer
    changes the weights.

    A rank that has joined is left out of averages. It may join after the first step only, in
    which all ranks take part.

    Args:
        options: the schedule says which steps are local, and when to exchange what; the strategy,
            how weights or their changes travel; the reduction is that of changes, and weights are
            averaged.
        label: prefix of the names of the exchanges; unique, and the same on all ranks.

    Attributes:
        in_step: whether a step has begun that has not ended.
    """

    def __init__(self, options: Options, label: str) -> None:
        self.options = options
        self.schedule = cast(LocalSchedule, options.schedule)
        self.label = label
        self.process_set = options.process_set
        self.parameters: list[Parameter] = []
        self.steps = 0
        self.in_step = False
        self._key = object()
        self._outer = OuterOptimizer(*self.schedule.outer)
        self._state = StrategyState()
        # By engine: a new world starts with none, and those of the old one disappear with it.
        self._exchanges: WeakKeyDictionary[Engine, dict[Any, GradientBuckets]] = WeakKeyDictionary()
        self._signature: Signature | None = None
        self._agreed: Engine | None = None

    @property
    def is_local(self) -> bool:
        """Return whether each rank makes the next step on its own gradients."""
        return self.schedule.is_local(self.steps)

    def add(self, parameters: Sequence[Parameter]) -> None:
        """Add parameters: the same on all ranks, between the same steps.

        Raises:
            ValueError: the reduction is undefined for a parameter's dtype.
        """
        for parameter in parameters:
            check(self.options.reduction.op, parameter.dtype)
        self.parameters += parameters
        self._signature = None
        self._agreed = None

    def convert(self, parameters: Sequence[Parameter]) -> None:
        """Continue with the same parameters in other dtypes: the same on all ranks.

        Raises:
            ValueError: an array of the outer optimizer has another shape than its parameter.
        """
        self.parameters[:] = parameters
        self._signature = None
        self._check_outer()
        for parameter in parameters:
            self._outer.convert(parameter.name, parameter.dtype)

    def begin(self, read: Callable[[int], Any]) -> None:
        """Prepare for a step, before it changes the weights, which are read as in `Weights`.

        Raises:
            HorovodInternalError: the ranks differ, or communication failed.
            ValueError: the loaded state belongs to another model.
            Exception: that of ``read``; no step has begun, and this method may be repeated.
        """
        engine = runtime.engine(self.process_set)
        if engine is not self._agreed:
            self._check_outer()
            # A rank that had joined would wait here in its own first step, for ranks that no longer
            # come here.
            self._agree("its parameters", ("the number of steps", self.steps), together=True)
            self._agreed = engine
        if self.schedule.sends_changes and not self._is_idle(engine):
            self._outer.set_anchors([each.name for each in self.parameters], read)
        self.in_step = True

    def end(self, weights: Weights) -> None:
        """Count the step, and exchange what is due."""
        if self.count():
            self.exchange(weights)

    def count(self) -> bool:
        """Count the step, and return whether an exchange is due."""
        self.in_step = False
        self.steps += 1
        status.count_step(self._key)
        idle = self._is_idle(runtime.engine(self.process_set))
        return not idle and bool(self.schedule.due(self.steps, self.parameters))

    def exchange(self, weights: Weights) -> None:
        """Exchange what is due.

        Raises:
            HorovodInternalError: the ranks differ, or communication failed. The weights are
                unchanged, and the next exchange includes their changes.
            GradientError: on all ranks; a change is not finite, and there is an outer momentum.
            Exception: that of ``weights.write``.
        """
        self.steps = self._agree("the number of steps")
        numbers = self.schedule.due(self.steps, self.parameters)
        if self.schedule.sends_changes:
            self._outer_step(numbers, weights)
        else:
            self._average(numbers, weights, self.options.strategy, self.schedule.momentum)

    def average(self, weights: Weights) -> None:
        """Average all weights now, to the same bits on all ranks, outside of the schedule.

        Raises:
            HorovodInternalError: the ranks differ, or communication failed; the weights are
                unchanged.
            Exception: as `exchange`.
        """
        if runtime.engine(self.process_set).size > 1:
            self._agree("average_weights()")
            self._average(range(len(self.parameters)), weights, DENSE, False)

    def restart(self) -> None:
        """Discard an abandoned step.

        The outer optimizer measures the changes of the weights from where it did before: that is
        the same on all ranks, and weights may not be.
        """
        self.in_step = False
        self._agreed = None
        self._exchanges.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and copies of all arrays, by name."""
        return {
            "steps": self.steps,
            "outer": self._outer.state_dict(),
            "compression": exchange_state.save(self._state, self.process_set),
        }

    def consolidate_exchange_state(self) -> None:
        """Replace the compression's residuals by their average over the ranks; collective."""
        exchange_state.consolidate(self._state, f"{self.label}: its compression", self.process_set)

    def load_state_dict(self, state: Mapping[str, Any], is_own: bool = False) -> None:
        """Load a `state_dict`, on all ranks; ``is_own`` as for `exchange_state.load`."""
        self.steps = int(state["steps"])
        self._outer.load_state_dict(state["outer"])
        op = self.options.reduction.op
        exchange_state.load(self._state, state["compression"], op, self.process_set, is_own)
        self.in_step = False
        self._agreed = None

    def _check_outer(self) -> None:
        parameters = {parameter.name: parameter for parameter in self.parameters}
        for kind, name, array in self._outer.arrays():
            own = parameters.get(name)
            if own is None or own.shape != array.shape:
                found = "none of this optimizer's" if own is None else describe(own)
                raise ValueError(
                    f"the schedule's state has the {kind} of {name!r}, of shape {array.shape}, "
                    f"and the parameter is {found}; load the state that was saved with this "
                    "model, under the same names"
                )

    def _is_idle(self, engine: Engine) -> bool:
        """Return whether all exchanges would leave the weights unchanged."""
        return engine.size == 1 and self.schedule.outer == (1.0, 0.0)

    def _agree(self, what: str, *also: tuple[str, Any], together: bool = False) -> int:
        """Compare the ranks' schedules and parameters; return the greatest number of steps.

        Args:
            what: the purpose, for the operation's name.
            *also: further pairs of label and value to compare.
            together: whether to fail if a rank has joined.
        """
        if self._signature is None:
            entries = [
                (f"parameter {number}", f"{parameter.name!r} {describe(parameter)}")
                for number, parameter in enumerate(self.parameters)
            ]
            count = ("the number of parameters", len(entries))
            self._signature = Signature((("schedule", self.schedule), *entries, count))
        schedule, *rest = self._signature
        signature = Signature((schedule, *also, *rest)) if also else self._signature
        gather = Gather(f"{self.label}: {what}", signature, _STEP_COUNT.pack(self.steps))
        gather.stands_in = not together and not self.schedule.remembers
        payloads = runtime.engine(self.process_set).gradients.run(gather)
        # They differ if a rank has joined and come back: it then follows the others.
        return max(int(_STEP_COUNT.unpack(payload)[0]) for payload in payloads if payload)

    def _average(
        self, numbers: Sequence[int], weights: Weights, strategy: Strategy, momentum: bool
    ) -> None:
        parameters, entries = list[Parameter](), list[Moment]()
        for number in numbers:
            parameter = self.parameters[number]
            parameters.append(parameter)
            write = partial(weights.write, number)
            entries.append(Moment(parameter.name, weights.read(number), write))
            for moment in weights.moments(number) if momentum else ():
                name = f"{parameter.name}: {moment.name}"
                parameters.append(Parameter(name, moment.array.shape, moment.array.dtype))
                entries.append(moment)
        exchange = self._connect(parameters, strategy, _AVERAGE)
        # One sample per rank: ranks that have joined have none, and are left out.
        exchange.exchange(lambda number: entries[number].array, samples=1)
        slots = map(exchange.result_slot, range(len(entries)))
        _write(partial(entry.write, slot) for entry, slot in zip(entries, slots, strict=True))

    def _outer_step(self, numbers: Sequence[int], weights: Weights) -> None:
        parameters = [self.parameters[number] for number in numbers]
        exchange = self._connect(parameters, self.options.strategy, self.options.reduction)

        def gradient(position: int) -> Any:
            name = parameters[position].name
            return self._outer.gradient(name, weights.read(numbers[position]))

        before = self._state.state_dict() if self.options.strategy.stateful else {}
        try:
            exchange.exchange(gradient, samples=1)
            if self.schedule.outer[1]:  # the outer momentum
                self._check_finite(exchange, parameters)
        except BaseException:
            # Undo the buckets that did arrive, too: the next exchange includes all changes.
            self._state.load_state_dict(before)
            raise

        def step(position: int) -> None:
            result = exchange.result_slot(position)
            weights.write(numbers[position], self._outer.step(parameters[position].name, result))

        _write(partial(step, position) for position in range(len(numbers)))

    def _check_finite(self, exchange: GradientBuckets, parameters: Sequence[Parameter]) -> None:
        """Raise on all ranks for values that would stay in the outer momentum for ever."""
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
        """Return the exchange of some parameters in the current world."""
        engine = runtime.engine(self.process_set)
        exchanges = self._exchanges.setdefault(engine, {})
        key = tuple(parameters), strategy
        if key not in exchanges:
            exchanges[key] = GradientBuckets(
                engine, self.label, parameters, strategy, reduction, state=self._state
            )
        return exchanges[key]


def _write(writes: Iterable[Callable[[], object]]) -> None:
    """Replace weights; a signal's handler finds all replaced, or none."""
    try:
        _write_all(writes)
    finally:
        leave()


@uninterrupted
def _write_all(writes: Iterable[Callable[[], object]]) -> None:
    for write in writes:
        write()


@dataclass
class OuterOptimizer:
    """SGD with Nesterov momentum that applies outer gradients to weights, by name; for DiLoCo.

    Args:
        learning_rate: of the outer steps.
        momentum: Nesterov's, as in `torch.optim.SGD`; 0: no momentum is stored.

    Attributes:
        anchors: the weights at the last outer step, where they have changed since.
        buffers: the momentum, in float32 for 16-bit weights.
    """

    learning_rate: float
    momentum: float
    anchors: dict[str, Any] = field(default_factory=dict, init=False)
    buffers: dict[str, Any] = field(default_factory=dict, init=False)
    # Arrays of former anchors, to be reused.
    _spare: dict[str, Any] = field(default_factory=dict, init=False)

    def set_anchors(self, names: Sequence[str], read: Callable[[int], Any]) -> None:
        """Store weights, read by position, as anchors, all or none; those that have one keep it."""
        anchors = {}
        for position, name in enumerate(names):
            if name not in self.anchors:
                weight = read(position)
                anchor = self._spare.pop(name, None)
                anchors[name] = np.empty(weight.shape, weight.dtype) if anchor is None else anchor
                np.copyto(anchors[name], weight)
        self.anchors.update(anchors)

    def convert(self, name: str, dtype: np.dtype[Any]) -> None:
        """Convert the arrays of a weight whose dtype has changed."""
        self._spare.pop(name, None)
        for arrays, kind in ((self.anchors, dtype), (self.buffers, accumulator(dtype))):
            if name in arrays:
                arrays[name] = arrays[name].astype(kind, copy=False)

    def gradient(self, name: str, weight: Any) -> Any:
        """Return the outer gradient: the anchor minus the weight."""
        return np.asarray(self.anchors[name] - weight)

    def step(self, name: str, gradient: Any) -> Any:
        """Remove a weight's anchor, and return the new weight; overwrite the outer gradient."""
        anchor = self._spare[name] = self.anchors.pop(name)
        dtype = accumulator(anchor.dtype)
        change = gradient.astype(dtype, copy=False)
        if self.momentum:
            if name not in self.buffers:
                self.buffers[name] = np.zeros(anchor.shape, dtype)
            buffer = self.buffers[name]
            buffer *= self.momentum
            buffer += change
            change += np.multiply(buffer, self.momentum)
        change *= self.learning_rate
        np.subtract(anchor, change, out=change)
        return change.astype(anchor.dtype, copy=False)

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return copies of all arrays, by the weight's name and their kind."""
        state: dict[str, dict[str, Any]] = {}
        for kind, name, array in self.arrays():
            state.setdefault(name, {})[kind] = np.array(array)
        return state

    def arrays(self) -> Iterator[tuple[str, str, Any]]:
        """Yield kind, weight's name and array, for all arrays."""
        for kind, arrays in (("anchor", self.anchors), ("momentum", self.buffers)):
            for name, array in arrays.items():
                yield kind, name, array

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Load a `state_dict`."""
        self._spare.clear()
        for kind, arrays in (("anchor", self.anchors), ("momentum", self.buffers)):
            arrays.clear()
            arrays.update({name: np.array(e[kind]) for name, e in state.items() if kind in e})
