"""Parts: how each global batch is divided, and which parts this process computes.

Here each rank computes one part. `hvdlite.virtual.ranks` derives a division into a fixed number of
parts, whatever the number of processes; `enter` makes it the current one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.world import world


class Parts:
    """One part for each rank.

    Attributes:
        are_fixed: Whether the number of parts does not depend on the number of processes.
        step: The number of steps taken, if it is counted.
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
        """The parts that this process computes in a step."""
        return [self.rank]

    @property
    def place(self) -> tuple[int, int] | None:
        """The step and the part computed next, if each seeds its own random numbers."""
        return None

    def ask(self) -> int:
        """Return `rank` to a program that loads its data itself."""
        return self.rank

    def is_within_step(self) -> bool:
        """Return whether some, but not all, parts of a step have been computed."""
        return False

    def check(self, processes: int) -> None:
        """Require that this number of processes can share the parts evenly enough."""

    def check_taken(self, step: int) -> None:
        """Require that this number of steps can have been taken."""

    def refuse(self, what: str, remedy: str) -> None:
        """Raise a ``ValueError`` unless there is one part for each rank."""

    def keep(self) -> int | None:
        """Keep `step` for the next `divide`; return the number of fixed parts."""
        return None

    def batches(self) -> Any:
        """Return the subclass of `recipe.batches.Batches` for these parts; None: `Batches`."""

    def gradient_path(self, owner: str) -> Any:
        """Return the class that makes steps on these parts; None: the ordinary one."""


current = Parts()
#: Returns the parts for a fixed number of them, or for 0, one for each rank; `hvdlite.assembly`
#: replaces it.
divide: Callable[[int], Parts] = lambda size: Parts()  # noqa: E731


def enter(parts: Parts) -> None:
    """Make these the current parts."""
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
