"""DDP with hvdlite's hook goes on without a rank that dies; FSDP ends with an error."""

import random
import re
import sys

import pytest

from tests.campaigns import kill
from tests.launch import launcher

pytest.importorskip("torch")


def test_ddp_goes_on():
    found = kill.run("ddp", ["kill:rank=1,step=3,point=exchange"], ranks=3)
    assert found.left == [0, 2]
    assert len(found.results) == 1


@pytest.mark.slow
def test_fsdp_ends():
    assert kill.run_fsdp(random.Random(0), 3) < 5


_TO_THE_DEAD = """
import os, time
import torch, torch.distributed as dist
import hvdlite.torch as hvd, hvdlite.torch.distributed

dist.init_process_group("hvdlite")
dist.barrier()
if dist.get_rank() == 1:
    os._exit(3)
time.sleep(0.5)
large = torch.ones(1 << 20)
calls = {
    "send": lambda: dist.send(torch.ones(1), 1),
    "send much": lambda: dist.send(large, 1),
    "receive": lambda: dist.recv(torch.ones(1), 1),
    "receive from any": lambda: dist.recv(torch.ones(1)),
}
for name, call in calls.items():
    try:
        call()
        print(f"{name}: it went on", flush=True)
    except hvd.HorovodInternalError as error:
        print(f"{name}: {error}", flush=True)
"""


def test_messages_to_and_from_a_rank_that_has_died_name_it():
    job = launcher.hvdliterun("-np", 2, "--elastic", sys.executable, "-c", _TO_THE_DEAD)
    lines = job.stdout.splitlines()
    assert len(lines) == 4, job.stdout + job.stderr
    for line in lines:
        assert re.search(r"rank 1 \(process \d+\) has died", line), job.stdout
