"""Gradient buffers: copies of gradients into buckets and of averages back, as few as possible."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvdlite.gradients.buckets import LEAST_ZERO_COPY
from hvdlite.gradients.exchange import GradientExchange
from hvdlite.gradients.metadata import IN_SLOT
from hvdlite.torch.tensors import gradient_dtype, to_array, to_tensor

if TYPE_CHECKING:
    from hvdlite.torch.device_memory import CudaMemory

# Bytes from which on a gradient is copied as soon as it is there, still in the cache, and becomes
# its average without a copy. The smaller ones are copied together, each way: that takes a third of
# the time of one by one.
_LARGE = 2**16

_NOTHING = slice(0, 0)

# The number of first steps in which all gradients are compared with their copies: a program that
# changes them unnoticed mostly does so from the start. Later they are compared in turn.
_STEPS_COMPARED = 3
# The number of elements that are compared then: scaling and clipping change them everywhere.
_SAMPLE = 2**12

# The number of tensors that view a storage. It is not public: where it is absent, all is copied.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
# The storage of a tensor, as the former takes it, without an object of Python.
_storage_of: Callable[[torch.Tensor], int] | None = getattr(torch._C, "_storage_address", None)
# The number of owners of a tensor, arrays of other libraries that view it by DLPack among them.
_owner_count: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda tensor: 0)

#: The copies of a gradient: slices of the flat gradient, and their flat copies.
Copies = list[tuple[slice, torch.Tensor]]

_layout, _identity = operator.attrgetter("layout"), operator.attrgetter("_cdata")
_version = operator.attrgetter("_version")
_gradient, _number = operator.attrgetter("grad"), operator.itemgetter(0)
_STRIDED = {torch.strided}


class Step:
    """Hold what becomes of the gradients of one step, by the parameter's number.

    Attributes:
        passes: the number of backward passes that have computed each gradient.
        is_open: whether the exchange has begun this step.
        is_converted: whether the parameters have another dtype or size than the exchange has.
        behind: gradients that hooks of others come to later.
        order: in which gradients have arrived, if it is recorded.
        tasks: the backward passes that have not ended; at their end what has arrived is sent.
        stale: the versions of those without hooks, if all were there before the backward pass.
        taken: the gradients that were copied, or are to be.
        versions: of those, as they were then, in the same order.
        samples: the first elements of those that have no complete copy.
        kinds: of those that are sparse, as in the metadata of buckets.
        zero_copied: the addresses of those of which a part is exchanged without a copy.
        gradients: all, at the end of the backward pass.
        averaged: those that have an average, once the exchange has ended.
        sparse_waits: functions that wait for the averages of sparse ones.
        sparse_errors: what these have raised.
    """

    def __init__(self, count: int) -> None:
        self.passes = [0] * count
        self.is_open = self.is_converted = False
        self.behind: list[int] = []
        self.order: list[int] = []
        self.tasks: set[int] = set()
        self.stale: dict[int, int] = {}
        self.taken: dict[int, torch.Tensor] = {}
        self.versions: list[int] = []
        self.samples: dict[int, torch.Tensor] = {}
        self.kinds: dict[int, int] = {}
        self.zero_copied: dict[int, int] = {}
        self.gradients: list[Any] = []
        self.averaged: list[int] | None = None
        self.sparse_waits: dict[int, Callable[[], torch.Tensor]] = {}
        self.sparse_errors: list[Exception] = []

    def take(self, gradients: Mapping[int, Any]) -> None:
        """Record gradients that have not been recorded in this step, and their versions."""
        self.taken.update(gradients)
        self.versions += map(_version, gradients.values())


class GradientBuffers:
    """The slots of gradients, and the arrays of their averages.

    Attributes:
        large: for each parameter, whether its gradient is copied alone, by `write_large`.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        memory: CudaMemory | None,
        sparse_as_dense: bool,
        names: Sequence[str],
    ) -> None:
        self._parameters = parameters
        self._memory = memory
        self._sparse_as_dense = sparse_as_dense
        self._names = names
        sizes = [
            parameter.numel() * (gradient_dtype(parameter) or parameter.dtype).itemsize
            for parameter in parameters
        ]
        # On a device the cache does not matter, and the number of kernels does.
        self.large = [memory is None and size >= _LARGE for size in sizes]
        self._allows_zero_copy = [size >= LEAST_ZERO_COPY for size in sizes]
        # The own memory of gradients that are averages now, until they are zeroed, when it would be
        # freed without an exchange, too: freed in another order, the heap would be trimmed, and
        # every step would fault it in again, page by page, which takes longer than a copy; and
        # memory that is free for a moment may go back from a virtual machine to its host.
        self._kept: list[torch.Tensor] = []
        # The address of the average that a gradient became last: its memory, which numpy made.
        self._average_at: dict[int, int] = {}
        # The gradients that were exchanged last without a copy, in memory that torch had made
        # and nobody else shares.
        self._zero_copy_of_torch: set[int] = set()
        self._is_lent = False  # the result arrays: small gradients are views of them

    def connect(self, exchange: GradientExchange) -> None:
        """Use the slots of an exchange, or of one whose buckets have changed."""
        self._exchange = exchange
        buckets = exchange.buckets
        numbers = range(len(self._parameters))
        self._slots = [self._tensor(buckets.slot(number)) for number in numbers]
        self._zero_copy_ranges = [
            buckets.zero_copy_range(number) if self._allows_zero_copy[number] else _NOTHING
            for number in numbers
        ]
        # The averages of buckets that have small gradients alone: their places stay the same.
        self._results: list[torch.Tensor | None] = [None for _ in numbers]
        self._small = [
            (bucket, members)
            for members, bucket in zip(buckets.plan, buckets.all, strict=True)
            if not any(self.large[number] for number in members)
        ]
        for bucket, _ in self._small:
            bucket.keeps_result = True
        self._lends = (
            self._memory is None
            and _use_count is not None
            and all(parameter.is_cpu for parameter in self._parameters)
        )
        self._find_results()

    def _find_results(self) -> None:
        """View the result arrays of the buckets that have small gradients alone."""
        for _, members in self._small:
            for number in members:
                self._results[number] = self._tensor(self._exchange.buckets.result_slot(number))
        self._is_lent = False
        if self._lends:
            self._views = [each for each in self._results if each is not None]
            self._storages = [*map(_identity, map(torch.Tensor.untyped_storage, self._views))]
            self._unused = self._describe_use()

    def _describe_use(self) -> list[int]:
        """Return how many view each, and where it lies: torch moves what other processes get."""
        assert _use_count is not None
        return [*map(_use_count, self._storages), *map(torch.Tensor.data_ptr, self._views)]

    def begin_step(self) -> None:
        """Release the old memory of gradients, and take the result arrays back."""
        self.release()
        if not self._is_lent:
            return
        if self._describe_use() == self._unused:
            self._is_lent = False
            for bucket, _ in self._small:
                self._exchange.buckets.lane.transport.reclaim(bucket.arrays.result)
            return
        # Gradients of the last step are kept, or added to. Their arrays are theirs, but whoever
        # keeps one gradient of each step would keep a bucket for each, so this is the last time.
        self._lends = False
        for bucket, _ in self._small:
            bucket.arrays.allocate_result()
        self._find_results()

    def release(self) -> None:
        """Release the old memory of gradients so that autograd can reuse it."""
        self._kept.clear()

    def find(self, numbers: Collection[int]) -> dict[int, Any]:
        """Return gradients that have been computed.

        Raises:
            RuntimeError: they have gone since.
        """
        parameters = map(self._parameters.__getitem__, numbers)
        found = dict(zip(numbers, map(_gradient, parameters), strict=True))
        if type(None) in {*map(type, found.values())}:
            missing = [number for number, each in found.items() if each is None]
            raise RuntimeError(self.describe_missing(missing))
        return found

    def copy(self, step: Step, gradients: Mapping[int, Any]) -> None:
        """Copy gradients into their slots, if they have any."""
        copied = [*gradients.values()]
        slots = [*map(self._slots.__getitem__, gradients)]
        if {*map(_layout, copied)} != _STRIDED or self._exchange.sparse_parameters:
            slots, copied = self._densify(step, gradients)
        if copied:
            with torch.no_grad():
                torch._foreach_copy_(slots, copied)

    def _densify(
        self, step: Step, gradients: Mapping[int, Any]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Set sparse gradients aside, or make them dense; return slots and what to copy there."""
        dense = {}
        for number, gradient in gradients.items():
            has_slot = number not in self._exchange.sparse_parameters
            if gradient.layout is torch.sparse_coo:
                has_slot = has_slot and self._sparse_as_dense
                step.kinds[number] = 2 * gradient.sparse_dim() + has_slot * IN_SLOT
            if has_slot:
                is_dense = gradient.layout is torch.strided
                dense[number] = gradient if is_dense else gradient.to_dense()
        return [self._slots[number] for number in dense], [*dense.values()]

    def describe_missing(self, numbers: Sequence[int]) -> str:
        """Return the message about gradients that have been computed and are not there."""
        names = ", ".join(repr(self._names[number]) for number in numbers)
        return (
            f"the gradient of {names} was computed, but has become None before it could "
            "be averaged, perhaps in another hook; set gradients to None after step() or "
            "synchronize() only"
        )

    def write_large(self, step: Step, number: int) -> None:
        """Write a large gradient into its bucket: all of it, or what other ranks read."""
        gradient: Any = self._parameters[number].grad
        self._zero_copy_of_torch.discard(number)
        if self._can_skip_copy(step, number, gradient):
            self._send_zero_copy(step, number, gradient)
        else:
            self.copy(step, {number: gradient})

    def copies(self, step: Step, number: int) -> Copies | None:
        """Return the copies of a gradient of this step, if it has a slot and no planted fault."""
        if not self._has_slot(step, number) or self._exchange.buckets.place(number)[0].corrupted:
            return None
        slot = self._slots[number].reshape(-1)
        if number not in step.zero_copied:
            return [(slice(None), slot)]
        return [(part, slot[part]) for part in self._read(number)]

    def hand_over(self, step: Step) -> None:
        """Let the parameters' gradients be their averages, once the exchange has ended.

        An average is sparse where any rank's gradient was: an optimizer rounds both forms
        differently, or takes only one. Gradients that averages cannot be written to are replaced,
        also in ``step.gradients``.
        """
        gradients, numbers = step.gradients, step.averaged or []
        found = [*map(gradients.__getitem__, numbers)]
        if type(None) in {*map(type, found)} or not {*map(_layout, found)} <= _STRIDED:
            for number in numbers:
                if gradients[number] is None or gradients[number].layout is not torch.strided:
                    self._replace(step, number)
        if any(self.large):
            replaced = {
                n for n in numbers if self.large[n] and self._can_replace_memory(n, gradients[n])
            }
            for number in sorted(replaced):
                average = self._average(number)
                self._average_at[number] = average.data_ptr()
                self._kept.append(gradients[number].detach())
                _replace_memory([gradients[number]], [average])
            numbers = [number for number in numbers if number not in replaced]
        if numbers:
            self._write_small(step, numbers)
        for number, axes in self._exchange.densified.items():
            parameter = self._parameters[number]
            parameter.grad = gradients[number] = gradients[number].to_sparse(axes)

    def _write_small(self, step: Step, numbers: Sequence[int]) -> None:
        """Let small gradients become views of the averages, or copy these if any is shared."""
        results = self._results  # a call for each takes longer
        gradients = [*map(step.gradients.__getitem__, numbers)]
        averages: list[Any] = [*map(results.__getitem__, numbers)]
        if self._lends and {*map(type, averages)} == {torch.Tensor}:
            # The backward pass has just made those of version 0.
            are_new = any(step.passes) and not any(step.versions)
            if _are_alone(gradients, are_new=are_new):
                self._is_lent = True
                for bucket, _ in self._small:
                    self._exchange.buckets.lane.release(bucket.arrays.result)
                _replace_memory(gradients, averages)
                return
        averages = [self._average(n) if results[n] is None else results[n] for n in numbers]
        with torch.no_grad():
            try:
                torch._foreach_copy_(gradients, averages)
            except RuntimeError:  # of one that repeats an element, or is a view as conjugates
                torch._foreach_copy_([self._replace(step, n) for n in numbers], averages)

    def _replace(self, step: Step, number: int) -> torch.Tensor:
        """Give a parameter a gradient of its own memory, without values, and return it."""
        parameter = self._parameters[number]
        parameter.grad = torch.empty_like(parameter, dtype=self._slots[number].dtype)
        step.gradients[number] = parameter.grad
        return parameter.grad

    def _average(self, number: int) -> torch.Tensor:
        result = self._results[number]
        return to_tensor(self._exchange.buckets.result_slot(number)) if result is None else result

    def _tensor(self, slot: Any) -> torch.Tensor:
        return to_tensor(slot) if self._memory is None else slot

    def _has_slot(self, step: Step, number: int) -> bool:
        is_aside = not step.kinds.get(number, IN_SLOT) & IN_SLOT
        return not is_aside and number not in self._exchange.sparse_parameters

    def _can_replace_memory(self, number: int, gradient: torch.Tensor) -> bool:
        """Return whether a gradient may be given other memory.

        Only if nobody else has its memory: if a user's flat buffer, an array or another process
        views it, the average must be written there.
        """
        if not self._is_plain(gradient) or _use_count is None:
            return False
        is_lent = gradient.data_ptr() == self._average_at.get(number)
        is_whole = gradient.untyped_storage().nbytes() == gradient.nbytes
        return is_whole and _are_alone([gradient], is_lent or number in self._zero_copy_of_torch)

    def _is_plain(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient's elements lie on the host, one after the other."""
        return (
            self._memory is None
            and gradient.is_cpu
            and gradient.layout is torch.strided
            and gradient.is_contiguous()
            and not gradient.requires_grad
        )

    def _can_skip_copy(self, step: Step, number: int, gradient: torch.Tensor) -> bool:
        """Return whether a part of a gradient needs no copy, as no other rank reads it."""
        return (
            self._zero_copy_ranges[number] != _NOTHING
            and self._has_slot(step, number)
            and self._is_plain(gradient)
            and gradient.dtype is self._slots[number].dtype
            # With those that share its memory it would share its version, which tells of changes.
            and gradient.untyped_storage().nbytes() == gradient.nbytes
        )

    def _send_zero_copy(self, step: Step, number: int, gradient: torch.Tensor) -> None:
        if _is_of_torch(gradient.untyped_storage()):
            self._zero_copy_of_torch.add(number)
        flat, slot = gradient.detach().view(-1), self._slots[number].view(-1)
        for part in self._read(number):
            slot[part].copy_(flat[part])
        zero_copy = self._zero_copy_ranges[number]
        self._exchange.buckets.set_zero_copy(number, zero_copy.start, to_array(flat[zero_copy]))
        step.zero_copied[number] = gradient.data_ptr()
        step.samples[number] = gradient.view(-1)[:_SAMPLE].clone()

    def _read(self, number: int) -> list[slice]:
        """Return the parts of a flat gradient that other ranks read."""
        zero_copy = self._zero_copy_ranges[number]
        return [slice(0, zero_copy.start), slice(zero_copy.stop, None)]


_tensor, _other = torch.empty(1), torch.empty(1)
# The number of views that torch counts of a storage that one tensor has. Once Python has an object
# of the storage, which lasts as long as that, it counts one more.
_ALONE = 0 if _use_count is None else _use_count(_tensor.untyped_storage()._cdata)
_ALONE_NEW = 0 if _use_count is None or _storage_of is None else _use_count(_storage_of(_other))
_OWNERS_OF_GRADIENT = 2  # its parameter and Python


def is_alone(tensor: torch.Tensor) -> bool:
    """Return whether nobody else has the memory of a tensor that is no gradient."""
    is_viewed = _use_count is None or _use_count(tensor.untyped_storage()._cdata) > _ALONE
    return not is_viewed and _owner_count(tensor) <= 1


def _are_alone(
    gradients: Sequence[torch.Tensor], are_ours: bool = False, are_new: bool = False
) -> bool:
    """Return whether nobody else has the memory of any gradient, fast.

    Args:
        are_ours: whether it is known to be torch's memory, or hvdlite's.
        are_new: whether the backward pass has just made them. Python has no objects of their
            storages then, unless somebody has looked, and gets none: hundreds of them would start
            the garbage collector.
    """
    assert _use_count is not None
    if are_new and _storage_of is not None:
        has_one_view = max(map(_use_count, map(_storage_of, gradients))) <= _ALONE_NEW
    else:
        storages = [*map(torch.Tensor.untyped_storage, gradients)]
        are_ours = are_ours or all(map(_is_of_torch, storages))
        has_one_view = max(map(_use_count, map(_identity, storages))) <= _ALONE and are_ours
    return (
        has_one_view
        and max(map(_owner_count, gradients)) <= _OWNERS_OF_GRADIENT
        and all(map(torch.Tensor.is_contiguous, gradients))
        and {*map(type, gradients)} == {torch.Tensor}
    )


def _is_of_torch(storage: torch.UntypedStorage) -> bool:
    """Return whether torch has allocated a storage, and for this process alone."""
    return storage.resizable() and not storage.is_shared()  # numpy's view ends the former


def _replace_memory(gradients: Sequence[torch.Tensor], averages: Sequence[torch.Tensor]) -> None:
    """Give gradients, which stay the same tensors, the memory of averages, without a copy."""
    for gradient, average in zip(gradients, averages, strict=True):
        gradient.data = average
    # torch does not see the exchange: views and saved tensors must be told of the change.
    torch.autograd.graph.increment_version(gradients)


class ChangeDetector:
    """Find gradients that are changed between their hook and the step."""

    def __init__(self, memory: CudaMemory | None) -> None:
        self._memory = memory
        self._comparisons: list[tuple[int, Callable[[], bool | None]]] = []
        self.steps = 0

    def restart(self) -> None:
        """Forget pending comparisons on a device."""
        self._comparisons.clear()

    @property
    def compares_all(self) -> bool:
        """Return whether this is one of the first steps, in which all gradients need a copy."""
        return self.steps < _STEPS_COMPARED

    def find(self, step: Step, copies: Callable[[Step, int], Copies | None]) -> list[int]:
        """Find the gradients of a step that have changed since they were taken.

        Args:
            step: with all gradients as they are now.
            copies: returns the copies of one, by number; None if there are none to compare with.

        Returns:
            Their numbers; those on a device in a later step, when the device has compared them.
        """
        changed = []
        taken, gradients = step.taken, step.gradients
        now = [*map(gradients.__getitem__, taken)]
        versions = [*map(_version, taken.values())]
        # All at once: nearly always they are the same, among hundreds.
        same = all(map(operator.is_, now, taken.values()))
        if not same or versions != step.versions:
            before = dict(zip(taken, step.versions, strict=True))
            changed = [
                number
                for number, gradient in sorted(taken.items(), key=_number)
                if (gradients[number] is not gradient or gradient._version != before[number])
                and self._differs(step, number, copies(step, number))
            ]
        # Changes through .data or numpy(), and GradScaler's, leave the version as it is.
        count = len(gradients)
        for number in range(count) if self.compares_all else {*step.samples, self.steps % count}:
            copied = copies(step, number) if number in taken else None
            if copied is not None and self._has_changed(step, number, copied):
                changed.append(number)
        return self._found_on_device() + changed if self._comparisons else changed

    def _differs(self, step: Step, number: int, copied: Copies | None) -> bool:
        """Return whether a gradient of another version is another gradient.

        Gradients that are views of one tensor, as a function of the user's own may return them,
        share their version: if one is accumulated in place, the others seem to be.
        """
        if self._memory is not None or copied is None or number in step.samples:
            return True
        replaced = step.gradients[number] is not step.taken[number]
        return replaced or self._has_changed(step, number, copied, whole=True)

    def _has_changed(self, step: Step, number: int, copied: Copies, whole: bool = False) -> bool:
        gradient, sample = step.taken[number], step.samples.get(number)
        if number in step.zero_copied and step.zero_copied[number] != gradient.data_ptr():
            return True  # torch has moved it, for another process, and freed what is exchanged
        dense = (gradient if gradient.layout is torch.strided else gradient.to_dense()).detach()
        flat = dense.reshape(-1)
        pairs = [] if sample is None else [(sample, flat[:_SAMPLE])]
        if whole or self.compares_all or sample is None:
            limit = None if whole or self.compares_all else _SAMPLE
            for where, copy in copied:
                pairs.append((copy[:limit], flat[where][:limit]))
        for before, now in pairs:
            if self._memory is not None:  # found out later: the host does not wait for the device
                self._comparisons.append((number, self._memory.compare(before, now)))
            elif not _equal(before, now.cpu()):
                return True
        return False

    def _found_on_device(self) -> list[int]:
        """Return those that were changed unseen, as far as a device has found out."""
        results = [(number, equal(), equal) for number, equal in self._comparisons]
        self._comparisons = [(number, equal) for number, known, equal in results if known is None]
        return [number for number, known, _ in results if known is False]


def _equal(before: torch.Tensor, now: torch.Tensor) -> bool:
    if before.dtype is now.dtype and torch.equal(before, now):  # nearly always
        return True
    return bool(((before == now) | ((before != before) & (now != now))).all())  # NaN equals NaN
