"""hvdliterun with hosts that come and go: how many ranks a job has, and what it goes on with."""

import errno
import functools
import itertools
import json
import os
import re
import socket
import sys
import time
from types import SimpleNamespace

import pytest

from hvdlite.errors import StartError
from hvdlite.launch import cli, programs
from hvdlite.launch import hosts as hosts_module
from hvdlite.launch.discovery import Discovery, Plan, Sizes
from hvdlite.launch.hosts import Host, host_key
from hvdlite.launch.job import End
from tests.harness.hosts import network_hosts, why_unavailable
from tests.launch import launcher
from tests.launch.launcher import hvdliterun

# At each commit, rank 0 writes the hosts that there are from then on.
NUMPY = """
import json, os, sys, time
import hvdlite as hvd
hosts = sys.argv[1]
changes = json.loads(sys.argv[2])
resets = int(sys.argv[3])
hvd.init()

@hvd.elastic.run
def train(state):
    while state.step < 2000 and state.after < 8:  # steps after the last reset
        state.after += len(state.resets) == resets
        state.sums = [*state.sums, int(hvd.allreduce(1.0, op=hvd.Sum, name="one"))]
        state.step += 1
        change = changes.pop(str(state.step), None)
        if state.resets:  # as soon as a first change has been noticed
            change = change or changes.pop("next", None)
        if change == "die":
            changes.clear()
            hvd.rank() or os.kill(os.getpid(), 9)
        elif change and hvd.rank() == 0:
            open(hosts, "w").write(change)
        time.sleep(0.02)
        if state.step % 4 == 0:
            state.commit()
    return "done"

state = hvd.elastic.ObjectState(step=0, after=0, sums=[], resets=[])
state.register_reset_callbacks([lambda: state.resets.append(hvd.size())])
result = train(state)
print(json.dumps([hvd.rank(), state.sums, state.resets, result]))
"""


@pytest.fixture
def hosts(tmp_path):
    """A file with the hosts that there are, and the options for it."""
    file = tmp_path / "hosts"
    file.write_text("localhost:2\n")
    return file


def run(hosts, changes, *options, code=NUMPY, resets=2, returncode=0, command=hvdliterun):
    """Run a job whose hosts change; return what its ranks have printed, and its standard error."""
    job = command(*options, sys.executable, "-c", code, hosts, json.dumps(changes), resets)
    assert job.returncode == returncode, job.stderr
    return sorted(json.loads(line) for line in job.stdout.splitlines()), job.stderr


def discovered(hosts, *options):
    return ("--host-discovery-script", f"cat {hosts}", *options)


def lengths(values):
    """Return the values that follow each other, and how often each does."""
    return [[value, len([*group])] for value, group in itertools.groupby(values)]


def test_ranks_come_and_go_with_the_hosts(hosts):
    options = discovered(hosts, "-np", 2, "--min-np", 1, "--max-np", 3)
    found, stderr = run(hosts, {"4": "localhost:4", "next": "localhost:1"}, *options)
    ((rank, sums, resets, result),) = found  # one rank is left
    assert (rank, resets, result) == (0, [3, 1], "done")
    ranks, steps = zip(*lengths(sums), strict=True)
    assert ranks == (2, 3, 1)
    assert [number % 4 for number in steps] == [0, 0, 0]  # it stops at commits
    assert steps[2] == 8
    lines = [f"{ranks} on localhost:{slots}" for ranks, slots in (("3 ranks", 4), ("1 rank", 1))]
    start = "hvdliterun: the hosts have changed; the job goes on with "
    assert stderr.splitlines() == [start + line for line in lines]


@pytest.mark.slow
def test_another_rank_takes_the_place_of_one_that_has_died(hosts):
    fixed = "-np", 3, "-H", "localhost:3", "--min-np", 1
    found, stderr = run(hosts, {"6": "die"}, *fixed, "--blacklist-cooldown-range", 1, 4)
    assert [each[0] for each in found] == [0, 1, 2]
    ranks, steps = zip(*lengths(found[0][1]), strict=True)
    assert (ranks, steps[0], steps[2]) == ((3, 2, 3), 6, 8)
    assert "the other 2 go on in the same step" in stderr
    # Without that option the host gets no more ranks.
    found, _ = run(hosts, {"6": "die"}, *fixed, resets=1)
    assert [each[1] for each in found] == [[3] * 6 + [2] * 10] * 2


