"""Hooks that bring gradients into their buckets as the backward pass makes them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvdlite import timeline
from hvdlite.interrupts import Interrupted, deferred, leave, uninterrupted
from hvdlite.torch.apart import Apart, reduce_apart
from hvdlite.torch.arrivals import Arrivals
from hvdlite.torch.changes import Changes
from hvdlite.torch.dynamo import untraced
from hvdlite.torch.labels import next_label
from hvdlite.torch.slots import Slots
from hvdlite.torch.tensors import properties_of

if TYPE_CHECKING:
    from hvdlite.torch.device_memory import CudaMemory
    from hvdlite.torch.reducer import Reducer

# Of each parameter, the hook of the optimizer that was wrapped last.
_hooks = WeakTensorKeyDictionary()


class ParameterSet:
    """Parameters that share an exchange.

    The set belongs to its reducer alone, and goes with it: the garbage collector does not see what
    a parameter's hooks refer to, so they must not keep the set, which keeps the parameter.

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
        self._label = next_label("DistributedOptimizer", reducer.process_set)
        # Weakly, like all that leads back here: then it is gone at once with the optimizer.
        owner: Reducer = weakref.proxy(reducer)
        names, members = reducer.names, list(parameters)
        self._reducer = owner
        self._parameters = members
        self._made_for = properties_of(members)
        self._memory = memory
        self._slots = Slots(
            members,
            memory,
            lambda gradient: owner.is_apart(gradient),
            lambda number: names[members[number]],
        )
        self._gradients: list[Any] = []  # of the parameters, from `collect` to `finish`
        self._changes = Changes(memory)
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._arrivals: list[Arrivals] = []
        self._own_hooks = [self._hook(number) for number in range(len(parameters))]
        self._handles = [self._register(*pair) for pair in enumerate(self._own_hooks)]
        weakref.finalize(self, _remove, self._handles).atexit = False
        self.connect()
        self._begin()

    def connect(self) -> None:
        """Make the exchange in the current world."""
        self.exchange = self._reducer.make_exchange(self._label, self._parameters, self._memory)
        self._find_slots()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """As they were given."""
        return self._parameters

    def release(self) -> None:
        """Hear of gradients no more."""
        for parameter, handle in zip(self._parameters, self._handles, strict=True):
            if _hooks.get(parameter) is handle:  # not another's now
                _hooks.pop(parameter).remove()

    def restart(self) -> None:
        """Make the exchange anew, and forget what has come for the one that there was."""
        self._gradients.clear()
        self._changes.forget()
        self.connect()
        self._begin()

    def _find_slots(self) -> None:
        self._slots.find(self.exchange)
        plan = self.exchange.buckets.plan
        self._bucket_of = {n: index for index, members in enumerate(plan) for n in members}
        for arrivals in self._arrivals:
            self._choose_hooks(arrivals, [])
        self._arrivals = [
            Arrivals(members, [number for number in members if not self._slots.large[number]])
            for members in plan
        ]

    def _register(self, number: int, hook: Callable[[torch.Tensor], None]) -> Any:
        parameter = self._parameters[number]
        if parameter in _hooks:
            _hooks[parameter].remove()
        frozen = not parameter.requires_grad
        if frozen:  # torch takes no hooks then, but keeps those it has
            parameter.requires_grad_(True)
        _hooks[parameter] = parameter.register_post_accumulate_grad_hook(hook)
        if frozen:
            parameter.requires_grad_(False)
        return _hooks[parameter]

    def _choose_hooks(self, arrivals: Arrivals, quick: list[int]) -> None:
        """Let some members of a bucket come quickly, and the others as they did at first."""
        if quick is arrivals.quick_members:
            return
        before, arrivals.quick_members = arrivals.quick_members, quick
        for number in {*before} ^ {*quick}:
            if _hooks.get(self._parameters[number]) is self._handles[number]:  # not another's now
                hook = arrivals.quick.append if number in quick else self._own_hooks[number]
                self._handles[number] = self._register(number, hook)

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        reference = weakref.ref(self)

        @untraced
        def on_gradient(parameter: torch.Tensor) -> None:
            members = reference()
            if members is None:  # its optimizer is gone
                return
            if members._untouched:
                members.exchange.wait_for_order()
            try:
                members._come(number)
            finally:
                if deferred:
                    leave()

        return on_gradient

    @uninterrupted
    def _come(self, number: int) -> None:
        """Take note of a gradient that a backward pass has computed."""
        reducer = self._reducer
        reducer.synchronized = False
        passes = self._passes[number] = self._passes[number] + 1
        if passes == reducer.passes_per_step:
            if timeline.current is None:
                self._take(number)
            else:
                with timeline.span("step", timeline.HOOK, tensor=self._name(number)):
                    self._take(number)
            if self.repeated:
                raise RuntimeError(self.repeated[0])
        elif passes > reducer.passes_per_step:
            raise RuntimeError(self._too_often(number))

    def _too_often(self, number: int) -> str:
        passes = self._reducer.passes_per_step
        return (
            f"the gradient of {self._name(number)!r} was computed more than {passes} times before "
            "step() or synchronize(); raise backward_passes_per_step to add up gradients"
        )

    def _name(self, number: int) -> str:
        return self._reducer.names[self._parameters[number]]

    def _take(self, number: int) -> None:
        """Copy a gradient into its bucket, or leave that until the bucket is complete."""
        gradient = self._parameters[number].grad
        if gradient is None:
            raise RuntimeError(self._slots.gone([number]))
        if self._memory is not None:
            self._memory.check_not_capturing(f"the gradient of {self._name(number)!r}")
        if self._untouched:
            self._open_step()
        if self._is_converted:
            return
        if self._slots.large[number]:
            copied = not self._slots.bring_large(number, not self._changes.compares_all)
            if not copied:
                self._changes.sample(number, gradient)
        elif self._changes.steps == 0:
            if self._memory is not None:
                self.exchange.buckets[self._bucket_of[number]].order_writes()
            self._slots.copy([number])
        self._changes.take([number], [gradient])
        if self._changes.steps == 0:  # its exact order is of interest
            self._mark([number])
            return
        index = self._bucket_of[number]
        arrivals = self._arrivals[index]
        if self._memory is not None:
            arrivals.streams.add(self._memory.stream())
        if arrivals.tell(number):
            self._whole += 1
            if self.exchange.buckets.overlaps:
                self._bring([index])
            elif self._whole == len(self._arrivals):
                # Nothing leaves before: then all at once disturbs the backward pass least.
                self._bring(range(self._whole))

    def _bring(self, indices: Iterable[int]) -> None:
        """Copy what has not been copied yet of some buckets, and let them go."""
        told, quick = [], []
        for index in indices:
            arrivals = self._arrivals[index]
            if self._memory is not None:
                self._memory.join(arrivals.streams)
                self.exchange.buckets[index].order_writes()
            quick += self._quick_ones(arrivals)
            told += arrivals.told
            arrivals.told = []
        small = [number for number in told if not self._slots.large[number]]
        if small or quick:
            gradients = self._slots.copy(quick + small)
            self._changes.take(quick, gradients)
        self._mark([*told, *quick])

    def _mark(self, numbers: Sequence[int]) -> None:
        there = self._slots.sparse
        if not there:
            self.exchange.mark(*numbers)
            return
        sparse = {n: there[n].sparse_dim() for n in numbers if n in there}
        self.exchange.mark(*(n for n in numbers if n not in sparse), sparse=sparse)

    def _quick_ones(self, arrivals: Arrivals) -> list[int]:
        """Those that have come quickly; each has come once, or too often."""
        count, numbers = len(arrivals.quick), arrivals.quick_members
        if not count == len(numbers) == len(set(map(id, arrivals.quick))):
            came = [self._numbers[id(parameter)] for parameter in arrivals.quick]
            numbers = list(dict.fromkeys(came))
            if len(numbers) < count:
                self.repeated += [self._too_often(n) for n in numbers if came.count(n) > 1]
        arrivals.quick.clear()
        arrivals.absent -= len(numbers)
        return numbers

    def _open_step(self) -> None:
        self._reducer.reconnect()
        self._untouched = False
        self._slots.release()
        if self.exchange.begin():
            self._find_slots()
        self._is_converted = properties_of(self._parameters) != self._made_for
        if self._is_converted:
            self.exchange.mark_converted()

    def collect(self) -> list[str]:
        """Bring the gradients that no hook has taken, and those of buckets with gaps.

        Returns:
            The names of those that were changed since their hook took them.
        """
        if self._untouched:  # without a gradient, too: the others' buckets may be new ones
            self._open_step()
        self._gradients = [parameter.grad for parameter in self._parameters]
        if self._is_converted:
            return []
        for index, arrivals in enumerate(self._arrivals):
            if arrivals.absent or arrivals.told:
                self._complete(index)
        changed = self._changes.find(self._gradients, self._slots.copies)
        return [self._name(number) for number in changed]

    def _complete(self, index: int) -> None:
        """Bring what there is of a bucket that no hook has found to be complete."""
        arrivals = self._arrivals[index]
        quick = {self._numbers[id(parameter)] for parameter in arrivals.quick}
        for number in arrivals.members:
            seen = number in quick or number in self._changes
            if not seen and self._parameters[number].grad is not None:
                self._take(number)  # accumulation was cut short
        if arrivals.begun:
            self._bring([index])

    def finish(self, samples: int | None = None) -> None:
        """Wait for the exchange, and give the averages to the parameters.

        Raises:
            Interrupted: a signal's handler is to run; it is to be called again.
        """
        ended = True
        try:
            found = self.exchange.finish(samples)
        except Interrupted:
            ended = False
            raise
        finally:
            if ended:
                self._begin()
                self._changes.steps += 1
        gradients, self._gradients = self._gradients, []
        everywhere = [number for number, anywhere in enumerate(found) if anywhere]
        there = [number for number in everywhere if number not in self.exchange.sparse_parameters]
        if self.exchange.sparse_axes or len(there) < len(everywhere):
            self._reduce_apart(gradients, everywhere)
        sparse = self._slots.densified = {
            number: axes
            for number, axes in self._slots.densified.items()
            if gradients[number] is None or gradients[number].layout is torch.sparse_coo
        }
        for number in there:
            if gradients[number] is None or gradients[number].layout is not torch.strided:
                parameter = self._parameters[number]
                gradients[number] = parameter.grad = torch.empty_like(parameter)
        self._slots.hand_over(gradients, there)
        for number in sparse.keys() & there:  # SparseAdam takes no others
            self._parameters[number].grad = gradients[number].to_sparse(sparse[number])

    @uninterrupted
    def _reduce_apart(self, gradients: Sequence[Any], dense: Sequence[int]) -> None:
        """Reduce what has no place in a bucket: all ranks do it for the same parameters."""
        sparse_axes, weight = self.exchange.sparse_axes, self.exchange.weight
        if weight != 1.0:  # the average of no samples counts as zeros, whatever is in it
            gradients = [
                each * weight if weight and each is not None else None for each in gradients
            ]
        numbers = sorted({*sparse_axes} | (self.exchange.sparse_parameters & {*dense}))
        reduce_apart(
            [
                Apart(
                    f"{self._label}: {self._name(number)!r}",
                    self._parameters[number],
                    gradients[number],
                    sparse_axes.get(number),
                )
                for number in numbers
            ],
            self._reducer.op,
            self._reducer.process_set,
        )

    @property
    def in_flight(self) -> bool:
        """Whether gradients have come for which `finish` has not been called."""
        return self.exchange.in_flight or any(arrivals.begun for arrivals in self._arrivals)

    def begin_step(self) -> None:
        """Count the backward passes anew."""
        self._passes = [0] * len(self._parameters)
        self._untouched = True
        self._slots.release()
        if not self._may_hurry():
            for arrivals in self._arrivals:
                self._choose_hooks(arrivals, [])

    def _begin(self) -> None:
        hurry = self._may_hurry()
        for arrivals in self._arrivals:
            self._choose_hooks(arrivals, arrivals.next_quick() if hurry else [])
            arrivals.reset()
        self.begin_step()
        self._changes.begin()
        self._slots.begin()
        self._whole = 0  # buckets that have all their gradients
        #: What to say of gradients that came too often.
        self.repeated: list[str] = []

    def _may_hurry(self) -> bool:
        """Whether gradients may come without a hook in Python that looks at each."""
        return (
            not self._changes.compares_all
            and self._memory is None
            and self._reducer.passes_per_step == 1
            and timeline.current is None
        )


def _remove(handles: Iterable[Any]) -> None:
    """Remove the hooks of a set that is no more."""
    for handle in handles:
        handle.remove()


def release(parameters: Iterable[torch.Tensor]) -> None:
    """Take parameters from the optimizer that was wrapped last, which exchanges them no more."""
    for parameter in parameters:
        if parameter in _hooks:
            _hooks.pop(parameter).remove()
