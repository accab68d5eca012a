"""Gradient hooks: they report to the exchange which gradients the backward pass has made.

`GradientExchange._send_complete` (``hvdlite/gradients/exchange.py``) decides when a bucket is sent.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from hvdlite.base.interrupts import Interrupted, deferred, leave, uninterrupted
from hvdlite.gradients.metadata import IN_SLOT
from hvdlite.torch.buffers import ChangeDetector, GradientBuffers, Step
from hvdlite.torch.dynamo import untraced
from hvdlite.torch.sparse import start_reduction, zero_gradient
from hvdlite.torch.tensors import places_of, properties_of

if TYPE_CHECKING:
    from hvdlite.torch.device_memory import CudaMemory
    from hvdlite.torch.reducer import Reducer

# After so many steps in which a bucket left late, since another gradient came last than the one
# that has a hook, all of its gradients have hooks.
_MAX_MISSES = 3
# Fewer gradients than this keep their hooks: to do without would not pay.
_FEWEST = 4

#: What to do where a loss passes through the layers of two optimizers.
FREEZE = (
    "in a backward pass that is for another optimizer, as a GAN's generator has one, freeze this "
    "one's parameters by requires_grad_(False)"
)

gradient_of, _seen = attrgetter("grad"), attrgetter("seen")
# By the identifiers of their handles, in the order of their registration, which torch keeps.
_hooks_of: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")

# The hook of each parameter, which belongs to the optimizer that was wrapped last.
_hooks = WeakTensorKeyDictionary()


class BucketHooks:
    """The gradients of one bucket that have arrived in the current step, and their hooks.

    Of the small ones, only the first and the last to arrive have hooks: a hook in Python takes
    several times as long as the exchange of a small gradient, and evicts the backward pass from the
    processor's caches. The others are found in ``grad`` when the last hook comes, or at the end of
    the backward pass. On a device they have a short hook, which records the stream.

    Args:
        members: of the bucket, by number.
        spared: those that need no hook, if the order of their arrival is known or does not matter.

    Attributes:
        bare: the members that have no hook in this step.
        pending: those of them whose gradients have not been found yet.
        seen: those that a hook has recorded and that have not been sent.
        awaited: the number of members whose hooks have not been called.
        misses: the number of steps in which all arrived, but another one last.
        streams: of a device, on which gradients have arrived.
    """

    def __init__(self, members: Sequence[int], spared: Sequence[int]) -> None:
        self.members = members
        self.spared = spared if len(spared) >= _FEWEST else []
        self.bare: list[int] = []
        self.misses = 0
        self.streams: set[int] = set()
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the gradients of the last step."""
        self.seen: list[int] = []
        self.pending = self.bare
        self.awaited = len(self.members) - len(self.bare)
        self.streams.clear()

    def record(self, number: int) -> bool:
        """Record a gradient; return whether it is the last that has a hook."""
        self.seen.append(number)
        self.awaited -= 1
        return not self.awaited