@pytest.mark.slow
def test_a_spare_fills_the_gap_of_one_that_has_died(hosts):
    # It takes longer than the host is on the blacklist.
    code = NUMPY.replace("after < 8", "after < 100").replace('"done"', "bool(resizing._launcher)")
    code = code.replace(
        "import hvdlite as hvd", "import hvdlite as hvd\nfrom hvdlite.elastic import resizing"
    )
    options = "-np", 2, "--min-np", 2, "--spares", 1, "--blacklist-cooldown-range", 1, 4
    found, stderr = run(hosts, {"6": "die"}, *options, code=code, resets=1)
    assert [each[0] for each in found] == [0, 1]
    assert lengths(found[0][1]) == [[2, 6], [1, 2], [2, 100]]
    assert [each[2:] for each in found] == [[[2], True]] * 2  # the spare hears of changes, too
    assert "the hosts have changed" not in stderr


_KEPT = """hvdliterun: the hosts have changed; the job goes on with 2 ranks on localhost:2
hvdliterun: mpirun; the ranks' state is kept, and the job starts once more
hvdliterun: one more start; the job goes on with 2 ranks on localhost:2
"""


@pytest.mark.parametrize(
    ("ends", "states", "code", "said"),
    [
        # A run that has not taken the state is no restart; one that has is.
        (["stop", 255, 255, "failed", 0], [0, 1, 1, 1, 0], 0, "failed; restart 1 of 1"),
        (["stop", 255, "stop", 0], [0, 1, 1, 1], 0, _KEPT),
        (["stop", "wait", 255], [0, 1, 1], 255, "within 1 s (--elastic-timeout), so it is lost"),
        (["stop", 130], [0, 1], 130, ""),
    ],
)
def test_a_state_goes_to_the_first_run_that_takes_it(ends, states, code, said, monkeypatch, capsys):
    had = []

    def run(options, job, plan, number, sizes, state):
        end = ends[len(had)]
        had.append(len(state))
        if end == "stop":
            return End(0, "", [b"state"])
        if end == "failed":
            return End(1, "failed", [])
        if end == 130:  # a signal
            return End(130, "")
        if end == "wait":
            monkeypatch.setattr(cli, "_PAUSE", 1.1)
            return End(255, "mpirun", state)
        return End(end, "mpirun" if end else "", state)

    monkeypatch.setattr(cli, "_run", run)
    monkeypatch.setattr(cli, "_PAUSE", 0.0)
    options = "-np 1 --max-np 2 --restarts 1 --elastic-timeout 1 true"
    assert cli.main(options.split()) == code
    assert had == states
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_there_may_be_a_limit_to_the_resets(hosts):
    options = discovered(hosts, "-np", 2, "--max-np", 3, "--reset-limit", 1)
    found, stderr = run(hosts, {"4": "localhost:3", "150": "localhost:2"}, *options, returncode=1)
    assert found == []
    assert "have formed a new world 1 times, as often as HVDLITE_ELASTIC_RESET_L" in stderr


TORCH = """
import hashlib, json, os, sys, time
import torch
import hvdlite.torch as hvd
hosts, changes = sys.argv[1], json.loads(sys.argv[2])
hvd.init(virtual_ranks=4)
torch.manual_seed(1)
x = torch.randn(400, 3, generator=torch.Generator().manual_seed(5))
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.3)),
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.8)
hvd.seed(3)
sampler = hvd.ShardSampler(x, batch_size=5)
loader = torch.utils.data.DataLoader(x, batch_sampler=sampler)
state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, scheduler=scheduler, epoch=0,
                               sizes=[])

@hvd.elastic.run
def train(state):
    while state.epoch < 4:
        for batch in loader:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            if optimizer.stepped:
                scheduler.step()
                state.sizes.append(hvd.size())
                if change := changes.pop(str(len(state.sizes)), None):
                    open(hosts, "w").write(change)
                    time.sleep(3.0)
                    if (hvd.rank(), hvd.size()) == (1, 4):
                        os.kill(os.getpid(), 9)
            state.commit()
        state.epoch += 1
        state.commit()

train(state)
weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
print(json.dumps([hvd.size(), hashlib.sha256(weights).hexdigest(), state.sizes]))
"""


@pytest.mark.slow
def test_weights_depend_neither_on_the_hosts_nor_on_deaths(hosts):
    # Virtual ranks, so every sample, random number and residual counts, to the last bit.
    ((_, expected, sizes),), _ = run(hosts, {}, "-np", 1, code=TORCH)
    assert sizes == [1] * 80
    # Rank 1 of 4 dies just before the state is handed over; rank 0 has no copy of its residuals.
    changes = {"12": "localhost:4", "40": "localhost:2"}
    options = discovered(hosts, "-np", 1, "--max-np", 4)
    hosts.write_text("localhost:1\n")
    found, _ = run(hosts, changes, *options, code=TORCH)
    assert [each[:2] for each in found] == [[2, expected]] * 2
    assert [ranks for ranks, _ in lengths(found[0][2])] == [1, 4, 2]
    assert len(found[0][2]) == 80

    def without_rank_1(step, *options):
        fault = f"kill:rank=1,step={step},point=exchange"
        command = functools.partial(hvdliterun, env={"HVDLITE_REHEARSE": fault})
        found, _ = run(hosts, {}, "--elastic", *options, code=TORCH, command=command)
        return [each[:2] for each in found]

    # So many that no process knows what the compression remembers of all virtual ranks.
    assert without_rank_1(7, "-np", 4, "--spares", 1) == [[4, expected]] * 4
    # In the last step of an epoch: when the function is called again, its loop has nothing left.
    assert without_rank_1(20, "-np", 2) == [[1, expected]]


