"""DDP with hvdlite's hook goes on without a rank that dies; FSDP ends with an error."""

import random

import pytest

from tests.campaigns import kill

pytest.importorskip("torch")


def test_ddp_goes_on():
    found = kill.run("ddp", ["kill:rank=1,step=3,point=exchange"], ranks=3)
    assert found.left == [0, 2]
    assert len(found.results) == 1


def test_fsdp_ends():
    assert kill.run_fsdp(random.Random(0), 3) < 5
