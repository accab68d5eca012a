"""Messages between the parent and the ranks; a rank's first one is its rank and process."""

from __future__ import annotations

from dataclasses import dataclass

SECONDS_TO_LEAVE = 3
"""How long a rank may take to end after the parent has hung up."""


@dataclass(frozen=True)
class Request:
    """A test for the ranks to run; None in its place tells a rank to leave."""

    module: str
    qualname: str
    arguments: bytes
    """The pickled keyword arguments."""
    local_fixtures: tuple[str, ...]
    """Arguments that each rank makes for itself."""
    settings: dict[str, str]
    """Environment variables of this test, which gets a world of its own if there are any."""
    filters: tuple[str, ...]
    """Warning filters in pytest's notation, the last one strongest."""
    path: tuple[str, ...]
    """The parent's import path."""


@dataclass
class Report:
    """The outcome of a test on one rank."""

    rank: int
    outcome: str
    """passed, skipped, failed; without a report: died, ended (by mpirun, after a death), silent."""
    text: str = ""
    """The reason of a skip, a traceback, what mpirun said of a death, or the rank's stacks."""
    output: str = ""
    """The rank's stdout and stderr during the test."""
