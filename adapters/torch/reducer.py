"""The averaging of gradients that an optimizer is given."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hvdlite import gradients, interrupts, runtime
from hvdlite.compression import Parameter, Reduction, Strategy, StrategyState
from hvdlite.gradients import GradientExchange
from hvdlite.interrupts import resumable
from hvdlite.process_sets import ProcessSet
from hvdlite.recipe._tree import map_leaves
from hvdlite.reduction import ReduceOp
from hvdlite.torch import device_memory
from hvdlite.torch.device_memory import CudaMemory
from hvdlite.torch.parameter_set import ParameterSet
from hvdlite.torch.replicas import Replica
from hvdlite.torch.tensors import dtype_of, leaf_to_array, leaf_to_tensor


class _Finishing(NamedTuple):
    """The progress of `Reducer.finish`.

    Attributes:
        left: the sets that have not ended the step yet.
        changed: the names of gradients that were changed after they had been copied.
        repeated: what to say of those that came too often.
        errors: of the sets that have ended it.
    """

    left: list[ParameterSet]
    changed: list[str]
    repeated: list[str]
    errors: list[Exception]


class Reducer:
    """Averages the gradients of parameters that it is attached to.

    Args:
        names: of the parameters, in the order of their registration.
        strategy: how gradients travel.
        reduction: sum or average.
        passes_per_step: backward passes after which a gradient is complete.
        sparse_as_dense: take sparse gradients, as dense ones.
        process_set: the ranks that take part.

    Attributes:
        process_set: as given.
        replica: what ranks compare of the optimizer; None: its weights may differ between ranks.
    """

    replica: Replica | None = None

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        strategy: Strategy,
        reduction: Reduction,
        passes_per_step: int,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self.process_set = process_set
        self.names = names
        self._strategy = strategy
        self._reduction = reduction
        self._state = StrategyState()
        self._sparse_as_dense = sparse_as_dense
        self.passes_per_step = passes_per_step
        self._synchronized = False
        self._engine = runtime.engine(process_set)
        self._reconnecting = threading.Lock()
        self._sets: list[ParameterSet] = []
        self._finishing: _Finishing | None = None
        self._attached: set[int] = set()  # by id; the sets keep them alive

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
            self._sets.append(ParameterSet(self, members, memory))
        self._attached.update(map(id, fresh))

    def in_order(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sort parameters as they were registered; name those that have come since."""
        for parameter in parameters:
            self.names.setdefault(parameter, f"parameter.{len(self.names)}")
        order = {parameter: number for number, parameter in enumerate(self.names)}
        return sorted(parameters, key=order.__getitem__)

    def describe(self, parameters: Sequence[torch.Tensor]) -> list[Parameter]:
        """Return what ranks compare of parameters."""
        return [
            Parameter(self.names[parameter], tuple(parameter.shape), dtype_of(parameter.dtype))
            for parameter in parameters
        ]

    def detach(self) -> None:
        """Exchange nobody's gradients any more, until `attach` is called again."""
        for members in self._sets:
            members.release()
        self._sets.clear()
        self._attached.clear()
        self._synchronized = False

    @property
    def in_flight(self) -> bool:
        """Whether gradients have come for which `finish` has not been called."""
        return self._finishing is not None or any(members.in_flight for members in self._sets)

    @property
    def synchronized(self) -> bool:
        """Whether the parameters' gradients are averages: `finish` was the last to touch them."""
        return self._synchronized and not self.in_flight

    @synchronized.setter
    def synchronized(self, value: bool) -> None:
        self._synchronized = value

    def finish(self, samples: int | None = None) -> None:
        """Exchange what is left, and write the averages into the parameters' ``grad``.

        Args:
            samples: as in `GradientExchange.finish`.

        Raises:
            HorovodInternalError: the ranks disagree, or communication failed.
            ValueError: ``samples`` comes after a step without.
            RuntimeError: a gradient was changed after it had been copied. The exchange is
                ended all the same, so that no other rank waits for this one.
            BaseException: from a signal's handler. All gradients are on their way then, and
                another call goes on waiting for the averages.
        """
        interrupts.call(self._finish, samples)

    @resumable
    def _finish(self, samples: int | None) -> None:
        self.reconnect()
        if self._finishing is None:
            for members in self._sets:  # so that the next line has nothing to wait for
                members.exchange.wait_for_order()
            changed = [name for members in self._sets for name in members.collect()]
            repeated = [message for members in self._sets for message in members.repeated]
            self._finishing = _Finishing([*self._sets], changed, repeated, [])
        left, changed, repeated, errors = self._finishing
        while left:  # to the last, whatever becomes of one
            try:
                left[0].finish(samples)
            except Exception as error:
                errors.append(error)
            del left[0]
        self._finishing = None
        if errors:
            raise errors[0]
        if any(members.exchange.converted for members in self._sets):
            self._renew()
            self._finish(samples)
            return
        if repeated:
            raise RuntimeError(repeated[0])
        if changed:
            raise RuntimeError(
                f"the gradient of {changed[0]!r} was changed after backward(), while it was being "
                "exchanged, and the change would be lost; call optimizer.synchronize() before "
                "you clip, unscale or otherwise change gradients, and step() inside "
                "optimizer.skip_synchronize()"
            )
        self.synchronized = True

    def _renew(self) -> None:
        """Make the exchanges for what the parameters are now, after ``model.double()``, say."""
        parameters = [parameter for members in self._sets for parameter in members.parameters]
        self.detach()
        self.attach(parameters)

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
        """Follow ``shutdown()`` and ``init()`` into the new world, where a step begins anew."""
        with self._reconnecting:  # the first hooks of two devices may come at once
            if runtime.engine(self.process_set) is not self._engine:
                self.restart()

    def restart(self) -> None:
        """Forget the gradients of a step that was given up, and follow into the current world."""
        self._engine = runtime.engine(self.process_set)
        self._synchronized = False
        self._finishing = None
        for members in self._sets:
            members.restart()

    def _by_memory(
        self, parameters: Sequence[torch.Tensor]
    ) -> list[tuple[CudaMemory | None, list[torch.Tensor]]]:
        """Group parameters by device, the host's first; memory: None, by way of the host.

        Autograd has a thread for each device, so the hooks of one group run one after the other.
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
        return self._sets[0].exchange.weight if self._sets else 1.0

    @property
    def op(self) -> ReduceOp:
        """Sum or average."""
        return self._reduction.op

    def make_exchange(
        self, label: str, parameters: Sequence[torch.Tensor], memory: CudaMemory | None
    ) -> GradientExchange:
        """Make the exchange of some parameters, in a memory (None: the host's)."""
        return GradientExchange(
            self._engine,
            label,
            self.describe(parameters),
            self._strategy,
            self._reduction,
            check=None if self.replica is None else self.replica.make_check(parameters),
            memory=memory,
            state=self._state,
        )

    def state_dict(self) -> dict[str, Any]:
        """What the compression remembers on this rank; {}: nothing."""
        saved = gradients.save(self._state, self.process_set)
        return map_leaves(leaf_to_tensor, saved)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what `state_dict` has returned, as far as it is this rank's."""
        gradients.load(self._state, map_leaves(leaf_to_array, saved), self.op, self.process_set)

    def consolidate_exchange_state(self) -> None:
        """Let all ranks remember the average of what all do; collective."""
        name = runtime.engine(self.process_set).unnamed("consolidate_exchange_state")
        gradients.consolidate(self._state, name, self.process_set)

    def is_apart(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient is exchanged as a sparse one, beside the buckets."""
        return gradient.layout is torch.sparse_coo and not self._sparse_as_dense
