"""The exchange of a Keras optimizer's gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol
from weakref import WeakSet

from hvdlite._keras.options import LABEL, Options
from hvdlite._keras.replicas import describe_optimizer
from hvdlite.compression import Parameter, StrategyState
from hvdlite.gradients import check_not_local
from hvdlite.process_sets import is_outside
from hvdlite.reduction import ReduceOp
from hvdlite.schedule import ExchangeState, LocalSteps


class Backend(Protocol):
    """What the exchange needs to know of the framework below Keras."""

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], batch_size: Any = None
    ) -> list[Any]:
        """Return the gradients reduced over all ranks; None where no rank has one."""

    def divide_by_size(self, gradient: Any) -> Any:
        """Return a gradient, or None, divided by the number of ranks."""

    def describe(self, variables: Sequence[Any]) -> Sequence[Parameter]:
        """Return what is known of variables."""

    def follow(
        self, steps: LocalSteps, variables: Sequence[Any], moments: Sequence[Mapping[str, Any]]
    ) -> Steps:
        """Return what follows the steps of variables, and of what is averaged with each."""


class Steps(Protocol):
    """What follows the steps of some variables in a framework."""

    def begin(self) -> None:
        """Get ready for a step."""

    def gradients(
        self, own: Sequence[Any], reduce: Callable[[], list[Any]], sparse_as_dense: bool
    ) -> list[Any]:
        """Return the gradients that the step is made on: this rank's own, or reduced ones."""

    def end(self) -> None:
        """Count a step, which has changed the variables, and exchange what is due."""

    def average(self) -> None:
        """Average all variables now."""


