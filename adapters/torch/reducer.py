"""Hooks that bring gradients into their buckets as the backward pass makes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvdlite import runtime
from hvdlite.exchange import Parameter, Reduction, Strategy
from hvdlite.gradients import GradientExchange
from hvdlite.torch.tensors import dtype_of, to_tensor

# The first steps in which all gradients are compared with their copies: a program that changes
# them unseen mostly does so from the beginning. Later that would cost time, and they take turns.
_STEPS_COMPARED = 3

_numbers = itertools.count()
# Of each parameter, the hook of the optimizer that was wrapped last.
_hooks = WeakTensorKeyDictionary()


class Reducer:
    """Averages the gradients of parameters that it is attached to.

    Args:
        names: of the parameters, in the order of their registration.
        strategy: how gradients travel.
        reduction: sum or average.
        passes_per_step: backward passes after which a gradient is complete.
        sparse_as_dense: take sparse gradients, as dense ones.
    """

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        strategy: Strategy,
        reduction: Reduction,
        passes_per_step: int,
        sparse_as_dense: bool,
    ) -> None:
        self.names = names
        self._strategy = strategy
        self._reduction = reduction
        self._sparse_as_dense = sparse_as_dense
        self.passes_per_step = passes_per_step
        #: Whether the parameters' gradients are averages: `finish` was the last to touch them.
        self.synchronized = False
        self._engine = runtime.engine()
        self._sets: list[_ParameterSet] = []
        self._attached: set[torch.Tensor] = set()

    def attach(self, parameters: Sequence[torch.Tensor]) -> None:
        """Exchange these parameters' gradients too, where that is not done yet.

        Parameters that come later (a new group, a layer that was frozen) get buckets of
        their own. All ranks add the same ones between the same steps. A parameter that an
        earlier optimizer was attached to is taken over from it.
        """
        fresh = [parameter for parameter in parameters if parameter not in self._attached]
        if not fresh:
            return
        order = {parameter: number for number, parameter in enumerate(self.names)}
        for parameter in fresh:
            self.names.setdefault(parameter, f"parameter.{len(self.names)}")
        fresh.sort(key=lambda parameter: order.get(parameter, len(order)))
        self._sets.append(_ParameterSet(self, fresh))
        self._attached.update(fresh)

    @property
    def in_flight(self) -> bool:
        """Whether an exchange has begun that `finish` has not ended."""
        return any(members.exchange.in_flight for members in self._sets)

    def finish(self) -> None:
        """Exchange what is left, and write the averages into the parameters' ``grad``.

        Raises:
            HorovodInternalError: the ranks disagree, or communication failed.
            RuntimeError: a gradient was changed after it had been copied. The exchange is
                ended all the same, so that no other rank waits for this one.
        """
        self.reconnect()
        changed = [name for members in self._sets for name in members.collect()]
        errors = []
        for members in self._sets:  # to the last, whatever becomes of one
            try:
                members.finish()
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]
        if changed:
            raise RuntimeError(
                f"the gradient of {changed[0]!r} was changed after backward(), while it was being "
                "exchanged, and the change would be lost; call optimizer.synchronize() before "
                "you clip, unscale or otherwise change gradients, and step() inside "
                "optimizer.skip_synchronize()"
            )
        self.synchronized = True

    def set_passes_per_step(self, passes: int) -> None:
        """Set after how many backward passes a gradient is complete."""
        self.passes_per_step = passes
        self.begin_step()

    def begin_step(self) -> None:
        """Count the backward passes anew."""
        self.synchronized = False
        for members in self._sets:
            members.begin_step()

    def reconnect(self) -> None:
        """Follow ``shutdown()`` and ``init()`` into the new world."""
        engine = runtime.engine()
        if engine is not self._engine:
            self._engine = engine
            for members in self._sets:
                members.connect()

    def make_exchange(self, label: str, parameters: Sequence[torch.Tensor]) -> GradientExchange:
        """Make the exchange of some parameters."""
        described = [
            Parameter(self.names[parameter], tuple(parameter.shape), dtype_of(parameter.dtype))
            for parameter in parameters
        ]
        return GradientExchange(self._engine, label, described, self._strategy, self._reduction)

    def dense(self, parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient as it goes into a bucket."""
        if gradient.layout is torch.strided:
            return gradient
        if not self._sparse_as_dense:
            raise ValueError(
                f"the gradient of {self.names[parameter]!r} is sparse; wrap the optimizer with "
                "sparse_as_dense=True, or make the layer with sparse=False"
            )
        return gradient.to_dense()


