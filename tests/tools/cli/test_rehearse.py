"""hvdlite rehearse: one job for each planted failure, and what became of it."""

import json
import os
import re
import signal
from argparse import ArgumentParser
from dataclasses import replace

import pytest

from hvdlite.base import observers
from hvdlite.errors import SettingsError, StartError
from hvdlite.observe import status
from hvdlite.tools import rehearsal
from hvdlite.tools.cli import rehearse
from hvdlite.tools.rehearsal import Fault

SCRIPT = """
import sys, time
import numpy as np
import hvdlite as hvd
from hvdlite.observe import status
if "--fail" in sys.argv:
    sys.exit(4)
hvd.init()
for step in range(6):
    hvd.allreduce(np.ones(5))
    status.count_step("steps")
"""


TRAINING = """
import numpy as np
import hvdlite as hvd
from hvdlite.engine import runtime
from hvdlite.compression import Compression, Parameter, Reduction
from hvdlite.gradients.exchange import GradientExchange
hvd.init()
parameters = [Parameter(name, (3,), np.dtype("float32")) for name in ("bias", "weight")]
made = GradientExchange(runtime.engine(), "model", parameters, Compression.none, Reduction())
for step in range(4):
    made.begin()
    for number in (1, 0):
        made.buckets.slot(number)[...] = 1
        made.mark(number)
    made.finish()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the command on the script, and return its exit code."""
    path = tmp_path / "train.py"
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    )

    def call(*words, script=SCRIPT):
        path.write_text(script)
        before = words[: words.index("--")] if "--" in words else words
        after = words[len(before) + 1 :]
        parser = ArgumentParser()
        rehearse.add_arguments(parser)
        return rehearse.main(parser.parse_args([*map(str, before), str(path), *after]))

    return call


def test_a_job_that_goes_on(run, capsys):
    assert run("-np", 3, "--elastic", "--json", "--fault", "kill:rank=1,step=3") == 0
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert (found["fault"], found["code"]) == ("kill:rank=1,step=3", 0)
    assert found["told"][0].endswith(
        "was killed by signal 9 (SIGKILL) after step 2; the other ranks go on"
    )
    assert found["told"][1].startswith("rank 1 died; the other 2 go on in the same step")


@pytest.mark.slow
def test_without_a_fault_there_are_four_runs(run, capsys):
    assert run("--step", 2) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert [line.partition(": e")[0] for line in lines] == [
        "no fault",
        "kill:rank=1,step=2",
        "kill:rank=0,step=2",
        "stop:rank=1,step=2,seconds=5",
    ]
    assert [line.split("exit code ")[1].split(",")[0] for line in lines] == ["0", "137", "137", "0"]


@pytest.mark.slow
def test_a_job_that_fails_by_itself(run):
    with pytest.raises(StartError, match="fails without a fault"):
        run("--", "--fail")


@pytest.mark.slow
def test_a_job_that_takes_too_long_is_ended(run, capsys):
    assert run("--timeout", 3, "--fault", "delay:rank=0,step=2,seconds=60") == 1
    told = re.match(r"delay:rank=0,step=2,seconds=60: timed out, (\S+) s", capsys.readouterr().out)
    assert 3 <= float(told[1]) < 20


def test_a_fault_that_cannot_be_read_or_has_no_such_rank(run):
    with pytest.raises(StartError, match="expected for example kill:rank=1,step=7,point=exchange"):
        run("--fault", "explode:rank=1")
    expected = "found 'kill:rank=2', expected a rank from 0 to 1"
    with pytest.raises(StartError, match=expected):
        run("--fault", "kill:rank=2")
    with pytest.raises(SettingsError, match=expected):
        rehearsal.plant({rehearsal.VARIABLE: "kill:rank=2"}, rank=0, ranks=2)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("", []),
        ("kill", [Fault("kill")]),
        ("kill:rank=2, step=7", [Fault("kill", 2, 7)]),
        (
            "stop:rank=0,seconds=2.5; raise:point=meet,count=3;",
            [Fault("stop", seconds=2.5), Fault("raise", point="meet", count=3)],
        ),
        ("delay:point=time,after=0.5", [Fault("delay", point="time", after=0.5)]),
        ("corrupt:rank=1,step=7", [Fault("corrupt", 1, 7)]),
        (
            "corrupt:value=-1e30,name=fc.weight;corrupt:point=checkpoint",
            [Fault("corrupt", value=-1e30, name="fc.weight"), Fault("corrupt", point="checkpoint")],
        ),
    ],
)
def test_faults(text, faults):
    found = [replace(each, text="") for each in rehearsal.parse(text)]
    # From Python 3.13 on, dataclasses with the same NaN differ.
    assert str(found) == str(faults)


WRONG = "die kill:rank kill:rank=x kill:point=nowhere kill:count=0 kill:step=-1 kill:what=1"
WRONG += " delay:seconds=inf kill:point=time,after=nan"
IN_VAIN = {*rehearsal.POINTS} - {"exchange", "checkpoint"}


def test_what_is_no_fault_and_corruption_where_it_means_nothing():
    reasons = {
        **dict.fromkeys(
            [*WRONG.split(), "corrupt:value=much"],
            "HVDLITE_REHEARSE: found .* expected for example",
        ),
        **{
            f"corrupt:point={each}": f"no data to corrupt at the point '{each}'" for each in IN_VAIN
        },
        **dict.fromkeys(
            ["corrupt:point=checkpoint,value=1", "kill:name=loss"],
            "value and name are for corrupt at the point 'exch",
        ),
    }
    for text, reason in reasons.items():
        with pytest.raises(SettingsError, match=reason):
            rehearsal.parse(text)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_told(run, capsys, monkeypatch):
    monkeypatch.setenv("HVDLITE_NOT_FINITE", "raise")
    assert run("--fault", "corrupt:rank=1,step=3,name=weight", script=TRAINING) == 1
    told = capsys.readouterr().out.splitlines()[1:]
    assert told[0].strip() == (
        "hvdlite: rank 1 set the first entry of 'weight' to nan in step 3, as HVDLITE_REHEARSE says"
    )
    assert any("'weight' on rank 1 (1 of 3 elements, the first at [0]: nan)" in s for s in told)


def test_a_fault_comes_once_and_at_its_point(monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    monkeypatch.setattr(status, "steps", lambda: step - 1)
    faults = "kill:rank=1,step=2,point=meet,count=2;kill:rank=0,step=2"
    rehearsal.plant({rehearsal.VARIABLE: faults}, rank=1, ranks=2)
    try:
        for step in (1, 2, 3):
            for point in ("meet", "exchange", "meet", "meet"):
                for observe in observers.current:
                    observe(point)
                expected = (step, point) > (2, "exchange") or step > 2
                assert len(killed) <= expected
        assert killed == [(os.getpid(), signal.SIGKILL)]
    finally:
        rehearsal.plant({}, rank=1, ranks=2)
    assert observers.current == ()


def test_a_fault_that_has_not_come_is_told(run, capsys):
    assert run("--fault", "delay:rank=1,step=99", script=TRAINING) == 0
    told = capsys.readouterr().out
    assert "hvdlite: rank 1 has ended, after 4 steps, before 'delay:rank=1,step=99', as" in told
