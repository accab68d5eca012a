"""The reducer of an optimizer: the hooks, buffers and exchanges of all its parameters.

`GradientExchange` (``hvdlite/gradients/exchange.py``) decides when a bucket is sent.
"""

from __future__ import annotations

import itertools
import operator
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter, itemgetter
from types import MappingProxyType
from typing import Any

import torch

from hvdlite.base import interrupts
from hvdlite.base.interrupts import resumable
from hvdlite.compression import Parameter, StrategyState
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.gradients.exchange import GradientExchange
from hvdlite.gradients.options import Options
from hvdlite.gradients.replicas import ReplicaCheck
from hvdlite.torch import device_memory
from hvdlite.torch.device_memory import CudaMemory
from hvdlite.torch.hooks import GradientHooks, gradient_of
from hvdlite.torch.replicas import find_frozen, make_check
from hvdlite.torch.tensors import dtype_of, gradient_dtype

_in_flight, _is_converted = attrgetter("in_flight"), attrgetter("exchange.converted")
_has_new, _is_cut_short = attrgetter("has_new"), attrgetter("is_cut_short")
_requires_grad, _params = attrgetter("requires_grad"), itemgetter("params")


class Reducer:
    """Average the gradients of the parameters that it is attached to.

    Args:
        names: of the parameters, in the order of their registration; later ones are added.
        label: unique, and the same on all ranks; it begins the names of the exchanges.

    Attributes:
        remembers: whether an exchange leaves something for the next one.
        passes_per_step: the number of backward passes after which a gradient is complete.
        averaged: whether the gradients that `finish` wrote are the last.
        has_discarded: whether the last averages were not used; the ranks compare this, too.
    """

    def __init__(
        self,
        names: Names,
        options: Options,
        state: StrategyState,
        label: str,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.process_set = options.process_set
        self.names = names
        self.op = options.reduction.op
        self.sparse_as_dense = options.sparse_as_dense
        self.passes_per_step = options.passes
        self.remembers = options.strategy.stateful
        self.averaged = self.has_discarded = False
        self._options = options
        self._state = state
        self._engine = runtime.engine(options.process_set)
        self._reconnecting = threading.Lock()
        self._hooks: list[GradientHooks] = []  # a list for each device and each `attach`
        # One rank's additions must not shift the labels of other optimizers.
        self._label, self._exchanges = label, itertools.count(1)
        self._optimizer = weakref.ref(optimizer)
        # While `finish` is not done: the hooks whose exchange has not ended yet, and its errors.
        self._unfinished: list[GradientHooks] | None = None
        self._errors: list[Exception] = []
        self._complaints: list[str] = []  # about gradients, once all exchanges have ended
        self._trained: Sequence[torch.Tensor] = []
        self._has_new = False  # parameters among these that are not attached
        # Those of the optimizer in the last step, which were all attached, and which are trained.
        self._members: list[torch.Tensor] = []
        self._flags: list[bool] = []
        self._attached: set[int] = set()  # by id; the hooks keep them alive
        self._lost: set[int] = set()  # those that are detached after this step

    def attach(self, parameters: Sequence[torch.Tensor]) -> None:
        """Exchange the gradients of these parameters; `finish` adds those that are new.

        A parameter that an earlier optimizer was attached to is taken over from it.
        """
        self._trained = parameters
        self._has_new = not self._attached.issuperset(map(id, parameters))
        if self._has_new and not self._attached:
            self.reconnect()
            self._attach_new()

    def _attach_new(self) -> list[GradientHooks]:
        """Attach the parameters that are not attached yet, and return their hooks."""
        fresh = [parameter for parameter in self._trained if id(parameter) not in self._attached]
        added = []
        for memory, members in self._by_memory(in_order(self.names, fresh)):
            number = next(self._exchanges)
            label = self._label if number == 1 else f"{self._label}, exchange {number}"
            added.append(GradientHooks(self, label, members, memory))
        self._hooks += added
        self._attached.update(map(id, fresh))
        self._has_new = False
        return added

    def find_changes(self) -> list[str]:
        """Find the parameters that the optimizer has got or lost since the last step.

        New ones (a new group, a layer that was frozen) get buckets of their own in this step, and
        those that it has no longer, are detached after it. All ranks do so between the same steps:
        they compare what this returns.

        Returns:
            Descriptions, in the order of the parameters' registration.
        """
        discarded = ["zero_grad() after backward(), without step()"] if self.has_discarded else []
        optimizer = self._optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        members = [*itertools.chain.from_iterable(map(_params, groups))]
        flags = [*map(_requires_grad, members)]
        is_known = flags == self._flags and all(map(operator.is_, members, self._members))
        if is_known and len(members) == len(self._members):
            return discarded
        trained = [*itertools.compress(members, flags)]
        self._lost = self._attached.difference(map(id, members))
        if not self._lost and self._attached.issuperset(map(id, trained)):
            self._members, self._flags = members, flags
            return discarded
        self._flags = []
        fresh = [each for each in trained if id(each) not in self._attached]
        lost = [name for each, name in self.names.items() if id(each) in self._lost]
        return [
            *discarded,
            *(f"new: {self.names[each]!r}" for each in in_order(self.names, fresh)),
            *(f"removed: {name!r}" for name in lost),
        ]

    def _begin_new(self) -> list[GradientHooks]:
        """Begin to exchange the parameters that are new; return their hooks.

        By now the other exchanges of the step have succeeded, so the other ranks do the same.
        """
        self._unfinished = self._attach_new()
        for hooks in self._unfinished:
            self._complaints += hooks.collect()
        return self._unfinished

    def _detach_lost(self) -> None:
        """Forget the parameters that the optimizer has no longer, and what was kept of them."""
        rest = [each for each in self._all_attached() if id(each) not in self._lost]
        lost = [each for each in self.names if id(each) in self._lost]
        self.detach()
        self._state.load_state_dict({}, [self.names.pop(each) for each in lost])
        self._lost = set()
        self.attach(rest)

    def _all_attached(self) -> list[torch.Tensor]:
        return [parameter for hooks in self._hooks for parameter in hooks.parameters]

    def describe_weights(self, parameters: Sequence[torch.Tensor]) -> list[Parameter]:
        """Describe parameters, for comparison across ranks."""
        return [_describe(self.names[each], each, each.dtype) for each in parameters]

    def detach(self, some: Sequence[GradientHooks] = ()) -> None:
        """Exchange no gradients any more, or some, until `attach` is called again."""
        for hooks in some or [*self._hooks]:
            hooks.remove()
            self._hooks.remove(hooks)
            self._attached.difference_update(map(id, hooks.parameters))
        self._flags = []
        self.averaged = False

    @property
    def in_flight(self) -> bool:
        """Return whether gradients have arrived for which `finish` has not been called."""
        return self._unfinished is not None or any(map(_in_flight, self._hooks))

    @property
    def is_cut_short(self) -> bool:
        """Return whether a backward pass, or `finish`, has begun and not ended."""
        return self._unfinished is not None or any(map(_is_cut_short, self._hooks))

    def may_have_new(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether they may have gradients that no exchange and no step has used."""
        if self.averaged or self._unfinished is not None or any(map(_has_new, self._hooks)):
            return True
        # No hook tells of those that a program assigns; one may get the id of an earlier one.
        used = set[int]().union(*(hooks.used for hooks in self._hooks))
        gradients = map(gradient_of, parameters)
        return any(id(each) * bool(getattr(each, "_version", 1)) not in used for each in gradients)

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
        while self._unfinished or (self._has_new and not self._errors and self._begin_new()):
            try:  # to the last, whatever becomes of one
                self._unfinished[0].finish(samples)
            except Exception as error:
                self._errors.append(error)
            del self._unfinished[0]
        self._unfinished = None
        if self._errors:
            raise self._errors[0]
        if converted := [*filter(_is_converted, self._hooks)]:  # by model.double(), for example
            self._trained = self._all_attached()
            self.detach(converted)  # alone: of the others, averages are there, and sums would grow
            self._begin_new()
            self._finish(samples)
            return
        if self._complaints:
            raise RuntimeError(self._complaints[0])
        if self._lost:
            self._detach_lost()
        self.averaged, self.has_discarded = True, False

    def reset_passes(self) -> None:
        """Reset the counts of backward passes."""
        self.averaged = False
        for hooks in self._hooks:
            hooks.reset_passes()

    def reconnect(self) -> None:
        """Move to the current world after ``shutdown()`` and ``init()``; a step starts over."""
        with self._reconnecting:  # the first hooks of two devices may come at once
            if runtime.engine(self.process_set) is not self._engine:
                self.restart()

    def restart(self) -> None:
        """Forget the gradients of a step that was given up, and move to the current world."""
        self._engine = runtime.engine(self.process_set)
        self.averaged = self.has_discarded = False
        self._unfinished = None
        for hooks in self._hooks:
            hooks.restart()

    def _by_memory(
        self, parameters: Sequence[torch.Tensor]
    ) -> list[tuple[CudaMemory | None, list[torch.Tensor]]]:
        """Group parameters by device, the host's first; memory is None for exchanges by the host.

        Autograd has a thread for each device, so the hooks of one group seldom meet.
        """
        groups: dict[int, tuple[CudaMemory | None, list[torch.Tensor]]] = {}
        for parameter in parameters:
            memory = device_memory.find(parameter) if self._options.strategy.on_device else None
            index = parameter.get_device() if memory is None else memory.index
            groups.setdefault(index, (memory, []))[1].append(parameter)
        return [groups[index] for index in sorted(groups)]

    @property
    def weight(self) -> float:
        """Return the factor of this rank's gradients in the last exchange."""
        return self._hooks[0].exchange.weight if self._hooks else 1.0

    def make_check(self, parameters: Sequence[torch.Tensor]) -> ReplicaCheck | None:
        """Make the comparison of some parameters across ranks, and of the optimizer."""
        if not self._options.replicates:
            return None
        # Of several exchanges, the first one compares what none has.
        frozen = tuple if self._hooks else partial(find_frozen, self.names, self._attached)
        return make_check(self._optimizer, self.names, parameters, frozen)

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
            describe(self.names, parameters),
            self._options.strategy,
            self._options.reduction,
            check=check,
            memory=memory,
            state=self._state,
        )


class Names(dict[torch.Tensor, str]):
    """The names of an optimizer's parameters, in the order of their registration.

    Attributes:
        given: the user's names, also those of parameters that the optimizer may get later.
    """

    given: Mapping[torch.Tensor, str] = MappingProxyType({})


def in_order(names: Names, parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Sort parameters as they were registered; name those that have come since."""
    fresh = [parameter for parameter in parameters if parameter not in names]
    taken = {*names.values(), *names.given.values()} if fresh else set()
    for parameter in fresh:
        number = len(names)  # or more: names of removed parameters are free
        while f"parameter.{number}" in taken:
            number += 1
        names[parameter] = names.given.get(parameter, f"parameter.{number}")
        taken.add(names[parameter])
    order = {parameter: number for number, parameter in enumerate(names)}
    return sorted(parameters, key=order.__getitem__)


def describe(
    names: Mapping[torch.Tensor, str], parameters: Sequence[torch.Tensor]
) -> list[Parameter]:
    """Describe the gradients of parameters, for comparison across ranks.

    Raises:
        ValueError: gradients of a parameter may be of any dtype.
    """
    described = []
    for parameter in parameters:
        name, dtype = names[parameter], gradient_dtype(parameter)
        if dtype is None:
            raise ValueError(
                f"the grad_dtype of {name!r} is None, and its gradients may be of another dtype "
                f"on each rank; set its grad_dtype to one, such as {parameter.dtype}"
            )
        described.append(_describe(name, parameter, dtype))
    return described


def _describe(name: str, parameter: torch.Tensor, dtype: torch.dtype) -> Parameter:
    return Parameter(name, tuple(parameter.shape), dtype_of(dtype))


def next_label(kind: str, process_set: ProcessSet | None) -> str:
    """Return a label that no other exchange of the process set has, the same on all its ranks."""
    process_set = process_set or global_process_set
    process_set.labels += 1
    return f"{kind} {process_set.labels - 1}"