@pytest.mark.slow
@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_other_hosts(hosts):
    def command(*arguments):
        words = launcher.command(*arguments)
        return network.run(words, launcher.environment({}), timeout=90)

    hosts.write_text("host0:1\n")
    options = discovered(hosts, "-np", 1, "--max-np", 4)
    changes = {"4": "host0:1\nhost1:2\n", "150": "host1:2"}
    with network_hosts(2) as network:
        found, stderr = run(hosts, changes, *options, command=command)
    assert [each[0] for each in found] == [0, 1]
    assert [ranks for ranks, _ in lengths(found[0][1])] == [1, 3, 2]
    assert "with 3 ranks on host0:1,host1:2" in stderr
    assert "with 2 ranks on host1:2" in stderr


def test_a_script_is_asked_again_and_again(tmp_path, capsys):
    file, said = tmp_path / "hosts", []

    def has_said():
        said.extend(capsys.readouterr().err.splitlines())
        return said

    file.write_text("a:3\n\n b \n")
    discovery = Discovery(script=f"cat {file}", slots=2)
    with discovery.running():
        assert discovery.hosts == [Host("a", 3), Host("b", 2)]
        file.unlink()
        _wait_until(has_said)
        assert re.fullmatch(
            r"hvdliterun: --host-discovery-script cat .*: exit code 1 \(cat: .*: No such file or "
            r"directory\); the job keeps the hosts that it has",
            said[0],
        )
        assert discovery.hosts == [Host("a", 3), Host("b", 2)]
        file.write_text("c:1\n")
        _wait_until(lambda: discovery.hosts == [Host("c", 1)])
    assert len(has_said()) == 1


def test_a_system_that_cannot_start_the_script_is_asked_again(tmp_path, monkeypatch, capsys):
    start, failures = programs.run, [OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))]

    def run(*args, **options):
        if args[0] == "echo b" and failures:
            raise failures.pop()
        return start(*args, **options)

    monkeypatch.setattr(programs, "run", run)
    with (discovery := Discovery(script="echo a")).running():
        discovery.script = "echo b"
        _wait_until(lambda: discovery.hosts == [Host("b", 1)])
    said = "hvdliterun: --host-discovery-script echo b: Cannot allocate memory; the job keeps the "
    assert capsys.readouterr().err == f"{said}hosts that it has\n"
    failures.append(OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)))
    with pytest.raises(StartError, match="Cannot allocate memory"), discovery.running():
        pass


def test_a_script_that_hangs_ends_with_the_job(tmp_path):
    file = tmp_path / "asked"
    script = f"test -e {file} && touch {file}.again && exec sleep 60; touch {file}; echo a"
    began = time.monotonic()
    with Discovery(script=script).running():
        _wait_until((tmp_path / "asked.again").exists)
    assert time.monotonic() - began < 30


def test_a_script_leaves_no_process_behind(tmp_path):
    """Such a process may keep the script's output open."""
    child = tmp_path / "child"
    script = f"sleep 60 & echo $! > {child}; echo a"
    began = time.monotonic()
    with (discovery := Discovery(script=script)).running():
        assert discovery.hosts == [Host("a", 1)]
        assert launcher.survivors([int(child.read_text())]) == []
    assert time.monotonic() - began < 30


