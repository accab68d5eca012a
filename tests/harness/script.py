"""Run scripts under mpirun, as users do, from their start to their exit code."""

from __future__ import annotations

import subprocess
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.harness import mpirun


def run_script(
    script: str | Path,
    np: int,
    args: Sequence[str | Path] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 240.0,
) -> subprocess.CompletedProcess[str]:
    """Run a script on `np` ranks, wait for it, and end what it has left.

    Args:
        script: The path of a script, or (a string with a line break) its source, which may be
            indented.
        env: Environment variables on top of the harness's.

    Raises:
        TimeoutError: The job did not end in time; it was ended, and its output is shown.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        if isinstance(script, str) and "\n" in script:
            script, source = Path(folder, "script.py"), script
            script.write_text(textwrap.dedent(source))
        command = mpirun.command(np, script, *args)
        environment = mpirun.environment({**mpirun.own_memory(), **(env or {})})
        return mpirun.captured(command, environment, timeout, mpirun.end)
