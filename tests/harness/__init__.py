"""Tests on several ranks from one plain ``pytest``.

A test marked with `ranks` runs once per number of ranks, in a job that the harness starts with
mpirun and keeps for the tests that follow. Fixtures are evaluated outside the job, and their
values, like those of ``parametrize``, are pickled for the ranks; ``monkeypatch`` is made afresh
on every rank. The argument ``size``, if the test has it, is the number of ranks.

    @ranks(1, 2, 3, 4)
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_sum(dtype):
        hvd.init()
        ...

What the ranks write is shown with a failure; ``capsys`` cannot see it, so a test that checks it
uses ``contextlib.redirect_stdout``. Tests of whole scripts use `run_script`.

``pytest`` runs all tests, and ``pytest -n 2 --dist loadgroup`` runs them in two processes.
``pytest --fast`` runs each test on one number of ranks and leaves out what is marked
``@pytest.mark.slow``. ``pytest --ranks 2`` runs the tests on two ranks and no others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tests.harness.script import run_script

__all__ = ["ranks", "run_script"]

# Seconds that only a hang takes, also on a slow machine that does other work, too.
DEFAULT_TIMEOUT = 240.0


def ranks(
    *sizes: int,
    fresh: bool = False,
    timeout: float = DEFAULT_TIMEOUT,
    env: Mapping[str, str] | None = None,
    settings: Mapping[str, str] | None = None,
    fast: Sequence[int] = (),
) -> pytest.MarkDecorator:
    """Run a test on every rank of a job, once for each number of ranks.

    Args:
        *sizes: The numbers of ranks.
        fresh: Start a job for this test alone and let it end as a script does, through atexit.
        timeout: Seconds after which the ranks' stacks are reported and the job is ended.
        env: Environment variables of the job, which tests with the same ones share.
        settings: Environment variables that ``hvd.init()`` reads in this test, which needs no job
            of its own for them.
        fast: The numbers of ranks under ``pytest --fast``; by default 2, or else the smallest.

    Raises:
        ValueError: No number of ranks is given, one is below 1, or fast has a number that is not
            among the sizes.
    """
    if not sizes or min(sizes) < 1:
        raise ValueError(f"ranks{sizes}: give numbers of ranks of at least 1, as in @ranks(1, 2)")
    if not set(fast) <= set(sizes):
        raise ValueError(f"ranks{sizes}: fast={fast} may have only these numbers of ranks")
    return pytest.mark.ranks(
        *sizes,
        fresh=fresh,
        timeout=timeout,
        env=dict(env or {}),
        settings=dict(settings or {}),
        fast=tuple(fast),
    )
