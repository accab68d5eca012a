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
    """Run a script on `np` ranks and wait for it.

    Args:
        script: The path of a script, or (a string with a line break) its source, which may be
            indented.
        np: The number of ranks.
        args: The script's arguments.
        env: Environment variables on top of the harness's.
        timeout: Seconds.

    Raises:
        TimeoutError: The job did not end in time; it was ended, and its output is shown.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        if isinstance(script, str) and "\n" in script:
            script, source = Path(folder, "script.py"), script
            script.write_text(textwrap.dedent(source))
        command = mpirun.command(np, script, *args)
        # Files, because a pipe would stay open as long as anything that the job left behind.
        with open(Path(folder, "out"), "w+") as out, open(Path(folder, "err"), "w+") as err:
            process = subprocess.Popen(
                command,
                env=mpirun.environment(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            in_time = _wait(process, timeout)
            stdout, stderr = Path(out.name).read_text(), Path(err.name).read_text()
    if not in_time:
        raise TimeoutError(f"{command} ran longer than {timeout} s\n{stdout}\n{stderr}")
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def _wait(process: subprocess.Popen[bytes], timeout: float) -> bool:
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return False
    finally:
        mpirun.end(process)
    return True
