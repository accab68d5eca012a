"""The reducer of an optimizer: it averages the gradients of all its parameters over the ranks."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch

from hvdlite import interrupts, runtime
from hvdlite.compression import Parameter, Reduction, Strategy, StrategyState
from hvdlite.gradients import GradientExchange, ReplicaCheck
from hvdlite.interrupts import resumable
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import ReduceOp
from hvdlite.torch import device_memory
from hvdlite.torch.device_memory import CudaMemory
from hvdlite.torch.hooks import GradientHooks
from hvdlite.torch.replicas import make_check
from hvdlite.torch.tensors import dtype_of

_in_flight, _is_converted = attrgetter("in_flight"), attrgetter("exchange.converted")

# Ranks make their optimizers in one order, those of a process set among themselves. The numbers
# outlive the engine, so that exchanges keep their names whichever is the first to use a new world.
_numbers: WeakKeyDictionary[ProcessSet, Iterator[int]] = WeakKeyDictionary()


class Reducer:
    """Average the gradients of the parameters that it is attached to.

    Args:
        names: of the parameters, in the order of their registration; later ones are added.
        strategy: how gradients travel.
        reduction: sum or average.
        passes_per_step: the number of backward passes after which a gradient is complete.
        sparse_as_dense: whether to exchange sparse gradients as dense ones.
        process_set: the ranks that take part.
        state: of the strategy.
        optimizer: compared across ranks, with its weights; None: ranks may differ.

    Attributes:
        averaged: whether the gradients that `finish` wrote are the last.
    """

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        strategy: Strategy,
        reduction: Reduction,
        passes_per_step: int,
        sparse_as_dense: bool,
        process_set: ProcessSet,
        state: StrategyState,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.process_set = process_set
        self.names = names
        self._strategy = strategy
        self._reduction = reduction
        self._state = state
        self.sparse_as_dense = sparse_as_dense
        self.passes_per_step = passes_per_step
        self.averaged = False
        self._engine = runtime.engine(process_set)
        self._reconnecting = threading.Lock()
        self._hooks: list[GradientHooks] = []  # a list for each device and each `attach`
        self._optimizer = None if optimizer is None else weakref.ref(optimizer)
        # While `finish` is not done: the hooks whose exchange has not ended yet, and its errors.
        self._unfinished: list[GradientHooks] | None = None
        self._errors: list[Exception] = []
        self._complaints: list[str] = []  # about gradients, once all exchanges have ended
        self._attached: set[int] = set()  # by id; the hooks keep them alive

    def attach(self, parameters: Sequence[torch.Tensor]) -> None:
        """Exchange these parameters' gradients too, where that is not done yet.

        Parameters that come later (a new group, a layer that was frozen) get buckets of
        their own. All ranks add the same ones between the same steps. A parameter that an
        earlier optimizer was attached to is taken over from it.
        """
        if self._attached.issuperset(map(id, parameters)):
            return
        fresh = [parameter for parameter in parameters if id(parameter) not in self._attached]
        for memory, members in self._by_memory(self.in_order(fresh)):
            label = next_label("DistributedOptimizer", self.process_set)
            self._hooks.append(GradientHooks(self, label, members, memory))
        self._attached.update(map(id, fresh))

    def in_order(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sort parameters as they were registered; name those that have come since."""
        return in_order(self.names, parameters)

    def describe(self, parameters: Sequence[torch.Tensor]) -> list[Parameter]:
        """Describe parameters, for comparison across ranks."""
        return describe(self.names, parameters)

    def detach(self) -> None:
        """Exchange no gradients any more, until `attach` is called again."""
        for hooks in self._hooks:
            hooks.remove()
        self._hooks.clear()
        self._attached.clear()
        self.averaged = False

    @property
    def in_flight(self) -> bool:
        """Return whether gradients have arrived for which `finish` has not been called."""
        return self._unfinished is not None or any(map(_in_flight, self._hooks))

    def finish(self, samples: int | None = None) -> None:
        """Exchange the remaining gradients, and write the averages into the parameters' ``grad``.

        Raises:
            HorovodInternalError, ValueError: as `GradientExchange.finish`.
            RuntimeError: a gradient was changed after it had been copied. The exchange is
                ended all the same, so that no other rank waits for this one.
            BaseException: from a signal's handler. All gradients have been sent then, and
                another call continues to wait for the averages.
        """
        interrupts.call(self._finish, samples)

    @resumable
    def _finish(self, samples: int | None) -> None:
        self.reconnect()
        if self._unfinished is None:
            for hooks in self._hooks:  # so that `collect` has nothing to wait for
                hooks.exchange.wait_for_order()
            self._errors, self._complaints = [], []
            for hooks in self._hooks:
                self._complaints += hooks.collect()
            self._unfinished = [*self._hooks]
        while self._unfinished:  # to the last, whatever becomes of one
            try:
                self._unfinished[0].finish(samples)
            except Exception as error:
                self._errors.append(error)
            del self._unfinished[0]
        self._unfinished = None
        if self._errors:
            raise self._errors[0]
        if any(map(_is_converted, self._hooks)):  # by model.double(), for example
            parameters = [parameter for hooks in self._hooks for parameter in hooks.parameters]
            self.detach()
            self.attach(parameters)
            self._finish(samples)
            return
        if self._complaints:
            raise RuntimeError(self._complaints[0])
        self.averaged = True

    def reset_passes(self) -> None:
        """Reset the counts of backward passes."""
        self.averaged = False
        for hooks in self._hooks:
            hooks.reset_passes()

    def reconnect(self) -> None:
        """Move to the current world after ``shutdown()`` and ``init()``; a step begins anew."""
        with self._reconnecting:  # the first hooks of two devices may come at once
            if runtime.engine(self.process_set) is not self._engine:
                self.restart()

    def restart(self) -> None:
        """Forget the gradients of a step that was given up, and move to the current world."""
        self._engine = runtime.engine(self.process_set)
        self.averaged = False
        self._unfinished = None
        for hooks in self._hooks:
            hooks.restart()

    def _by_memory(
        self, parameters: Sequence[torch.Tensor]
    ) -> list[tuple[CudaMemory | None, list[torch.Tensor]]]:
        """Group parameters by device, the host's first; memory is None for exchanges by the host.

        Autograd has a thread for each device, so the hooks of one group run one at a time.
        """
        groups: dict[int, tuple[CudaMemory | None, list[torch.Tensor]]] = {}
        for parameter in parameters:
            memory = device_memory.find(parameter) if self._strategy.on_device else None
            index = parameter.get_device() if memory is None else memory.index
            groups.setdefault(index, (memory, []))[1].append(parameter)
        return [groups[index] for index in sorted(groups)]

    @property
    def weight(self) -> float:
        """Return the factor of this rank's gradients in the last exchange."""
        return self._hooks[0].exchange.weight if self._hooks else 1.0

    @property
    def op(self) -> ReduceOp:
        """Return the reduction: sum or average."""
        return self._reduction.op

    def make_check(self, parameters: Sequence[torch.Tensor]) -> ReplicaCheck | None:
        """Make the comparison of some parameters across ranks, and of the optimizer."""
        return make_check(self._optimizer, self.names, parameters) if self._optimizer else None

    def make_exchange(
        self,
        label: str,
        parameters: Sequence[torch.Tensor],
        memory: CudaMemory | None,
        check: ReplicaCheck | None,
    ) -> GradientExchange:
        """Make the exchange of some parameters, in device memory, or None for host memory."""
        return GradientExchange(
            self._engine,
            label,
            self.describe(parameters),
            self._strategy,
            self._reduction,
            check=check,
            memory=memory,
            state=self._state,
        )


def in_order(names: dict[torch.Tensor, str], parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Sort parameters as they were registered; name those that have come since."""
    for parameter in parameters:
        names.setdefault(parameter, f"parameter.{len(names)}")
    order = {parameter: number for number, parameter in enumerate(names)}
    return sorted(parameters, key=order.__getitem__)


def describe(
    names: Mapping[torch.Tensor, str], parameters: Sequence[torch.Tensor]
) -> list[Parameter]:
    """Describe parameters, for comparison across ranks."""
    return [
        Parameter(names[parameter], tuple(parameter.shape), dtype_of(parameter.dtype))
        for parameter in parameters
    ]


def next_label(kind: str, process_set: ProcessSet | None) -> str:
    """Return a label that no other exchange of the process set has, the same on all its ranks."""
    numbers = _numbers.setdefault(process_set or global_process_set, itertools.count())
    return f"{kind} {next(numbers)}"