class _ParameterSet:
    """Parameters that share an exchange."""

    def __init__(self, reducer: Reducer, parameters: Sequence[torch.Tensor]) -> None:
        # Ranks make their optimizers in the same order. The number outlives the engine, so
        # that exchanges keep their names whoever is the first to use a new world.
        self._label = f"DistributedOptimizer {next(_numbers)}"
        self._reducer = reducer
        self._parameters = list(parameters)
        self._steps = 0
        self.connect()
        self._begin()
        for number, parameter in enumerate(parameters):
            if parameter in _hooks:
                _hooks[parameter].remove()
            _hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._hook(number))

    def connect(self) -> None:
        """Make the exchange in the current world."""
        self.exchange = self._reducer.make_exchange(self._label, self._parameters)
        numbers = range(len(self._parameters))
        self._slots = [to_tensor(self.exchange.slot(number)) for number in numbers]
        self._results = [to_tensor(self.exchange.result_slot(number)) for number in numbers]

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(parameter: torch.Tensor) -> None:
            self._reducer.synchronized = False
            self._passes[number] += 1
            if self._passes[number] == self._reducer.passes_per_step:
                self._reducer.reconnect()
                self._copy(number, parameter)
            elif self._passes[number] > self._reducer.passes_per_step:
                raise RuntimeError(
                    f"the gradient of {self._reducer.names[parameter]!r} was computed more than "
                    f"{self._reducer.passes_per_step} times before step() or synchronize(); "
                    "raise backward_passes_per_step to add up gradients"
                )

        return on_gradient

    def _copy(self, number: int, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self._slots[number].copy_(self._reducer.dense(parameter, gradient).detach())
        self._copied[number] = gradient, gradient._version
        self.exchange.mark(number)

    def collect(self) -> list[str]:
        """Copy the gradients that no hook has brought: accumulation was cut short.

        Returns:
            The names of those that were changed since their hook copied them.
        """
        changed = []
        for number, parameter in enumerate(self._parameters):
            if self._copied[number] is not None:
                if self._has_changed(number, parameter):
                    changed.append(self._reducer.names[parameter])
            elif parameter.grad is not None:
                self._copy(number, parameter)
        return changed

    def _has_changed(self, number: int, parameter: torch.Tensor) -> bool:
        gradient, version = self._copied[number]
        if parameter.grad is not gradient or gradient._version != version:
            return True
        # Changes through .data or numpy(), and GradScaler's, leave the version as it is.
        turn = self._steps % len(self._parameters) == number
        if self._steps >= _STEPS_COMPARED and not turn:
            return False
        slot, dense = self._slots[number], self._reducer.dense(parameter, gradient).detach().cpu()
        return not bool(((slot == dense) | ((slot != slot) & (dense != dense))).all())

    def finish(self) -> None:
        """Wait for the exchange, and write the averages."""
        try:
            found = self.exchange.finish()
        finally:
            self._begin()
            self._steps += 1
        with torch.no_grad():
            for parameter, result, anywhere in zip(
                self._parameters, self._results, found, strict=True
            ):
                if not anywhere:
                    continue
                if parameter.grad is None or parameter.grad.layout is not torch.strided:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(result)

    def begin_step(self) -> None:
        """Count the backward passes anew."""
        self._passes = [0] * len(self._parameters)

    def _begin(self) -> None:
        self.begin_step()
        # What a gradient was when it was copied: the tensor and its version.
        self._copied: list[Any] = [None] * len(self._parameters)
