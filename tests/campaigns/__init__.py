"""Campaigns: many runs with random failures, whose results must be those of undisturbed runs."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping

from tests.harness import mpirun
from tests.launch import launcher


def succeed(
    *words: object, env: Mapping[str, str] | None = None, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a job of ``hvdliterun``; an AssertionError has its output if it fails."""
    job = launcher.hvdliterun(*words, env=mpirun.environment(env), timeout=timeout)
    assert job.returncode == 0, f"exit code {job.returncode}\n{job.stdout}{job.stderr}"
    return job


def make_parser(text: str | None, seed: int = 0) -> argparse.ArgumentParser:
    """Return a parser of the options that campaigns of jobs have."""
    parser = argparse.ArgumentParser(description=(text or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=seed)
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add the option that sets variables, and may be repeated."""
    about = {"metavar": "NAME=VALUE", "help": "of an environment variable"}
    split = lambda text: tuple(text.split("=", 1))  # noqa: E731
    parser.add_argument("--set", action="append", default=[], type=split, **about)
