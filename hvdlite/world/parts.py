"""The parts of every global batch, and which of them this process computes.

Each rank computes one part, its own. A room beside the core that divides global batches otherwise
(`hvdlite.virtual.ranks`) derives from `Parts`, and `enter` puts its parts in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.world import world


class Parts:
    """One part for each rank.

    Attributes:
        are_fixed: Whether there are as many for any number of processes.
        step: The number of steps that have been taken, where they count.
    """

    are_fixed = False
    step = 0

    @property
    def rank(self) -> int:
        """The number of the part that this process computes next."""
        return world.rank()

    @property
    def size(self) -> int:
        """The number of parts of a global batch."""
        return world.size()

    @property
    def share(self) -> Sequence[int]:
        """The parts of this process in a step."""
        return [self.rank]

    @property
    def place(self) -> tuple[int, int] | None:
        """The step and the part that is computed next, if random numbers begin anew with it."""
        return None

    def ask(self) -> int:
        """Return `rank` to a program that loads its data itself."""
        return self.rank

    def is_within_step(self) -> bool:
        """Return whether parts have been computed of a step that has not been taken yet."""
        return False

    def check(self, processes: int) -> None:
        """Require that so many processes can divide the parts among themselves."""

    def check_taken(self, step: int) -> None:
        """Require that a number of steps can have been taken."""

    def refuse(self, what: str, remedy: str) -> None:
        """Refuse what needs one part for each rank by a ``ValueError``, if there are others.

        Args:
            what: What is refused.
            remedy: What to do instead.
        """

    def keep(self) -> int | None:
        """Keep `step` for the next `divide`; return the number of fixed parts."""
        return None

    def batches(self) -> Any:
        """Return the kind of `hvdlite.recipe.Batches` for these parts; None: that one itself."""

    def gradient_path(self, owner: str) -> Any:
        """Return the class that makes steps on these parts; None: the ordinary one.

        Args:
            owner: As of `hvdlite.gradients.options.gradient_path`.
        """


current = Parts()
#: Returns the parts for a number of fixed ones, 0: one for each rank. The facade fills it.
divide: Callable[[int], Parts] = lambda size: Parts()  # noqa: E731


def enter(parts: Parts) -> None:
    """Divide global batches into these parts from now on."""
    global current
    current = parts


def virtual_rank() -> int:
    """Return the virtual rank whose part of the step is computed next; without any: `rank`.

    Raises:
        NotInitializedError: Before ``init()``.
    """
    return current.ask()


def virtual_size() -> int:
    """Return the number of virtual ranks; without any: `size`.

    Unlike `size` it does not depend on the number of processes, so learning rates are scaled by it.

    Raises:
        NotInitializedError: Before ``init()``.
    """
    return current.size