class GradientHooks:
    """Parameters that share an exchange, and their hooks.

    Attributes:
        used: the gradients, by id, that the last `finish` has left; none after `reset_passes`.

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
        self._properties, self._places = properties_of(members), places_of(members)
        self._memory = memory
        self._check = reducer.make_check(members)  # it counts on in a new world
        self._buffers = GradientBuffers(members, memory, reducer.sparse_as_dense, names)
        self._step = Step(len(members))
        self._changes = ChangeDetector(memory)
        self._bucket_hooks: list[BucketHooks] = []
        self._arrival = threading.RLock()
        self._takes_over = False  # from an optimizer that may still be used
        # When gradients arrive: in the reverse order of their registration, until it is known.
        self._turns = [*reversed(range(len(members)))]
        self._bare: frozenset[int] = frozenset()
        self._is_watching = False  # of a model whose gradients come unforeseen, all have hooks
        self._handles: list[Any] = []
        self._averaged: Sequence[int] = range(len(members))  # in the last step
        self.restart()
        handles = self._handles
        weakref.finalize(self, lambda: [each.remove() for each in handles]).atexit = False

    def remove(self) -> None:
        """Remove this object's hooks."""
        for parameter, handle in zip(self.parameters, self._handles, strict=True):
            if _hooks.get(parameter) is handle:  # not another's now
                _hooks.pop(parameter).remove()

    def restart(self) -> None:
        """Make the exchange in the current world, without gradients that arrived for an old one."""
        self._changes.restart()
        self.used: frozenset[int] = frozenset()
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
            or any(map(_seen, self._bucket_hooks))
        )

    @property
    def is_cut_short(self) -> bool:
        """Return whether a backward pass has begun and not ended, as one that has failed."""
        return bool(self._step.tasks)

    @property
    def has_new(self) -> bool:
        """Return whether hooks have told of gradients for which `finish` has not been called."""
        return self.in_flight or any(self._step.passes)

    # Registration

    def _find_buffers(self) -> None:
        self._buffers.connect(self.exchange)
        self._plan_hooks()

    def _plan_hooks(self) -> None:
        """Choose the small gradients of each bucket, but for the first and the last, to be bare."""
        large, turn, plan = self._buffers.large, self._turns.__getitem__, self.exchange.buckets.plan
        self._bucket_of = {n: index for index, members in enumerate(plan) for n in members}
        self._bucket_hooks = []
        for members in plan:
            ends = {min(members, key=turn), max(members, key=turn)}
            spared = [n for n in members if not large[n] and n not in ends]
            self._bucket_hooks.append(BucketHooks(members, spared))
        self._spared = frozenset[int]().union(*(each.spared for each in self._bucket_hooks))
        self._set_bare(self._bare)

    def _set_bare(self, bare: frozenset[int]) -> None:
        self._bare = bare
        for bucket_hooks in self._bucket_hooks:
            bucket_hooks.bare = [n for n in bucket_hooks.spared if n in bare]
            bucket_hooks.begin_step()

    def _change_hooks(self) -> None:
        """Let those gradients have hooks that need them in the next step."""
        bare = self._spared if self._may_spare_hooks() else frozenset[int]()
        if self._handles and bare == self._bare:
            return
        numbers: Iterable[int] = bare ^ self._bare
        if not self._handles:
            numbers = range(len(self.parameters))
            self._handles += [None for _ in numbers]
        for number in numbers:
            if self._handles[number] is None or self._has_hook(number):
                self._hook(number, number in bare)
        self._set_bare(bare)

    def _has_hook(self, number: int) -> bool:
        """Return whether a parameter's hook is this object's, and not a later optimizer's."""
        return _hooks.get(self.parameters[number]) is self._handles[number]

    def _hook(self, number: int, is_bare: bool = False) -> None:
        """Give a parameter its hook, behind all others, in the place of the one that it has."""
        parameter = self.parameters[number]
        if parameter in _hooks:
            _hooks[parameter].remove()
            owner = _hooks[parameter].owner()
            self._takes_over = self._takes_over or owner not in (None, self)
        handle: Any = RemovableHandle(OrderedDict())
        if not is_bare or self._memory is not None:
            frozen = not parameter.requires_grad
            if frozen:  # torch takes no hooks then, but keeps those it has
                parameter.requires_grad_(True)
            hook = partial(_record_stream if is_bare else _on_gradient, weakref.ref(self), number)
            handle = parameter.register_post_accumulate_grad_hook(hook)
            if frozen:
                parameter.requires_grad_(False)
        handle.owner = weakref.ref(self)
        self._handles[number] = _hooks[parameter] = handle

    def _may_spare_hooks(self) -> bool:
        """Return whether gradients may arrive without a hook that looks at each."""
        passes_once = self._reducer.passes_per_step == 1
        learns = self.exchange.learns_order and self.exchange.buckets.overlaps
        return passes_once and not learns and not self._is_watching

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
            self._take(number)
        elif passes > reducer.passes_per_step:
            self._call_at_end()  # which does not come
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
        for number in filter(self._bare.__contains__, self._averaged):
            gradient = self.parameters[number].grad
            if gradient is None:  # it was there, so all have been reset, and what is there is new
                self._step.stale.clear()
                break
            self._step.stale[number] = gradient._version
        places = places_of(self.parameters)
        if not places or places != self._places:
            if properties_of(self.parameters) == self._properties:
                self._places = places
            else:
                self._step.is_converted = True
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
        self._call_at_end()
        index, overlaps = self._bucket_of[number], self.exchange.buckets.overlaps
        learns = overlaps and self._changes.steps == 0
        if self._buffers.large[number]:
            self._buffers.write_large(step, number)
        elif learns:
            if self._memory is not None:
                self.exchange.buckets.all[index].order_writes()
            self._buffers.copy(step, {number: gradient})
        step.take({number: gradient})
        if learns:  # the exact order
            step.order.append(number)
            self._mark([number])
            return
        bucket_hooks = self._bucket_hooks[index]
        if self._memory is not None:
            bucket_hooks.streams.add(self._memory.stream())
        if bucket_hooks.record(number) and overlaps:
            self._send([index])

    def _call_at_end(self) -> None:
        """Send what has arrived when the backward pass that runs now has ended."""
        step, task = self._step, torch._C._current_graph_task_id()
        if task != -1 and task not in step.tasks:
            step.tasks.add(task)
            on_end = partial(_on_end, weakref.ref(self), step, task)
            torch.autograd.Variable._execution_engine.queue_callback(on_end)

    @uninterrupted
    def _on_end(self) -> None:
        late = self._send(range(len(self._bucket_hooks)))
        for bucket_hooks in late if self.exchange.buckets.overlaps else ():
            bucket_hooks.misses += not (bucket_hooks.awaited or bucket_hooks.pending)
            if bucket_hooks.misses == _MAX_MISSES:
                self._spared -= {*bucket_hooks.spared}

    def _send(self, indices: Iterable[int], is_last: bool = False) -> list[BucketHooks]:
        """Copy the gradients of some buckets that have not been copied yet, and mark all.

        Buckets that have been sent in this step are left out.

        Args:
            is_last: whether all gradients that are there belong to this step.

        Returns:
            The buckets that had any.
        """
        step, sent = self._step, dict[int, list[int]]()
        small, found = list[int](), dict[int, Any]()
        for index in indices:
            bucket_hooks = self._bucket_hooks[index]
            stale = {} if is_last else step.stale
            here = self._find_bare(bucket_hooks, stale) if bucket_hooks.pending else {}
            if not (here or bucket_hooks.seen):
                continue
            sent[index] = [*bucket_hooks.seen, *here]
            if self._memory is not None:
                name = self._names[bucket_hooks.members[0]]
                self._memory.check_not_capturing(f"the gradient of {name!r}")
                self._memory.join(bucket_hooks.streams)
                self.exchange.buckets.all[index].order_writes()
            found.update(here)
            small += itertools.filterfalse(self._buffers.large.__getitem__, bucket_hooks.seen)
            bucket_hooks.seen = []
        if small or found:
            self._buffers.copy(step, {**found, **self._buffers.find(small)})
            step.take(found)
        for index, numbers in sent.items():
            is_whole = len(numbers) == len(self._bucket_hooks[index].members)
            if is_whole and not step.kinds and not self.exchange.learns_order:
                self.exchange.mark_bucket(index)
            else:
                self._mark(numbers)
        return [*map(self._bucket_hooks.__getitem__, sent)]

    def _find_bare(self, bucket_hooks: BucketHooks, stale: dict[int, int]) -> dict[int, Any]:
        """Return the gradients of members without hooks that are there, and were not before."""
        numbers, bucket_hooks.pending = bucket_hooks.pending, []
        found = dict(
            zip(numbers, map(gradient_of, map(self.parameters.__getitem__, numbers)), strict=True)
        )
        if type(None) in {*map(type, found.values())}:
            bucket_hooks.pending = [n for n in numbers if found[n] is None]
            found = {n: each for n, each in found.items() if each is not None}
        if stale:  # added to, in place
            new = {n: each for n, each in found.items() if each._version != stale.get(n)}
            bucket_hooks.pending += [n for n in found if n not in new]
            found = new
        return found

    def _mark(self, numbers: Sequence[int]) -> None:
        self.exchange.mark(kinds={n: self._step.kinds.get(n, IN_SLOT) for n in numbers})

    # The end of a step

    def collect(self) -> list[str]:
        """Send the gradients that no hook has sent.

        Returns:
            Messages about gradients that have gone, or were changed after their hook.
        """
        if not self._step.is_open:  # without a gradient, too: the others' buckets may be new ones
            self._open_step()
        step = self._step
        step.gradients = [*map(gradient_of, self.parameters)]
        if step.is_converted:
            return []
        for index, bucket_hooks in enumerate(self._bucket_hooks):
            if bucket_hooks.seen or bucket_hooks.awaited or bucket_hooks.pending:
                self._send_incomplete(index)
        if step.behind:
            missing = [number for number in step.behind if step.gradients[number] is None]
            if missing:
                return [self._buffers.describe_missing(missing)]
        changed = self._changes.find(step, self._buffers.copies)
        if not changed:
            return []
        return [
            f"the gradient of {self._names[changed[0]]!r} was changed after backward(), while it "
            "was being exchanged, and the change would be lost; to clip, call "
            "optimizer.clip_grad_norm_(max_norm), or clip_grad_norm_ or clip_grad_value_ of "
            "torch.nn.utils, which wait for averages; before other changes, call "
            "optimizer.synchronize(), and then step() inside optimizer.skip_synchronize()",
        ]

    def _send_incomplete(self, index: int) -> None:
        """Send the gradients of a bucket of which some are missing."""
        bucket_hooks = self._bucket_hooks[index]
        for number in {*bucket_hooks.members} - {*bucket_hooks.bare}:
            if number not in self._step.taken and self.parameters[number].grad is not None:
                self._take(number)  # accumulation was cut short
        pending = len(bucket_hooks.pending)
        self._send([index], is_last=True)
        # Their hooks would have recorded them, or found that others have dropped them.
        if len(bucket_hooks.pending) < pending or any(
            len(_hooks_of(self.parameters[n]) or ()) > (self._memory is not None)
            for n in bucket_hooks.pending
        ):
            self._is_watching = True

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
        self._buffers.hand_over(step)
        self.used = frozenset(map(id, step.gradients))

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
        self.used = frozenset()  # what comes may have no hook that tells
        self._buffers.release()
        if not self._may_spare_hooks():
            self._change_hooks()

    def _begin_step(self) -> None:
        for bucket_hooks in self._bucket_hooks:
            bucket_hooks.begin_step()
        if self._step.averaged is not None:
            self._averaged = self._step.averaged
        if self._step.order:
            for turn, number in enumerate(self._step.order):
                self._turns[number] = turn - len(self._turns)  # before those that did not arrive
            self._plan_hooks()
        if torch._C._current_graph_task_id() == -1:  # else it is one of the others that steps
            for number in self._step.behind:  # from now on behind the others
                if self._has_hook(number):
                    self._hook(number)
            self._change_hooks()
        self._step = Step(len(self.parameters))


