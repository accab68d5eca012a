"""The exchange of a Keras optimizer's gradients; imports no Keras and no framework."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol
from weakref import WeakSet

from hvdlite.base.reduction import ReduceOp
from hvdlite.compression import Parameter, StrategyState
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import is_outside
from hvdlite.gradients.exchange_state import ExchangeState
from hvdlite.gradients.keras_replica import OptimizerReplica
from hvdlite.gradients.metadata import check_not_local
from hvdlite.gradients.options import Options, gradient_path

LABEL = "DistributedOptimizer of Keras"
"""The same for all optimizers, so that ranks with different variables meet and report it."""


class Backend(Protocol):
    """The exchange of gradients of the framework that Keras runs on.

    Attributes:
        owner: Keras on this framework, as of `hvdlite.gradients.options.gradient_path`.
    """

    owner: ClassVar[str]

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], batch_size: Any = None
    ) -> list[Any]:
        """Return the gradients reduced over all ranks; None where no rank has one.

        Args:
            batch_size: The number of samples that this rank's gradients average, as their weight;
                None on all ranks: all ranks have the same weight.
        """

    def divide_by_size(self, gradient: Any) -> Any:
        """Return a gradient divided by the number of ranks."""

    def describe(self, variables: Sequence[Any]) -> tuple[Parameter, ...]:
        """Return names, shapes and dtypes of variables."""

    def are_finite(self, gradients: Sequence[Any]) -> Any:
        """Return whether all dense gradients are finite: a bool, or a tensor in a graph."""

    def greatest(self, values: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the greatest values of all ranks, as `overwrites` says it of these variables."""


class GradientPath(Protocol):
    """Makes an optimizer's steps where there is not one exchange of gradients for each.

    It is made of a `Synchronizer` and its `Backend`.

    Attributes:
        state: What is saved and loaded.
        stepped: Whether the last call of `step` made one.
        steps: The local steps of the framework's variables; None: there are none, or not yet.
    """

    state: Any
    stepped: bool
    steps: Any

    @staticmethod
    def check(options: Options, accumulates: bool, scales_loss: bool) -> None:
        """Refuse an optimizer whose calls are not all steps, or options that exclude each other.

        Args:
            accumulates: Keras accumulates the gradients of several calls.
            scales_loss: Keras scales the loss and skips steps that overflow.
        """

    def step(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        batch_size: Any,
        apply: Callable[[list[Any]], Any],
    ) -> Any:
        """Make a step, or a part of one, and return what ``apply`` returns, or None.

        Args:
            variables: Their variables, the same on all ranks.
            batch_size: The number of samples that the gradients average; None: not given.
        """


class LocalVariables:
    """Variables whose gradients stay on their rank, perhaps divided by the number of ranks."""

    def __init__(self, scale: bool) -> None:
        self._scale = scale
        self._variables: list[Any] = []
        self._layers: list[Any] = []

    def __bool__(self) -> bool:
        return bool(self._variables or self._layers)

    def add(self, variables: Iterable[Any] = (), layers: Any = None) -> None:
        """Add variables, and those of a layer or several, which need not be built yet."""
        self._variables += variables
        if layers is not None:
            is_one = not isinstance(layers, list | tuple | set | frozenset)
            for layer in [layers] if is_one else layers:
                if not hasattr(layer, "variables"):
                    raise TypeError(f"expected a layer or a tf.Module, found {layer!r}")
                self._layers.append(layer)

    def others(self, variables: Sequence[Any]) -> list[int]:
        """Return the indices of the variables that are not local."""
        of_layers = [variable for layer in self._layers for variable in layer.variables]
        local = set().union(*map(_identities, (*self._variables, *of_layers)))
        return [n for n, each in enumerate(variables) if local.isdisjoint(_identities(each))]

    def reduce(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        batch_size: Any,
        backend: Backend,
    ) -> list[Any]:
        """Return the gradients reduced over all ranks, except those of local variables."""
        result, others = list(gradients), self.others(variables)
        written = {number for number in others if overwrites(variables[number])}
        if given := [number for number in sorted(written) if result[number] is not None]:
            values = [[each[number] for number in given] for each in (result, variables)]
            for number, value in zip(given, backend.greatest(*values), strict=True):
                result[number] = value
        if self._scale:
            for number in {*range(len(result))}.difference(others):
                check_not_local(batch_size)
                if result[number] is not None:
                    result[number] = backend.divide_by_size(result[number])
        shared = [number for number in others if number not in written]
        own, sources = ([each[number] for number in shared] for each in (result, variables))
        for number, value in zip(shared, backend.reduce(own, sources, batch_size), strict=True):
            result[number] = value
        return result