def _wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_cooldown_doubles_with_each_failure(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    sizes = Sizes(Discovery(), 1, 1, cooldown=(2.0, 7.0))
    for seconds in (2.0, 4.0, 7.0, 7.0):
        assert not sizes.is_excluded("a")
        sizes.exclude("a")
        now += seconds - 0.1
        assert sizes.is_excluded("a")
        now += 0.2
    forever = Sizes(Discovery(), 1, 1)
    forever.exclude("a")
    now = 1e9
    assert forever.is_excluded("a")
    assert not forever.is_excluded("b")


def _server(spares=0, **places):
    """Return the part of a server that `Sizes` needs, with ranks on hosts."""
    names = [name for name, count in places.items() for _ in range(count)]
    server = SimpleNamespace(
        hosts={rank: [f"{name}.cluster", name] for rank, name in enumerate(names)},
        watching=dict.fromkeys(range(len(names))),
        ranks=len(names),
        spares=spares,
        deaths=[],
        left=set(),
        exited=None,
        asked=0,
    )

    def ask_to_stop():
        server.asked += 1

    server.ask_to_stop = ask_to_stop
    return server


@pytest.mark.parametrize(
    ("running", "now", "stops"),
    [
        ({"a": 2}, "a:2", False),
        ({"a": 2}, "a:3", True),  # grows
        ({"a": 2}, "a:2 b:1", True),
        ({"a": 4}, "a:4 b:4", False),  # has the most ranks
        ({"a": 2, "b": 2}, "a:2", True),  # a host has gone
        ({"a": 2, "b": 2}, "a:2 b:1 c:4", True),
        ({"a": 3}, "b:4", True),
    ],
)
def test_when_a_job_stops(running, now, stops):
    parsed = [Host(name, int(slots)) for name, slots in (each.split(":") for each in now.split())]
    sizes = Sizes(Discovery(parsed), least=1, most=4)
    server = _server(**running)
    look = sizes.follow(server)
    look()
    look()
    assert server.asked == int(stops)


def test_a_job_does_not_stop_before_all_ranks_have_begun_nor_at_its_end():
    sizes = Sizes(Discovery([Host("a", 4)]), least=1, most=4)
    server = _server(a=2)
    server.ranks = 3
    sizes.follow(server)()
    assert not server.asked
    server.ranks, server.left = 2, {1}
    sizes.follow(server)()
    assert not server.asked
    server.left = set()
    sizes.follow(server)()
    assert server.asked == 1


def test_ranks_stay_on_a_host_on_which_one_has_died():
    discovery = Discovery([Host("a", 3)])
    sizes = Sizes(discovery, least=1, most=6, seconds=0.0)
    server = _server(a=3)
    server.deaths = [SimpleNamespace(rank=1)]
    look = sizes.follow(server)
    look()
    assert not server.asked
    discovery.hosts = [Host("a", 3), Host("b", 1)]
    look()
    assert server.asked == 1
    assert sizes.wait(6) == Plan([Host("a", 2), Host("b", 1)], 3)
    with pytest.raises(StartError, match=r"found 1 of 2 slots \(b:1\) within 0 s"):
        Sizes(Discovery([Host("b", 1)]), least=2, most=6, seconds=0.0).wait(6)


def test_spares_count_as_ranks_as_long_as_they_can_come_in():
    sizes = Sizes(Discovery([Host("a", 3)]), least=2, most=2, spares=1, cooldown=(0.0, 0.0))
    server = _server(spares=1, a=2)
    look = sizes.follow(server)
    look()
    server.deaths = [SimpleNamespace(rank=1)]
    look()
    server.watching[2], server.hosts[2] = None, ["a"]  # it has come in
    look()
    assert not server.asked
    server.deaths = [*server.deaths, SimpleNamespace(rank=2)]
    look()
    assert server.asked == 1


def test_a_host_on_which_nothing_starts_gets_no_more_processes():
    discovery = Discovery([Host("a", 2)])
    sizes = Sizes(discovery, least=1, most=4, seconds=0.0)
    assert sizes.note_end(sizes.wait(4), _server(), True) == []  # perhaps it is mpirun's fault
    assert sizes.note_end(sizes.wait(4), _server(a=2), False) == []
    discovery.hosts = [Host("a", 2), Host("b", 1), Host("c", 1)]
    plan = sizes.wait(4)
    reported = _server()
    reported.exited = "rank 0 failed"
    assert sizes.note_end(plan, reported, True) == []  # perhaps before the others had started
    assert sizes.note_end(plan, _server(), False) == []
    assert sizes.note_end(plan, _server(a=2, b=1), True) == ["c"]
    assert sizes.wait(4) == Plan([Host("a", 2), Host("b", 1)], 3)
    # Hosts beyond those that are needed are not asked.
    assert sizes.wait(2) == Plan([Host("a", 2)], 2)


def test_slots_are_left_for_spares():
    sizes = Sizes(Discovery([Host("a", 4)]), least=1, most=6, spares=1)
    assert sizes.wait(6) == Plan([Host("a", 4)], 3)
    assert sizes.wait(2) == Plan([Host("a", 4)], 2)


@pytest.mark.parametrize("name", ["node1.cluster", "Node1", "127.0.0.1", "an address"])
def test_a_job_does_not_stop_for_another_name_of_this_host(name, monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    if name == "an address":
        name = dict(hosts_module._interfaces()).popitem()[1]
    sizes = Sizes(Discovery([Host(name, 2)]), least=1, most=2)
    server = _server(node1=2)
    server.hosts = {rank: ["node1", "node1"] for rank in range(2)}
    sizes.follow(server)()
    assert not server.asked


def test_names_of_a_host():
    assert host_key("localhost") == host_key("127.0.0.1") == "localhost"
    assert host_key("Node1.cluster") == host_key("node1") == "node1"
    assert host_key("10.0.0.1") == "10.0.0.1"
