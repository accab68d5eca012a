"""Gradient hooks: they report to the exchange which gradients the backward pass has made.

`GradientExchange._send_complete` (``hvdlite/gradients/exchange.py``) decides when a bucket is sent.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvdlite.base.interrupts import Interrupted, deferred, leave, uninterrupted
from hvdlite.gradients.metadata import DENSE
from hvdlite.observe import timeline
from hvdlite.torch.buffers import ChangeDetector, GradientBuffers, Step
from hvdlite.torch.dynamo import untraced
from hvdlite.torch.sparse import start_reduction, zero_gradient
from hvdlite.torch.tensors import properties_of

if TYPE_CHECKING:
    from hvdlite.torch.device_memory import CudaMemory
    from hvdlite.torch.reducer import Reducer

# After this many steps in which its C hooks did not suffice, a bucket uses Python hooks only.
_MAX_MISSES = 3
# With fewer gradients than this a bucket has no C hooks: they would not pay.
_FEWEST = 4

#: What to do where a loss passes through the layers of two optimizers.
FREEZE = (
    "in a backward pass that is for another optimizer, as a GAN's generator has one, freeze this "
    "one's parameters by requires_grad_(False)"
)

_gradient_of, _has_begun = attrgetter("grad"), attrgetter("has_begun")
# By the identifiers of their handles, in the order of their registration, which torch keeps.
_hooks_of: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")

# The hook of each parameter, which belongs to the optimizer that was wrapped last.
_hooks = WeakTensorKeyDictionary()


class BucketHooks:
    """The gradients of one bucket that have arrived in the current step, and their hooks.

    At first each gradient has a Python hook. After a step in which all have arrived, the small ones
    have a C function as their hook, ``unseen.append``, except for the last one: its Python hook
    finds that all are there. A Python hook takes twice as long, and evicts the backward pass from
    the processor's caches besides. On a device the hook is a function that also records the stream.

    Args:
        members: of the bucket, by number.
        small: those members that need no copy as soon as they arrive.

    Attributes:
        seen: those that a Python hook has recorded and that have not been sent, by number.
        unseen: the parameters whose C hooks were called and whose gradients have not been sent.
        c_hooks: the members with C hooks in this step.
        awaited: the number of members that no Python hook has recorded.
        streams: of a device, on which gradients have arrived.
    """

    def __init__(self, members: Sequence[int], small: Sequence[int]) -> None:
        self.members = members
        self._small = small
        self.unseen: list[torch.Tensor] = []
        self.streams: set[int] = set()
        self.c_hooks: list[int] = []
        self._misses = 0
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        self.seen: list[int] = []
        self.unseen.clear()
        self.awaited = len(self.members)
        self.streams.clear()
        self._last: int | None = None

    @property
    def has_begun(self) -> bool:
        """Return whether there is something to send."""
        return bool(self.seen or self.unseen)

    def record(self, number: int) -> bool:
        """Record a gradient; return whether all have arrived."""
        self.seen.append(number)
        self.awaited -= 1
        if self.awaited > len(self.unseen):
            return False
        self._last = number
        return True

    def choose_c_hooks(self) -> list[int]:
        """Return the members that should have C hooks in the next step, judging by this one."""
        if self._last is None:  # some did not arrive, or the last one has a C hook
            self._misses += bool(self.c_hooks)
            return []
        if self.c_hooks or self._misses >= _MAX_MISSES or len(self._small) < _FEWEST:
            return self.c_hooks
        return [number for number in self._small if number != self._last]


class GradientHooks:
    """Parameters that share an exchange, and their hooks.

    The object belongs to its reducer alone, and is freed with it: the garbage collector does not
    see references from a parameter's hooks, so they must not keep it alive, as it keeps the
    parameter alive.
    """

    def __init__(
        self,
        reducer: Reducer,
        label: str,
        parameters: Sequence[torch.Tensor],
        memory: CudaMemory | None = None,
    ) -> None:
        self._label = label
        # References back are weak, so that all is freed at once with the optimizer.
        self._reducer: Reducer = weakref.proxy(reducer)
        self.parameters = members = list(parameters)
        self._names = names = [reducer.names[parameter] for parameter in members]
        self._properties = properties_of(members)
        self._memory = memory
        self._check = reducer.make_check(members)  # it counts on in a new world
        self._buffers = GradientBuffers(members, memory, reducer.sparse_as_dense, names)
        self._step = Step(len(members))
        self._changes = ChangeDetector(memory)
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._bucket_hooks: list[BucketHooks] = []
        self._arrival = threading.RLock()
        self._takes_over = False  # from an optimizer that may still be used
        self._python_hooks = [self._make_hook(number) for number in range(len(parameters))]
        self._handles = [self._register(*pair) for pair in enumerate(self._python_hooks)]
        handles = self._handles
        weakref.finalize(self, lambda: [each.remove() for each in handles]).atexit = False
        self.restart()

    def remove(self) -> None:
        """Remove this object's hooks."""
        for parameter, handle in zip(self.parameters, self._handles, strict=True):
            if _hooks.get(parameter) is handle:  # not another's now
                _hooks.pop(parameter).remove()

    def restart(self) -> None:
        """Make the exchange in the current world, without gradients that arrived for an old one."""
        self._changes.restart()
        self.exchange = self._reducer.make_exchange(
            self._label, self.parameters, self._memory, self._check
        )
        self._find_buffers()
        self._begin_step()

    @property
    def in_flight(self) -> bool:
        """Return whether gradients have arrived for which `finish` has not been called."""
        return (
            self.exchange.in_flight
            or bool(self._step.behind)
            or any(map(_has_begun, self._bucket_hooks))
        )

    # Registration

    def _find_buffers(self) -> None:
        self._buffers.connect(self.exchange)
        plan = self.exchange.buckets.plan
        self._bucket_of = {n: index for index, members in enumerate(plan) for n in members}
        for bucket_hooks in self._bucket_hooks:
            self._set_c_hooks(bucket_hooks, [])
        self._bucket_hooks = [
            BucketHooks(members, [n for n in members if not self._buffers.large[n]])
            for members in plan
        ]

    def _register(self, number: int, hook: Callable[[torch.Tensor], None]) -> Any:
        parameter = self.parameters[number]
        if parameter in _hooks:
            _hooks[parameter].remove()
            owner = _hooks[parameter].owner()
            self._takes_over = self._takes_over or owner not in (None, self)
        frozen = not parameter.requires_grad
        if frozen:  # torch takes no hooks then, but keeps those it has
            parameter.requires_grad_(True)
        handle: Any = parameter.register_post_accumulate_grad_hook(hook)
        if frozen:
            parameter.requires_grad_(False)
        handle.owner = weakref.ref(self)
        _hooks[parameter] = handle
        return handle

    def _set_c_hooks(self, bucket_hooks: BucketHooks, chosen: list[int]) -> None:
        """Give some members of a bucket C hooks, and the others Python hooks."""
        before, bucket_hooks.c_hooks = bucket_hooks.c_hooks, chosen
        for number in {*before} ^ {*chosen}:
            self._replace(number, self._short_hook(bucket_hooks) if number in chosen else None)

    def _replace(self, number: int, hook: Callable[[torch.Tensor], None] | None) -> None:
        """Register a hook, or the Python hook, behind all others, in the place of this one's."""
        if _hooks.get(self.parameters[number]) is self._handles[number]:  # not another's now
            self._handles[number] = self._register(number, hook or self._python_hooks[number])

    def _short_hook(self, bucket_hooks: BucketHooks) -> Callable[[torch.Tensor], None]:
        append = bucket_hooks.unseen.append
        if self._memory is None:
            return append
        stream, add = self._memory.stream, bucket_hooks.streams.add

        @untraced
        def on_gradient(parameter: torch.Tensor) -> None:
            append(parameter)
            add(stream())

        return on_gradient

    def _allows_c_hooks(self) -> bool:
        """Return whether gradients may arrive without a Python hook that looks at each."""
        passes_once = self._reducer.passes_per_step == 1
        return passes_once and timeline.current is None and not self._changes.compares_all

    def _make_hook(self, number: int) -> Callable[[torch.Tensor], None]:
        reference = weakref.ref(self)

        @untraced
        def on_gradient(parameter: torch.Tensor) -> None:
            hooks = reference()
            if hooks is None:  # its optimizer is gone
                return
            if not hooks._step.is_open:
                hooks.exchange.wait_for_order()
            try:
                with hooks._arrival:  # backward passes may run in several threads
                    hooks._on_gradient(number)
            finally:
                if deferred:
                    leave()

        return on_gradient

    # The backward pass

    @uninterrupted
    def _on_gradient(self, number: int) -> None:
        if self._is_undefined(number):
            return
        reducer, step = self._reducer, self._step
        reducer.averaged = False
        step.passes[number] += 1
        passes = step.passes[number]
        if passes == reducer.passes_per_step:
            if next(reversed(_hooks_of(self.parameters[number]))) != self._handles[number].id:
                step.behind.append(number)  # they may change the gradient: `collect` takes it
                return
            if timeline.current is None:
                self._take(number)
            else:
                with timeline.span("step", timeline.HOOK, tensor=self._names[number]):
                    self._take(number)
            if step.repeated:
                raise RuntimeError(step.repeated[0])
        elif passes > reducer.passes_per_step:
            raise RuntimeError(self._too_often(number))

    def _is_undefined(self, number: int) -> bool:
        """Return whether a backward function has returned None in the place of a gradient.

        torch calls the hooks all the same. Where there are others, one of them may have dropped it.
        """
        parameter = self.parameters[number]
        return parameter.grad is None and len(_hooks_of(parameter)) == 1

    def _too_often(self, number: int) -> str:
        passes, owner = self._reducer.passes_per_step, ""
        remedy = "raise backward_passes_per_step to add up gradients"
        if self._takes_over:
            owner = " of the DistributedOptimizer that was wrapped last over this parameter"
            remedy += (
                ", or, if it was the step() of an earlier one over the same parameters that you "
                "called: only the last one's exchange goes on during backward(), so wrap an "
                "optimizer when its turn begins, and discard the one before"
            )
        return (
            f"the gradient of {self._names[number]!r} was computed more than {passes} times before "
            f"step() or synchronize(){owner}; {remedy}; {FREEZE}"
        )

    def _open_step(self) -> None:
        self._reducer.reconnect()
        self._step.is_open = True
        self._buffers.begin_step()
        if self.exchange.begin(self._reducer.find_changes()):
            self._find_buffers()
        self._step.is_converted = properties_of(self.parameters) != self._properties
        if self._step.is_converted:
            self.exchange.mark_converted()

    def _take(self, number: int) -> None:
        """Copy a gradient into its bucket, or leave that until the bucket is complete."""
        gradient = self.parameters[number].grad
        if gradient is None:
            raise RuntimeError(self._buffers.describe_missing([number]))
        if self._memory is not None:
            self._memory.check_not_capturing(f"the gradient of {self._names[number]!r}")
        if not self._step.is_open:
            self._open_step()  # perhaps in another world
        step = self._step
        if step.is_converted:
            return
        index = self._bucket_of[number]
        if self._buffers.large[number]:
            self._buffers.write_large(step, number)
        elif self._changes.steps == 0:
            if self._memory is not None:
                self.exchange.buckets.all[index].order_writes()
            self._buffers.copy(step, [number])
        step.take([number], [gradient])
        if self._changes.steps == 0:  # its exact order is recorded
            self._mark([number])
            return
        bucket_hooks = self._bucket_hooks[index]
        if self._memory is not None:
            bucket_hooks.streams.add(self._memory.stream())
        if bucket_hooks.record(number):
            step.complete += 1
            if self.exchange.buckets.overlaps:
                self._send([index])
            elif step.complete == len(self._bucket_hooks):
                # No bucket leaves before: all at once disturbs the backward pass least.
                self._send(range(step.complete))

    def _send(self, indices: Iterable[int]) -> None:
        """Copy the gradients of some buckets that have not been copied yet, and mark all.

        Buckets that have been sent in this step are left out.
        """
        step, sent = self._step, []
        small, unseen = list[int](), list[int]()
        for index in indices:
            bucket_hooks = self._bucket_hooks[index]
            if not bucket_hooks.has_begun:
                continue
            sent.append(index)
            if self._memory is not None:
                name = self._names[bucket_hooks.members[0]]
                self._memory.check_not_capturing(f"the gradient of {name!r}")
                self._memory.join(bucket_hooks.streams)
                self.exchange.buckets.all[index].order_writes()
            if bucket_hooks.unseen:
                unseen += self._take_unseen(bucket_hooks)
            small += itertools.filterfalse(self._buffers.large.__getitem__, bucket_hooks.seen)
        if small or unseen:
            gradients = self._buffers.copy(step, unseen + small)
            if unseen:
                step.take(unseen, gradients)
        for index in sent:
            bucket_hooks = self._bucket_hooks[index]
            if bucket_hooks.awaited or step.kinds or self.exchange.learns_order:
                self._mark(
                    [*bucket_hooks.seen, *(n for n in unseen if self._bucket_of[n] == index)]
                )
            else:
                self.exchange.mark_bucket(index)
            bucket_hooks.seen = []

    def _mark(self, numbers: Sequence[int]) -> None:
        self.exchange.mark(kinds={n: self._step.kinds.get(n, DENSE) for n in numbers})

    def _take_unseen(self, bucket_hooks: BucketHooks) -> list[int]:
        """Return the members whose C hooks were called; each has been once, or too often."""
        count, numbers = len(bucket_hooks.unseen), bucket_hooks.c_hooks
        if not count == len(numbers) == len(set(map(id, bucket_hooks.unseen))):
            arrived = [self._numbers[id(parameter)] for parameter in bucket_hooks.unseen]
            numbers = list(dict.fromkeys(arrived))
            if len(numbers) < count:
                self._step.repeated += [self._too_often(n) for n in numbers if arrived.count(n) > 1]
        if type(None) in {*map(type, map(_gradient_of, bucket_hooks.unseen))}:
            numbers = [*itertools.filterfalse(self._is_undefined, numbers)]
        bucket_hooks.unseen.clear()
        bucket_hooks.awaited -= len(numbers)
        return numbers

    # The end of a step

    def collect(self) -> list[str]:
        """Send the gradients that no hook has sent.

        Returns:
            Messages about gradients that arrived too often, or were changed after their hook.
        """
        if not self._step.is_open:  # without a gradient, too: the others' buckets may be new ones
            self._open_step()
        step = self._step
        step.gradients = [*map(_gradient_of, self.parameters)]
        if step.is_converted:
            return []
        for index, bucket_hooks in enumerate(self._bucket_hooks):
            if bucket_hooks.awaited or bucket_hooks.seen:
                self._send_incomplete(index)
        if step.behind:
            missing = [number for number in step.behind if step.gradients[number] is None]
            if missing:
                return [self._buffers.describe_missing(missing)]
        changed = self._changes.find(step, self._buffers.copies)
        if not changed:
            return step.repeated
        return [
            *step.repeated,
            f"the gradient of {self._names[changed[0]]!r} was changed after backward(), while it "
            "was being exchanged, and the change would be lost; to clip, call "
            "optimizer.clip_grad_norm_(max_norm) in place of torch.nn.utils.clip_grad_norm_; "
            "before other changes, call optimizer.synchronize(), and then step() inside "
            "optimizer.skip_synchronize()",
        ]

    def _send_incomplete(self, index: int) -> None:
        """Send the gradients of a bucket of which some are missing."""
        bucket_hooks = self._bucket_hooks[index]
        unseen = {self._numbers[id(parameter)] for parameter in bucket_hooks.unseen}
        for number in bucket_hooks.members:
            taken = number in unseen or number in self._step.taken
            if not taken and self.parameters[number].grad is not None:
                self._take(number)  # accumulation was cut short
        if bucket_hooks.has_begun:
            self._send([index])

    def finish(self, samples: int | None = None) -> None:
        """Wait for the exchange, and give the averages to the parameters.

        Raises:
            Interrupted: a signal's handler is to run; this is to be called again.
        """
        step, ended = self._step, True
        try:
            if step.averaged is None:
                self._finish_exchange(step, samples)
            if step.sparse_waits:
                self._finish_sparse(step)
        except Interrupted:
            ended = False
            raise
        finally:
            if ended:
                self._begin_step()
                self._changes.steps += 1
        if step.sparse_errors:
            raise step.sparse_errors[0]
        assert step.averaged is not None
        self._buffers.hand_over(step.gradients, step.averaged)

    def _finish_exchange(self, step: Step, samples: int | None) -> None:
        """Wait for the buckets, and start the reduction of the sparse gradients."""
        found = self.exchange.finish(samples)
        present = [*itertools.compress(range(len(found)), found)]
        sparse, axes = self.exchange.sparse_parameters, self.exchange.sparse_axes
        if sparse or axes:
            self._start_sparse(step, {*axes} | (sparse & {*present}))
            present = [number for number in present if number not in sparse]
        step.averaged = present

    def _start_sparse(self, step: Step, numbers: Iterable[int]) -> None:
        """Start to reduce the gradients that have no slot: all ranks do it for the same ones."""
        axes, weight = self.exchange.sparse_axes, self.exchange.weight
        op, process_set = self._reducer.op, self._reducer.process_set
        for number in sorted(numbers):
            zeros = partial(zero_gradient, self.parameters[number], axes.get(number, 0))
            if step.gradients[number] is None:
                step.gradients[number] = zeros()
            sent = step.gradients[number]
            if weight != 1.0:  # the average of no samples counts as zeros, whatever is in it
                sent = sent * weight if weight else zeros()
            name = f"{self._label}: {self._names[number]!r}"
            step.sparse_waits[number] = start_reduction(name, sent, op, process_set)

    def _finish_sparse(self, step: Step) -> None:
        """Wait for the sparse gradients; after `Interrupted` for those that are left."""
        while step.sparse_waits:
            number = next(iter(step.sparse_waits))
            try:
                with torch.no_grad():
                    step.gradients[number].copy_(step.sparse_waits[number]())
                self.parameters[number].grad = step.gradients[number]
            except Exception as error:  # to the last, whatever becomes of one
                step.sparse_errors.append(error)
            del step.sparse_waits[number]

    def reset_passes(self) -> None:
        """Reset the counts of backward passes."""
        self._step = Step(len(self.parameters))
        self._buffers.release()
        if not self._allows_c_hooks():
            for bucket_hooks in self._bucket_hooks:
                self._set_c_hooks(bucket_hooks, [])

    def _begin_step(self) -> None:
        allowed = self._allows_c_hooks()
        if torch._C._current_graph_task_id() == -1:  # else it is one of the others that steps
            for number in self._step.behind:  # from now on behind the others
                self._replace(number, None)
        for bucket_hooks in self._bucket_hooks:
            chosen = bucket_hooks.choose_c_hooks() if allowed else []
            if chosen != bucket_hooks.c_hooks:
                self._set_c_hooks(bucket_hooks, chosen)
            bucket_hooks.begin_step()
        self._step = Step(len(self.parameters))


def remove_hooks(parameters: Iterable[torch.Tensor]) -> None:
    """Remove the hooks of parameters, whatever optimizer they belong to."""
    for parameter in parameters:
        if parameter in _hooks:
            _hooks.pop(parameter).remove()
