"""Hooks that bring gradients into their buckets as the backward pass makes them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvdlite import timeline
from hvdlite.torch.tensors import to_tensor

if TYPE_CHECKING:
    from hvdlite.torch.device_memory import CudaMemory
    from hvdlite.torch.reducer import Reducer

# The first steps in which all gradients are compared with their copies: a program that changes
# them unseen mostly does so from the beginning. Later that would cost time, and they take turns.
_STEPS_COMPARED = 3
# Elements that are compared then: what is scaled or clipped changes everywhere.
_SAMPLE = 2**12
# Bytes from which on a gradient is copied as soon as it is there, still in the cache. The
# smaller ones of a bucket are copied together: that takes a third of the time of one by one.
_LARGE = 2**16
# Bytes from which on a gradient gives its own memory up for that of its copy, and of its average.
# The C library returns so large pieces to the system anyhow. Smaller ones it keeps, but not if they
# are freed in another order than without an exchange: then a step has to fetch them anew, page by
# page, which was measured to take longer than a copy.
_HUGE = 2**25

_numbers = itertools.count()
# Of each parameter, the hook of the optimizer that was wrapped last.
_hooks = WeakTensorKeyDictionary()


class ParameterSet:
    """Parameters that share an exchange.

    Args:
        reducer: that the set belongs to.
        parameters: in the order of their registration.
        memory: of the device on which they all lie and are exchanged; None: the host's.
    """

    def __init__(
        self,
        reducer: Reducer,
        parameters: Sequence[torch.Tensor],
        memory: CudaMemory | None = None,
    ) -> None:
        # Ranks make their optimizers in the same order. The number outlives the engine, so
        # that exchanges keep their names whoever is the first to use a new world.
        self._label = f"DistributedOptimizer {next(_numbers)}"
        self._reducer = reducer
        self._parameters = list(parameters)
        self._memory = memory
        # On a device the cache is no matter, and the number of kernels is.
        self._large = [
            memory is None and parameter.numel() * parameter.element_size() >= _LARGE
            for parameter in parameters
        ]
        self._comparisons: list[tuple[str, Callable[[], bool | None]]] = []
        self._huge = [
            parameter.numel() * parameter.element_size() >= _HUGE for parameter in parameters
        ]
        self._steps = 0
        self.connect()
        self._begin()
        for number, parameter in enumerate(parameters):
            if parameter in _hooks:
                _hooks[parameter].remove()
            _hooks[parameter] = parameter.register_post_accumulate_grad_hook(self._hook(number))

    def connect(self) -> None:
        """Make the exchange in the current world."""
        self.exchange = self._reducer.make_exchange(self._label, self._parameters, self._memory)
        self._find_slots()

    def _find_slots(self) -> None:
        numbers = range(len(self._parameters))
        self._slots = [self._tensor(self.exchange.slot(number)) for number in numbers]
        plan = self.exchange.plan
        self._bucket_of = {n: index for index, members in enumerate(plan) for n in members}
        # Averages of buckets from which all are copied: their places stay the same.
        self._results: list[torch.Tensor | None] = [None for _ in numbers]
        for index, members in enumerate(plan):
            if not any(self._huge[number] for number in members):
                self.exchange.keep_result(index)
                for number in members:
                    self._results[number] = self._tensor(self.exchange.result_slot(number))
        self._reset_buckets()

    def _tensor(self, slot: Any) -> torch.Tensor:
        return to_tensor(slot) if self._memory is None else slot

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        reducer = self._reducer

        def on_gradient(parameter: torch.Tensor) -> None:
            reducer.synchronized = False
            passes = self._passes[number] = self._passes[number] + 1
            if passes == reducer.passes_per_step:
                self._take(number, parameter)
            elif passes > reducer.passes_per_step:
                raise RuntimeError(
                    f"the gradient of {reducer.names[parameter]!r} was computed more than "
                    f"{reducer.passes_per_step} times before step() or synchronize(); "
                    "raise backward_passes_per_step to add up gradients"
                )

        return on_gradient

    def _take(self, number: int, parameter: torch.Tensor) -> None:
        """Copy a gradient into its bucket, or leave that until the bucket is complete."""
        trace = timeline.current
        start = 0 if trace is None else trace.now()
        if self._untouched:
            self._open_step()
        gradient = parameter.grad
        assert gradient is not None
        if self._large[number] or self._steps == 0:
            self._slots[number].copy_(self._dense(number, gradient))
            huge = self._huge[number] and self._steps >= _STEPS_COMPARED
            if huge and self._may_swap(gradient):
                self._swap(number, gradient)
        self._taken[number] = gradient, gradient._version
        if self._steps == 0:  # its exact order is of interest
            self.exchange.mark(number)
        else:
            index = self._bucket_of[number]
            self._waiting[index].append(number)
            if self._memory is not None:
                self._streams[index].add(self._memory.stream())
            self._absent[index] -= 1
            if not self._absent[index]:
                self._bring(index)
        if trace is not None:
            name = self._reducer.names[parameter]
            trace.complete("step", timeline.HOOK, start, trace.now(), tensor=name)

    def _may_swap(self, gradient: torch.Tensor) -> bool:
        """Whether the memory of a gradient may be exchanged for other memory."""
        return (
            self._memory is None
            and gradient.layout is torch.strided
            and gradient.is_contiguous()
            and not gradient.requires_grad
        )

    def _swap(self, number: int, gradient: torch.Tensor) -> None:
        """Let a huge gradient be its copy, which the exchange only reads.

        What it has been computed in is free for the gradients to come: fewer pages of memory
        are touched, and less is needed at a time.
        """
        slot = self._slots[number]
        gradient.data = slot
        self._samples[number] = slot.view(-1)[:_SAMPLE].clone()

    def _bring(self, index: int) -> None:
        """Copy what has not been copied yet of a bucket, and let it go."""
        waiting, self._waiting[index] = self._waiting[index], []
        if self._memory is not None:
            self._memory.join(self._streams[index])
        small = [number for number in waiting if not self._large[number]]
        if small:
            gradients = [self._dense(number, self._taken[number][0]) for number in small]
            torch._foreach_copy_([self._slots[number] for number in small], gradients)
        self.exchange.mark(*waiting)

    def _dense(self, number: int, gradient: torch.Tensor) -> torch.Tensor:
        if gradient.layout is not torch.strided:
            gradient = self._reducer.dense(self._parameters[number], gradient)
        return gradient.detach() if gradient.requires_grad else gradient

    def _open_step(self) -> None:
        self._untouched = False
        self._reducer.reconnect()
        if self.exchange.begin():
            self._find_slots()

    def collect(self) -> list[str]:
        """Bring the gradients that no hook has taken, and those of buckets with gaps.

        Returns:
            The names of those that were changed since their hook took them.
        """
        changed = []
        for number, (parameter, taken) in enumerate(
            zip(self._parameters, self._taken, strict=True)
        ):
            gradient = parameter.grad
            if taken is None:
                if gradient is not None:
                    self._take(number, parameter)  # accumulation was cut short
            elif gradient is not taken[0] or gradient._version != taken[1]:
                changed.append(number)
        for index, waiting in enumerate(self._waiting):
            if waiting:
                self._bring(index)
        # Changes through .data or numpy(), and GradScaler's, leave the version as it is.
        for number in self._suspects():
            if self._taken[number] is not None and self._has_changed(number):
                changed.append(number)
        names = [self._reducer.names[self._parameters[number]] for number in changed]
        return self._found_to_differ() + names

    def _suspects(self) -> Iterable[int]:
        """Those whose values are compared in this step."""
        if self._steps < _STEPS_COMPARED:
            return range(len(self._parameters))
        return {*self._samples, self._steps % len(self._parameters)}

    def _has_changed(self, number: int) -> bool:
        gradient, _ = self._taken[number]
        parameter, sample = self._parameters[number], self._samples.get(number)
        slot, dense = self._slots[number], self._reducer.dense(parameter, gradient).detach()
        if self._steps >= _STEPS_COMPARED:
            slot, dense = slot.reshape(-1)[:_SAMPLE], dense.reshape(-1)[:_SAMPLE]
        slot = slot if sample is None else sample
        if self._memory is not None:  # found out later: the host does not wait for the device
            comparison = self._memory.compare(slot, dense)
            self._comparisons.append((self._reducer.names[parameter], comparison))
            return False
        dense = dense.cpu()
        return not bool(((slot == dense) | ((slot != slot) & (dense != dense))).all())

    def _found_to_differ(self) -> list[str]:
        """The names of those that were changed unseen, as far as a device has found out."""
        results = [(name, equal(), equal) for name, equal in self._comparisons]
        self._comparisons = [(name, equal) for name, known, equal in results if known is None]
        return [name for name, known, _ in results if known is False]

    def finish(self) -> None:
        """Wait for the exchange, and give the averages to the parameters."""
        try:
            found = self.exchange.finish()
        finally:
            self._begin()
            self._steps += 1
        with torch.no_grad():
            copies: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
            for number, parameter in enumerate(self._parameters):
                if found[number]:
                    average = self._results[number]
                    if average is None:
                        average = to_tensor(self.exchange.result_slot(number))
                    gradient = _gradient_of(parameter)
                    if self._huge[number] and self._may_swap(gradient):
                        _lend(gradient, average)
                    else:
                        copies[0].append(gradient)
                        copies[1].append(average)
            if copies[0]:
                torch._foreach_copy_(*copies)

    def begin_step(self) -> None:
        """Count the backward passes anew."""
        self._passes = [0] * len(self._parameters)
        self._untouched = True

    def _begin(self) -> None:
        self.begin_step()
        # What a gradient was when its hook was called: the tensor and its version.
        self._taken: list[Any] = [None] * len(self._parameters)
        # Of gradients that are their own copy: what some elements were.
        self._samples: dict[int, torch.Tensor] = {}
        self._reset_buckets()

    def _reset_buckets(self) -> None:
        # Of each bucket: the gradients that it has not been told of, and how many are to come.
        self._waiting: list[list[int]] = [[] for _ in self.exchange.plan]
        self._absent = [len(members) for members in self.exchange.plan]
        self._streams: list[set[int]] = [set() for _ in self.exchange.plan]


def _gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided:
        gradient = parameter.grad = torch.empty_like(parameter)
    return gradient


def _lend(gradient: torch.Tensor, average: torch.Tensor) -> None:
    """Let a gradient be an average, without a copy.

    The memory belongs to whoever views it, until nobody does. The gradient stays the same
    tensor, for those who have got hold of it.
    """
    gradient.data = average
    # torch does not see the exchange: views and saved tensors must know of it.
    torch.autograd.graph.increment_version(gradient)
