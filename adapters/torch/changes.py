"""Finds gradients that were changed between their hook and the step."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from hvdlite.torch.device_memory import CudaMemory

#: What has been copied of a gradient: which of its flat elements, and the flat copies.
Copies = list[tuple[slice, torch.Tensor]]

# The first steps in which all gradients are compared with their copies: a program that changes
# them unseen mostly does so from the beginning. Later that would cost time, and they take turns.
_STEPS_COMPARED = 3
# Elements that are compared then: what is scaled or clipped changes everywhere.
_SAMPLE = 2**12


class Changes:
    """What gradients were when they were taken, and which of them are something else now.

    Args:
        memory: of the device on which they lie; None: the host's.

    Attributes:
        steps: those that have ended.
    """

    def __init__(self, memory: CudaMemory | None) -> None:
        self._memory = memory
        self._comparisons: list[tuple[int, Callable[[], bool | None]]] = []
        self.steps = 0
        self.begin()

    def begin(self) -> None:
        """Begin the next step."""
        # The tensors and their versions, by number.
        self._taken: dict[int, torch.Tensor] = {}
        self._versions: dict[int, int] = {}
        # Of gradients that have not been copied, or not all of them: what some elements were.
        self._samples: dict[int, torch.Tensor] = {}

    def forget(self) -> None:
        """Begin anew after a step that was given up, also with what a device has yet to tell."""
        self._comparisons.clear()
        self.begin()

    @property
    def compares_all(self) -> bool:
        """Whether this is one of the first steps, in which all gradients need a copy."""
        return self.steps < _STEPS_COMPARED

    def __contains__(self, number: int) -> bool:
        """Whether a gradient has been taken in this step."""
        return number in self._taken

    def take(self, numbers: Sequence[int], gradients: Sequence[Any]) -> None:
        """Take note of what the gradients, which begin with those of the numbers, are now."""
        self._taken.update(zip(numbers, gradients, strict=False))
        versions = [gradient._version for gradient in gradients]
        self._versions.update(zip(numbers, versions, strict=False))

    def sample(self, number: int, gradient: torch.Tensor) -> None:
        """Take note of some elements of a gradient of which there is no copy, or not of all."""
        self._samples[number] = gradient.view(-1)[:_SAMPLE].clone()

    def find(self, gradients: Sequence[Any], copies: Callable[[int], Copies | None]) -> list[int]:
        """Find those that have changed.

        Args:
            gradients: of all parameters, as they are now.
            copies: gives what was copied of one, by number; None: it is not exchanged so.

        Returns:
            Their numbers; those on a device when it has told, in a later step.
        """
        changed = [n for n in self._others(gradients) if self._differs(n, gradients[n], copies(n))]
        # Changes through .data or numpy(), and GradScaler's, leave the version as it is.
        for number in self._suspects(len(gradients)):
            copied = copies(number) if number in self._taken else None
            if copied is not None and self._has_changed(number, copied):
                changed.append(number)
        return self._found_on_device() + changed

    def _others(self, gradients: Sequence[Any]) -> list[int]:
        """Those that are another tensor, or of another version, than when they were taken."""
        now = [gradients[number] for number in self._taken]
        versions = [gradient._version for gradient in self._taken.values()]
        # All at once: nearly always there are none, among hundreds.
        same = all(map(operator.is_, now, self._taken.values()))
        if same and versions == [*self._versions.values()]:
            return []
        return sorted(
            number
            for number, taken in self._taken.items()
            if gradients[number] is not taken or taken._version != self._versions[number]
        )

    def _differs(self, number: int, gradient: Any, copied: Copies | None) -> bool:
        """Whether a gradient of another version is another gradient.

        Gradients that are views of one tensor, as a function of the user's own may return them,
        share their version: where one is accumulated in place, so it seems are the others.
        """
        if self._memory is not None or copied is None or number in self._samples:
            return True
        replaced = gradient is not self._taken[number]
        return replaced or self._has_changed(number, copied, whole=True)

    def _suspects(self, count: int) -> Iterable[int]:
        """Those whose values are compared in this step."""
        return range(count) if self.compares_all else {*self._samples, self.steps % count}

    def _has_changed(self, number: int, copied: Copies, whole: bool = False) -> bool:
        gradient, sample = self._taken[number], self._samples.get(number)
        dense = (gradient if gradient.layout is torch.strided else gradient.to_dense()).detach()
        flat = dense.reshape(-1)
        pairs = [] if sample is None else [(sample, flat[:_SAMPLE])]
        if self.compares_all or whole:
            pairs += [(copy, flat[where]) for where, copy in copied]
        elif sample is None:
            pairs = [(copy[:_SAMPLE], flat[where][:_SAMPLE]) for where, copy in copied]
        if self._memory is not None:  # found out later: the host does not wait for the device
            compare = self._memory.compare
            self._comparisons += [(number, compare(before, now)) for before, now in pairs]
            return False
        return not all(_equal(before, now.cpu()) for before, now in pairs)

    def _found_on_device(self) -> list[int]:
        """Those that were changed unseen, as far as a device has found out."""
        results = [(number, equal(), equal) for number, equal in self._comparisons]
        self._comparisons = [(number, equal) for number, known, equal in results if known is None]
        return [number for number, known, _ in results if known is False]


def _equal(before: torch.Tensor, now: torch.Tensor) -> bool:
    return bool(((before == now) | ((before != before) & (now != now))).all())
