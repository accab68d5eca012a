"""Train with virtual ranks on 1 to 8 processes: the weights are the same bits.

python -m tests.campaigns.virtual_ranks
python -m tests.campaigns.virtual_ranks --framework tensorflow --compression topk --steps 20
"""

from __future__ import annotations

import argparse
import re
import sys

from tests.harness import mpirun
from tests.launch import launcher

_SCRIPTS = {
    "torch": "tests/elastic/virtual_torch.py",
    "tensorflow": "tests/elastic/virtual_tensorflow.py",
}
_COMPRESSIONS = ("none", "topk", "powersgd")
_PROCESSES = (1, 2, 3, 4, 8)
_SECONDS = 300


def train(framework: str, compression: str, processes: int, steps: int) -> str:
    """Return the SHA-256 of the weights, the same on all ranks.

    Raises:
        AssertionError: The job failed, or its ranks differ.
    """
    job = launcher.hvdliterun(
        *("-np", processes, sys.executable, _SCRIPTS[framework], steps, compression),
        env=mpirun.environment(),
        timeout=_SECONDS,
    )
    assert job.returncode == 0, f"exit code {job.returncode}\n{job.stdout}{job.stderr}"
    found = re.findall(rf"^left \d+: {steps} (\w{{64}})$", job.stdout, re.MULTILINE)
    assert len(found) == processes, job.stdout
    assert len(set(found)) == 1, job.stdout
    return str(found[0])


def main() -> None:
    """Run the campaign and print a line for each job."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--framework", choices=_SCRIPTS, action="append")
    parser.add_argument("--compression", choices=_COMPRESSIONS, action="append")
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    differ = False
    for framework in options.framework or _SCRIPTS:
        for compression in options.compression or _COMPRESSIONS:
            found = {}
            for processes in _PROCESSES:
                found[processes] = train(framework, compression, processes, options.steps)
                print(f"{framework}, {compression}, {processes}: {found[processes]}", flush=True)
            differ = differ or len(set(found.values())) > 1
    print("some differ" if differ else "the same on any number of processes")
    raise SystemExit(int(differ))


if __name__ == "__main__":
    main()
