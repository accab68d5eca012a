"""How gradients get into their buckets, and averages back, with as few copies as can be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hvdlite.gradients import LEAST_LENT, GradientExchange
from hvdlite.torch.changes import Copies
from hvdlite.torch.tensors import to_array, to_tensor

if TYPE_CHECKING:
    from hvdlite.torch.device_memory import CudaMemory

# Bytes from which on a gradient is copied as soon as it is there, still in the cache, and becomes
# its average without a copy. The smaller ones are copied together, each way: that takes a third of
# the time of one by one.
_LARGE = 2**16
# Bytes from which on a gradient that is copied gives its own memory up at once, for that of its
# copy: the C library returns so large pieces to the system anyhow. That of others is kept until the
# gradients are zeroed, when it would be freed without an exchange, too: freed in another order, the
# heap would be cut back, and every step would fetch it anew, page by page, which takes longer than
# a copy; and memory that is free for a second may go back from a virtual machine to its host.
_HUGE = 2**25

_NOTHING = slice(0, 0)

# Tells how many tensors view a storage. It is not public: where it is absent, all is copied.
_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class Slots:
    """The places of gradients and of their averages.

    Args:
        parameters: whose gradients they are.
        memory: of the device on which all lie; None: the host's.
        is_apart: whether a gradient is exchanged as a sparse one, beside the buckets.
        name: of a parameter, by its number.

    Attributes:
        large: of each parameter, whether its gradient is brought by `bring_large`, alone.
        sparse: the gradients of this step that are exchanged as sparse ones, by number.
        densified: of parameters whose gradients were sparse at last and are exchanged as dense
            ones, by number, how many of the axes are sparse.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        memory: CudaMemory | None,
        is_apart: Callable[[torch.Tensor], bool],
        name: Callable[[int], str],
    ) -> None:
        self._parameters = parameters
        self._memory = memory
        self._is_apart = is_apart
        self._name = name
        sizes = [parameter.numel() * parameter.element_size() for parameter in parameters]
        # On a device the cache is no matter, and the number of kernels is.
        self.large = [memory is None and size >= _LARGE for size in sizes]
        self._lendable, self._huge = (
            [size >= limit for size in sizes] for limit in (LEAST_LENT, _HUGE)
        )
        self.densified: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []  # the own memory of gradients that are averages now
        # Where the average lies that a gradient became last: its memory, which numpy made.
        self._average_at: dict[int, int] = {}
        # What was lent last in memory that torch had made, and nobody else shares.
        self._lent_of_torch: set[int] = set()

    def find(self, exchange: GradientExchange) -> None:
        """Find the places in an exchange, or in one whose buckets have changed."""
        self._exchange = exchange
        numbers = range(len(self._parameters))
        self._slots = [self._tensor(exchange.buckets.slot(number)) for number in numbers]
        self._unread = [
            exchange.buckets.unread(number) if self._lendable[number] else _NOTHING
            for number in numbers
        ]
        # Averages of buckets from which all are copied: their places stay the same.
        self._results: list[torch.Tensor | None] = [None for _ in numbers]
        for index, members in enumerate(exchange.buckets.plan):
            if not any(self.large[number] for number in members):
                exchange.buckets[index].keeps_result = True
                for number in members:
                    self._results[number] = self._tensor(exchange.buckets.result_slot(number))

    def begin(self) -> None:
        """Begin the next step."""
        self.sparse: dict[int, torch.Tensor] = {}
        self._lent: set[int] = set()
        self._swapped: set[int] = set()

    def release(self) -> None:
        """Let go of what gradients were computed in: the next ones may be."""
        self._kept.clear()

    def copy(self, numbers: Sequence[int]) -> list[Any]:
        """Copy gradients into their buckets, if they have a place there; return all of them.

        Raises:
            RuntimeError: one that has been computed is not there.
        """
        gradients: list[Any] = [self._parameters[number].grad for number in numbers]
        copied = dict(zip(numbers, gradients, strict=True))
        try:
            plain = all(gradient.layout is torch.strided for gradient in gradients)
        except AttributeError:  # of None
            gone = [n for n, gradient in copied.items() if gradient is None]
            raise RuntimeError(self.gone(gone)) from None
        if not plain or self._exchange.sparse_parameters:
            sparse = {n: each for n, each in copied.items() if self._is_apart(each)}
            self.sparse.update(sparse)
            for n, each in copied.items():
                if each.layout is torch.sparse_coo and self._has_place(n):
                    self.densified[n] = each.sparse_dim()
            copied = {
                n: each if each.layout is torch.strided else each.to_dense()
                for n, each in copied.items()
                if self._has_place(n)
            }
        if copied:
            with torch.no_grad():
                torch._foreach_copy_([self._slots[n] for n in copied], [*copied.values()])
        return gradients

    def gone(self, numbers: Sequence[int]) -> str:
        """What to say of gradients that have been computed and are not there."""
        names = ", ".join(repr(self._name(number)) for number in numbers)
        return (
            f"the gradient of {names} was computed, but has become None before it could "
            "be averaged, perhaps in another hook; set gradients to None after step() or "
            "synchronize() only"
        )

    def bring_large(self, number: int, gives_up: bool) -> bool:
        """Bring a large gradient into its bucket: all of it, or what other ranks read.

        Args:
            number: the parameter's.
            gives_up: whether it may have no copy at all, having become its own.

        Returns:
            Whether there is no copy of it, or not of all.
        """
        gradient = self._parameters[number].grad
        self._lent_of_torch.discard(number)
        if self._may_lend(number, gradient):
            self._lend(number, gradient)
            return True
        (gradient,) = self.copy([number])
        swaps = gives_up and self._huge[number] and self._has_place(number)
        if not (swaps and self._may_swap(number, gradient)):
            return False
        # What it has been computed in is free for the gradients to come: fewer pages of memory are
        # touched, and less is needed at a time.
        gradient.data = self._slots[number]
        self._swapped.add(number)
        return True

    def copies(self, number: int) -> Copies | None:
        """What was copied of a gradient of this step, if it has a place in a bucket."""
        if not self._has_place(number):
            return None
        if number in self._swapped:
            return []
        slot = self._slots[number].reshape(-1)
        parts = self._read(number) if number in self._lent else [slice(None)]
        return [(part, slot[part]) for part in parts]

    def hand_over(self, gradients: Sequence[Any], numbers: Sequence[int]) -> None:
        """Let the parameters' gradients be their averages, once those are there.

        Args:
            gradients: dense tensors, by number.
            numbers: of those that have an average.
        """
        if any(self.large):
            swapped = {n for n in numbers if self.large[n] and self._may_swap(n, gradients[n])}
            for number in sorted(swapped):
                average = self._average(number)
                self._average_at[number] = average.data_ptr()
                self._kept.append(gradients[number].detach())
                _become(gradients[number], average)
            numbers = [number for number in numbers if number not in swapped]
        if numbers:
            averages = [self._average(number) for number in numbers]
            with torch.no_grad():
                torch._foreach_copy_([gradients[number] for number in numbers], averages)
            # The memory of a slot that others view is theirs now, with the average in it.
            self._renew(n for n in numbers if self._huge[n] and self._is_slot(n, gradients[n]))

    def _renew(self, numbers: Iterable[int]) -> None:
        """Let later gradients of some parameters have other slots."""
        for index in {self._exchange.buckets.index_of(number) for number in numbers}:
            self._exchange.buckets.renew_slots(index)
            for number in self._exchange.buckets.plan[index]:
                self._slots[number] = self._tensor(self._exchange.buckets.slot(number))

    def _average(self, number: int) -> torch.Tensor:
        result = self._results[number]
        return to_tensor(self._exchange.buckets.result_slot(number)) if result is None else result

    def _tensor(self, slot: Any) -> torch.Tensor:
        return to_tensor(slot) if self._memory is None else slot

    def _has_place(self, number: int) -> bool:
        """Whether the gradient of this step goes into a bucket."""
        return number not in self.sparse and number not in self._exchange.sparse_parameters

    def _may_swap(self, number: int, gradient: torch.Tensor) -> bool:
        """Return whether the memory of a gradient may be exchanged for other memory.

        Only if nobody else has it: what a user's flat buffer, an array or another process views has
        to become the average, too.
        """
        if not self._is_plain(gradient) or _use_count is None:
            return False
        storage = gradient.untyped_storage()
        is_slot = self._is_slot(number, gradient)  # which `_slots` views, too
        if _use_count(storage._cdata) - is_slot > _ALONE or storage.nbytes() != gradient.nbytes:
            return False
        is_ours = (
            is_slot
            or number in self._lent_of_torch
            or gradient.data_ptr() == self._average_at.get(number)
        )
        # What is not resizable was made by somebody else, numpy for example.
        return is_ours or (storage.resizable() and not storage.is_shared())

    def _is_slot(self, number: int, gradient: torch.Tensor) -> bool:
        """Return whether a gradient lies in its slot, having given up its own memory."""
        return gradient.data_ptr() == self._slots[number].data_ptr()

    def _is_plain(self, gradient: torch.Tensor) -> bool:
        """Return whether a gradient's elements lie on the host, one after the other."""
        return (
            self._memory is None
            and gradient.is_cpu
            and gradient.layout is torch.strided
            and gradient.is_contiguous()
            and not gradient.requires_grad
        )

    def _may_lend(self, number: int, gradient: torch.Tensor) -> bool:
        """Whether a part of a gradient needs no copy, as no other rank reads it."""
        return (
            self._unread[number] != _NOTHING
            and self._has_place(number)
            and self._is_plain(gradient)
            and gradient.dtype is self._slots[number].dtype
            # With those that share its memory it would share its version, which tells of changes.
            and gradient.untyped_storage().nbytes() == gradient.nbytes
        )

    def _lend(self, number: int, gradient: torch.Tensor) -> None:
        storage = gradient.untyped_storage()
        if storage.resizable() and not storage.is_shared():  # numpy's view ends the former
            self._lent_of_torch.add(number)
        flat, slot = gradient.detach().view(-1), self._slots[number].view(-1)
        for part in self._read(number):
            slot[part].copy_(flat[part])
        unread = self._unread[number]
        self._exchange.buckets.lend(number, unread.start, to_array(flat[unread]))
        self._lent.add(number)

    def _read(self, number: int) -> list[slice]:
        """What other ranks read of a flat gradient."""
        unread = self._unread[number]
        return [slice(0, unread.start), slice(unread.stop, None)]


def _views_of_one_tensor() -> int:
    """Return how many views torch counts of a storage that one tensor has."""
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return 0 if _use_count is None else _use_count(storage._cdata)


_ALONE = _views_of_one_tensor()


def _become(gradient: torch.Tensor, average: torch.Tensor) -> None:
    """Let a gradient be an average, without a copy.

    The memory belongs to whoever views it, until nobody does. The gradient stays the same
    tensor, for those who have got hold of it.
    """
    gradient.data = average
    # torch does not see the exchange: views and saved tensors must know of it.
    torch.autograd.graph.increment_version(gradient)