@untraced
def _on_gradient(
    reference: weakref.ref[GradientHooks], number: int, parameter: torch.Tensor
) -> None:
    """Take a gradient: the hook of a parameter."""
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


@untraced
def _record_stream(
    reference: weakref.ref[GradientHooks], number: int, parameter: torch.Tensor
) -> None:
    """Record the stream of a gradient on a device: the hook of a parameter that needs no other."""
    hooks = reference()
    if hooks is not None and hooks._memory is not None:
        bucket_hooks = hooks._bucket_hooks[hooks._bucket_of[number]]
        bucket_hooks.streams.add(hooks._memory.stream())


@untraced
def _on_end(reference: weakref.ref[GradientHooks], step: Step, task: int) -> None:
    """End a backward pass of a step, unless that has ended since.

    A pass within another, as for checkpoints of activations, is not the end.
    """
    step.tasks.discard(task)
    hooks = reference()
    if hooks is None or hooks._step is not step or torch._C._current_autograd_node() is not None:
        return
    try:
        with hooks._arrival:
            hooks._on_end()
    finally:
        if deferred:
            leave()


def remove_hooks(parameters: Iterable[torch.Tensor]) -> None:
    """Remove the hooks of parameters, whatever optimizer they belong to."""
    for parameter in parameters:
        if parameter in _hooks:
            _hooks.pop(parameter).remove()
