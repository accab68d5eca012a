"""Ranks as threads of the test's own process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

SECONDS = 20.0


def on_all_ranks(function: Callable[[Any], Any], arguments: Sequence[Any]) -> list[Any]:
    """Call a function in one thread for each argument; return the results, or raise an error.

    Raises:
        TimeoutError: a call has not ended, and neither has any failed.
    """
    results: list[Any] = [None] * len(arguments)
    errors: list[BaseException] = []

    def call(rank: int) -> None:
        try:
            results[rank] = function(arguments[rank])
        except BaseException as error:
            errors.append(error)

    # Daemons, so that one which hangs does not keep the tests from ending.
    threads = [
        threading.Thread(target=call, args=(rank,), name=f"rank {rank}", daemon=True)
        for rank in range(len(arguments))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    if errors:
        raise errors[0]
    hanging = [thread.name for thread in threads if thread.is_alive()]
    if hanging:
        raise TimeoutError(f"{hanging} still run after {SECONDS} s")
    return results