class Synchronizer:
    """The exchange of one optimizer's gradients.

    Args:
        optimizer: that; it is not kept alive.
        options: how.
        backend: makes the framework's part.

    Attributes:
        options: as given.
        state: what the compression and the schedule remember of the variables.
        describe_optimizer: returns what ranks compare of the optimizer.
        finished: whether someone around the optimizer has exchanged already.
        pending: variables that had a gradient since the last exchange, by position.
        train_functions: the compiled functions of models that were made with the exchange.
        passes: what adds up the gradients of several passes, where Keras does not.
    """

    def __init__(
        self, optimizer: Any, options: Options, backend: Callable[[Synchronizer], Backend]
    ) -> None:
        self.options = options
        self.state = ExchangeState(StrategyState())
        # Comparisons, which live as long as the variables, keep it, and must not keep the rest.
        self.describe_optimizer = partial(describe_optimizer, weakref.ref(optimizer))
        self.finished = False
        self.pending: set[int] = set()
        self.train_functions: WeakSet[Callable[..., Any]] = WeakSet()
        self.passes: Any = None
        self._reduced: list[Any] = []
        self._followed: Steps | None = None
        self._backend = backend(self)
        self._local_variables: list[Any] = []
        self._local_layers: list[Any] = []

    def keep_local(self, variables: Iterable[Any] = (), layers: Any = None) -> None:
        """Exchange the gradients of these variables, and of these layers' variables, no more.

        Args:
            variables: of Keras, or of the framework.
            layers: one, or several; they need not be built yet.
        """
        self._local_variables += variables
        self._local_layers += _as_list(layers)

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Leave the exchange to the caller, as long as this lasts."""
        before, self.finished = self.finished, True
        try:
            yield
        finally:
            self.finished = before

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], batch_size: Any = None
    ) -> list[Any]:
        """Reduce gradients over all ranks, except those of local variables.

        Args:
            gradients: of this rank; None counts as zeros where another rank has one.
            variables: what they are the gradients of; alike on all ranks.
            batch_size: of how many samples the gradients are averages, which weights them; None,
                on all ranks: all count alike.

        Returns:
            For each variable the reduced gradient; None where no rank has one. A rank outside the
            process set gets its own.

        Raises:
            HorovodInternalError: the ranks disagree, or communication failed.
            ValueError: ``batch_size`` is no number of samples, or cannot be used here.
        """
        result = list(gradients)
        if is_outside(self.options.process_set):
            return result
        local = self._local_identities()
        shared = []
        for number, variable in enumerate(variables):
            if local.isdisjoint(_identities(variable)):
                shared.append(number)
            elif self.options.scale_local:
                check_not_local(batch_size)
                result[number] = self._backend.divide_by_size(result[number])
        reduced = self._backend.reduce(
            [result[number] for number in shared],
            [variables[number] for number in shared],
            batch_size,
        )
        for number, gradient in zip(shared, reduced, strict=True):
            result[number] = gradient
        return result

    def reduce_early(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce gradients before they are applied, which `reduced_early` then tells.

        They stay as they are where it is the application that decides what to exchange.
        """
        if self.finished or self.options.passes > 1 or self.options.schedule is not None:
            return list(gradients)
        self._reduced = self.reduce(gradients, variables)
        return list(self._reduced)

    def reduced_early(self, gradients: Sequence[Any], batch_size: Any = None) -> bool:
        """Return whether gradients that are to be applied are what `reduce_early` returned.

        They may be a part of it; the rest is applied later then.
        An average may be reduced once more: it stays the same. So others are taken for gradients of
        this rank.

        Raises:
            ValueError: they are others, and sums; or ``batch_size`` comes after the reduction.
        """
        reduced = [gradient for gradient in self._reduced if gradient is not None]
        self._reduced = []
        if not reduced:
            return False
        applied = {id(gradient) for gradient in gradients if gradient is not None}
        if applied.issubset(map(id, reduced)):
            if batch_size is not None:
                raise ValueError(
                    "batch_size weights the gradients of all ranks, and _compute_gradients() has "
                    "averaged them without; leave it out, or compute them with a tf.GradientTape"
                )
            self._reduced = [gradient for gradient in reduced if id(gradient) not in applied]
            return True
        if self.options.reduction.op is ReduceOp.SUM:
            raise ValueError(
                "the gradients of _compute_gradients() or get_gradients() are sums over the ranks, "
                "and others are to be applied, which would be summed (again); apply what they have "
                "returned, or compute gradients with a tf.GradientTape and change those"
            )
        return False

    def step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        moments: Callable[[Any], Mapping[str, Any]],
        apply: Callable[[list[Any]], Any],
    ) -> Any:
        """Make a step by a schedule, on the gradients of this rank or of all, and exchange weights.

        Args:
            gradients: of this rank.
            variables: what they are the gradients of; alike on all ranks.
            moments: what the optimizer keeps for a variable, by name.
            apply: makes the step.

        Returns:
            What ``apply`` returns.

        Raises:
            HorovodInternalError: the ranks disagree, or communication failed.
        """
        if is_outside(self.options.process_set):
            return apply(list(gradients))
        local = self._local_identities()
        shared = [each for each in variables if local.isdisjoint(_identities(each))]
        steps = self._steps_of(shared)
        averaged = [moments(each) if steps.schedule.momentum else {} for each in shared]
        followed = self._followed = self._backend.follow(steps, shared, averaged)
        followed.begin()
        chosen = followed.gradients(
            gradients, lambda: self.reduce(gradients, variables), self.options.sparse_as_dense
        )
        result = apply(chosen)
        followed.end()
        return result

    def average_weights(self) -> None:
        """Average the weights over all ranks now; leave those of a rank outside the process set.

        Raises:
            ValueError: there has been no step by a schedule.
            HorovodInternalError: the ranks disagree, or communication failed.
        """
        if is_outside(self.options.process_set):
            return
        if self._followed is None:
            raise ValueError(
                "average_weights() is for an optimizer with a schedule of local steps, after its "
                "first step"
            )
        self._followed.average()

    def _steps_of(self, variables: Sequence[Any]) -> LocalSteps:
        """The steps of these variables; if they are others than before, it goes on with those."""
        options, earlier = self.options, self.state.steps
        parameters = list(self._backend.describe(variables))
        if earlier is not None and earlier.parameters == parameters:
            return earlier
        assert options.schedule is not None
        steps = LocalSteps(
            options.schedule, options.strategy, options.reduction, LABEL, options.process_set
        )
        steps.add(parameters)
        if earlier is not None:
            names = {parameter.name for parameter in parameters}
            state = earlier.state_dict()
            state["outer"] = {n: entry for n, entry in state["outer"].items() if n in names}
            steps.load_state_dict(state)
        self.state.follow(steps)
        return steps

    def _local_identities(self) -> set[int]:
        # Layers are asked each time: they may have been built since.
        of_layers = [v for layer in self._local_layers for v in layer.trainable_variables]
        return {
            identity
            for variable in (*self._local_variables, *of_layers)
            for identity in _identities(variable)
        }


def _identities(variable: Any) -> set[int]:
    """A Keras variable is known by itself and by the framework's variable in it."""
    inner = getattr(variable, "value", None)
    # TensorFlow's own variables have a method of this name.
    return {id(variable)} if inner is None or callable(inner) else {id(variable), id(inner)}


def _as_list(layers: Any) -> list[Any]:
    """One layer, several, or None, as a list."""
    if layers is None:
        return []
    return list(layers) if isinstance(layers, (list, tuple, set)) else [layers]