class Synchronizer:
    """The exchange of one optimizer's gradients.

    Args:
        optimizer: The optimizer; only a weak reference is kept.
        leaves_out: Whether the optimizer can leave out a step.
        accumulates, scales_loss: As of `GradientPath.check`.

    Attributes:
        leaves_out: Whether it does so if averages are not finite and HVDLITE_NOT_FINITE=skip.
        state: What compression and schedule remember of the variables.
        replica: What ranks compare of the optimizer.
        is_suspended: A caller around the optimizer exchanges the gradients.
        pending: Indices of variables with a gradient since the last exchange (Keras 3).
        pass_counters: For each list of variables what accumulates several passes (legacy Keras).
        train_functions: Models' compiled training functions that exchange gradients.
        local: Variables whose gradients are not exchanged.
        path: Makes the steps; None: there is one exchange of gradients for each.
    """

    def __init__(
        self,
        optimizer: Any,
        options: Options,
        backend: Callable[[Synchronizer], Backend],
        leaves_out: bool = True,
        accumulates: bool = False,
        scales_loss: bool = False,
    ) -> None:
        self.options = options
        # In local steps a rank's own gradients count, and ranks would differ.
        self.leaves_out = leaves_out and options.schedule is None
        self.state: Any = ExchangeState(StrategyState())
        # Comparisons live as long as the variables. They keep this, and must not keep the rest.
        self.replica = OptimizerReplica(optimizer)
        self.is_suspended = False
        self.pending: set[int] = set()
        self.pass_counters: Any = None
        self.train_functions: WeakSet[Callable[..., Any]] = WeakSet()
        self._early: list[Any] = []
        self.local = LocalVariables(options.scale_local)
        self._backend = backend(self)
        self.path: GradientPath | None = None
        path = gradient_path(self._backend.owner, options.schedule)
        if path is not None:
            path.check(options, accumulates, scales_loss)
            self.path = path(self, self._backend)
            self.state = self.path.state

    @contextmanager
    def reduced(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        batch_size: Any,
        accumulates: bool,
    ) -> Iterator[list[Any]]:
        """Reduce gradients for an optimizer around this one, which scales the loss.

        It looks for overflows in what it gets and applies that, within the context.
        """
        if self.path is not None:
            self.path.check(self.options, accumulates=False, scales_loss=True)
        self.check_batch_size(batch_size, accumulates)
        found = list(gradients)
        if not self.are_reduced(found, batch_size):
            found = self.reduce(found, variables, batch_size)
        with self.suspended():
            yield found

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave the exchange to the caller for the duration of the context."""
        before, self.is_suspended = self.is_suspended, True
        try:
            yield
        finally:
            self.is_suspended = before

    def reduce(
        self, gradients: Sequence[Any], variables: Sequence[Any], batch_size: Any = None
    ) -> list[Any]:
        """Reduce gradients over all ranks, except those of local variables.

        A rank outside the process set gets its own gradients. One that is None counts as zeros if
        another rank has it.
        """
        if is_outside(self.options.process_set):
            return list(gradients)
        return self.local.reduce(gradients, variables, batch_size, self._backend)

    @property
    def may_leave_out(self) -> bool:
        """Return whether `are_finite` looks at gradients in this world."""
        process_set = self.options.process_set
        if not self.leaves_out or is_outside(process_set):
            return False
        return runtime.engine(process_set).settings.not_finite == "skip"

    def are_finite(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Return whether to make a step on averages: a bool, or a tensor in a graph.

        It is the same on all ranks, so gradients of local variables do not count.
        """
        if not self.may_leave_out:
            return True
        return self._backend.are_finite([gradients[n] for n in self.local.others(variables)])

    def reduce_early(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce gradients before they are applied; `are_reduced` recognizes them later.

        Gradients that can only be reduced when they are applied are returned as they are.
        """
        if self.is_suspended or self.options.passes > 1 or self.options.schedule is not None:
            return list(gradients)
        self._early = self.reduce(gradients, variables)
        return list(self._early)

    def are_reduced(self, gradients: Sequence[Any], batch_size: Any = None) -> bool:
        """Return whether gradients to apply come from `reduce_early`.

        They may be some of its gradients, with the rest applied later. All others are taken for
        this rank's own: an average that is averaged again stays the same, and a sum is refused.
        """
        early = [gradient for gradient in self._early if gradient is not None]
        self._early = []
        if not early:
            return False
        applied = {id(gradient) for gradient in gradients if gradient is not None}
        if applied.issubset(map(id, early)):
            if batch_size is not None:
                raise ValueError(
                    "batch_size weights the gradients of all ranks, and _compute_gradients() has "
                    "averaged them without; leave it out, or compute them with a tf.GradientTape"
                )
            self._early = [gradient for gradient in early if id(gradient) not in applied]
            return True
        if self.options.reduction.op is ReduceOp.SUM:
            raise ValueError(
                "the gradients of _compute_gradients() or get_gradients() are sums over the ranks, "
                "and others are to be applied, which would be summed (again); apply what they have "
                "returned, or compute gradients with a tf.GradientTape and change those"
            )
        return False

    def check_batch_size(self, batch_size: Any, accumulates: bool) -> None:
        """Refuse a batch size if the gradients of several calls add up."""
        if batch_size is not None and accumulates:
            raise ValueError(
                "batch_size weights the gradients of one call, and here those of several add up "
                "before they are exchanged; leave out backward_passes_per_step and "
                "gradient_accumulation_steps, or batch_size"
            )


def overwrites(variable: Any) -> bool:
    """Return whether the gradient of a variable is its next value, as of the scales of float8.

    Keras takes the greatest of several passes, so the greatest of all ranks is that of all samples.
    """
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _identities(variable: Any) -> set[int]:
    """Return the ids of a variable: of Keras' object, and of the framework's inside it."""
    inner = getattr(variable, "value", None)
    # TensorFlow's own variables have a method of this name.
    return {id(variable)} if inner is None or callable(inner) else {id(variable), id(inner)}
