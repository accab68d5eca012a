"""hvdliterun --elastic: the next rank goes first when the one that does dies."""

import re
import sys

import pytest

from tests.harness import mpirun
from tests.launch.launcher import hvdliterun

CODE = """
import os, pathlib, signal, sys, time
import hvdlite as hvd

hvd.init()
start, per_node = hvd.rank(), "per-node" in sys.argv
node = start // 2 if per_node else 0
path = pathlib.Path(sys.argv[1]) / f"node-{node}"

def die():
    os.kill(os.getpid(), signal.SIGKILL)

with hvd.first(per_node):
    began = path.with_suffix(".began").exists()
    path.with_suffix(".began").touch()
    if start == 0:
        time.sleep(0.3)  # the others wait
        die()
    if not path.exists():
        time.sleep(0.1)
        path.write_text(str(start))
print(f"{start} of {hvd.size()}: by {path.read_text()}, after another: {began}", flush=True)
hvd.barrier()

def fail():
    if start == 1:
        die()
    raise KeyError(f"of rank {start}")

try:
    with hvd.first(per_node):
        fail()
except KeyError as error:
    print(f"{start} of {hvd.size()}: {error}", flush=True)
assert hvd.allgather_object(start) == [2, 3]
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["of-all", "per-node"])
def test_the_next_rank_goes_first(tmp_path, how):
    extra = {"HVDLITE_FORCE_LOCAL_SIZE": "2"} if how == "per-node" else {}
    job = hvdliterun(
        *("--elastic", "-np", 4, sys.executable, "-c", CODE, tmp_path, how),
        env=mpirun.environment(extra),
        timeout=240,
    )
    assert job.returncode == 0, job.stderr
    found = sorted(re.findall(r"^\d of .*", job.stdout, re.MULTILINE))
    if how == "of-all":
        ran = [f"{rank} of 3: by 1, after another: True" for rank in (1, 2, 3)]
    else:
        ran = [
            "1 of 3: by 1, after another: True",
            "2 of 3: by 2, after another: False",
            "3 of 3: by 2, after another: True",
        ]
    # The setting counts nodes by consecutive ranks: after the death they are 1 and 2, and 3.
    failing = 2 if how == "of-all" else 3
    failed = [f"{rank} of 2: 'of rank {failing}'" for rank in (2, 3)]
    assert found == sorted(ran + failed)
