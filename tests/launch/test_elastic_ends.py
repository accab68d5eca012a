"""hvdliterun --elastic: how a job ends whose ranks fail, one after the other."""

import json
import re
import sys

from tests.launch.launcher import hvdliterun


def test_the_last_rank_that_dies_decides_the_exit_code():
    # The second death comes after the first, the third after the second.
    code = """
import os
import numpy as np, hvdlite as hvd
hvd.init()
start = hvd.rank()
start == 0 and os.kill(os.getpid(), 9)
while hvd.allreduce(1.0, op=hvd.Sum) == 3: pass
if start == 1: raise KeyError("mine")
while hvd.allreduce(1.0, op=hvd.Sum) == 2: pass
os._exit(3)
"""
    job = hvdliterun("--elastic", "-np", 3, sys.executable, "-c", code)
    assert job.returncode == 3, job.stderr
    assert "hvdlite: rank 0 of 2 (rank 1 at the start) leaves the job:\nTraceback" in job.stderr
    told = [line for line in job.stderr.splitlines() if line.startswith("hvdliterun: ")]
    assert [re.sub(" on host [^ ]+", "", line) for line in told] == [
        "hvdliterun: rank 0 was killed by signal 9 (SIGKILL); the other ranks go on",
        "hvdliterun: rank 1 exited with code 1; the other ranks go on",
        "hvdliterun: rank 2 exited with code 3",
        "hvdliterun: no rank is left",
    ]
    told = re.findall(r"^rank (\d died; .*) in the same step, after \d\.\d{3} s$", job.stderr, re.M)
    assert told == ["0 died; the other 2 go on", "1 died; the other one goes on"]


def test_a_failure_after_the_end_of_hvdlite_is_that_of_the_job():
    code = """
import os
import numpy as np, hvdlite as hvd
hvd.init()
hvd.shutdown()
hvd.init()
hvd.rank() == 2 and os._exit(4)
while hvd.allreduce(1.0, op=hvd.Sum) == 3: pass
rank = hvd.rank()
hvd.shutdown()
if rank == 0: raise OSError("the model cannot be saved")
"""
    job = hvdliterun("--elastic", "-np", 3, sys.executable, "-c", code)
    assert job.returncode == 1, job.stderr
    lines = [line for line in job.stderr.splitlines() if line.startswith("hvdliterun: ")]
    assert len(lines) == 2
    assert lines[0].endswith("exited with code 4; the other ranks go on")
    assert re.fullmatch(r"hvdliterun: rank 0 on host \S+ exited with code 1", lines[1])


def test_a_rank_of_an_elastic_job_starts_other_jobs(tmp_path):
    code = """
import os, subprocess, sys
import hvdlite as hvd
hvd.init()
hvd.allreduce(1.0, name="outer")
code = "import hvdlite as hvd; hvd.init(); hvd.barrier(); print(hvd.rank(), hvd.size())"
script = [sys.executable, "-c", code]
if hvd.rank() == 0:
    subprocess.run([sys.executable, "-m", "hvdlite.launch", "-np", "2", *script], check=True)
    subprocess.run(script, env={**os.environ, "HVDLITE_CHECK_LAUNCHER": "0"}, check=True)
hvd.barrier()
"""
    options = ["--elastic", "--spares", 1, "--timeline-filename", tmp_path / "t.json"]
    job = hvdliterun(*options, "-np", 2, sys.executable, "-c", code)
    assert (job.returncode, job.stderr) == (0, "")
    assert sorted(job.stdout.splitlines()) == ["0 1", "0 2", "1 2"]
    events = json.loads((tmp_path / "t.json").read_text())
    tensors = [each["args"]["tensor"] for each in events if each["name"] == "ALLREDUCE"]
    assert tensors.count("allreduce.outer") == 2
