"""The TCP ports of a job, and strangers who connect to them."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import random
import socket
import sys
import time
from pathlib import Path

import pytest

from hvdlite.launch import ports
from tests.forks import run_forked
from tests.launch.launcher import descendants, running

# The ranks compute until the file appears.
JOB = """
import os, sys, time
import numpy as np, hvdlite as hvd
hvd.init()
print("begun", flush=True)
while not hvd.broadcast_object(os.path.exists(sys.argv[1]), 0):
    assert hvd.allreduce(np.ones(9), op=hvd.Sum, name="x").tolist() == [hvd.size()] * 9
    time.sleep(0.01)
print("ended", flush=True)
"""
LISTENS = "0A"


def listening(pids):
    """The addresses and ports on which processes listen."""
    names = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                names.add(os.readlink(file))
            except OSError:
                continue
    found = set()
    for version, table in ((4, "tcp"), (6, "tcp6")):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == LISTENS and f"socket:[{inode}]" in names:
                address, port = local.split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                packed = ipaddress.ip_address(b"".join(words))
                assert packed.version == version
                found.add((packed, int(port, 16)))
    return found


def own_address():
    """An address of this host that is not the loopback's; the loopback's if there is none."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.255", 9))
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]


@pytest.mark.parametrize("option", [(), pytest.param(("--elastic",), marks=pytest.mark.slow)])
def test_a_job_on_one_host_ends_whatever_strangers_send(option, tmp_path):
    script, end = tmp_path / "job.py", tmp_path / "end"
    script.write_text(JOB)
    source = random.Random(0)
    with running("-np", 2, *option, sys.executable, script, end) as job:
        assert [job.stdout.readline() for _ in range(2)] == ["begun\n"] * 2
        time.sleep(1)  # until the launcher has looked
        found = listening([job.pid, *descendants(job.pid)])
        assert found, "mpirun listens for its ranks"
        kept = []
        for address, port in found:
            host = str(address) if address.is_loopback else own_address()
            for payload in (b"", b"\0" * 4096, source.randbytes(100), source.randbytes(1 << 16)):
                try:
                    connection = socket.create_connection((host, port), timeout=0.5)
                except TimeoutError:
                    break
                assert address.is_loopback, f"other hosts can connect to {address}, port {port}"
                kept.append(connection)
                connection.sendall(payload)
        end.touch()
        out, err = job.communicate(timeout=60)
        assert (job.returncode, out, err) == (0, "ended\n" * 2, "")
        for connection in kept:
            connection.close()


def test_only_ports_that_other_hosts_can_reach_are_closed(monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")  # as in Pythons that are built for older systems
    with socket.create_server(("", 0)) as everywhere, socket.create_server(("127.0.0.1", 0)) as own:
        ports.close(os.getpid())
        with pytest.raises(TimeoutError):
            socket.create_connection(("127.0.0.1", everywhere.getsockname()[1]), timeout=0.3)
        socket.create_connection(own.getsockname(), timeout=5).close()


def test_without_capabilities():
    """As an ordinary user, to whom some kernels allow no filters of TCP."""

    def child():
        if os.geteuid() == 0:
            os.setuid(65534)
            pr_set_dumpable = 4
            ctypes.CDLL(None).prctl(pr_set_dumpable, 1)
        for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
            with socket.create_server((host, 0), family=family) as listener:
                address = listener.getsockname()
                with socket.create_connection(address[:2]) as early:
                    ports.close(os.getpid(), to_this_host=True)
                    with pytest.raises(TimeoutError):
                        socket.create_connection(address[:2], timeout=0.3)
                    with listener.accept()[0] as accepted:
                        early.sendall(b"a")
                        assert accepted.recv(1) == b"a"

    "".encode("idna")  # loads it, which the user may not
    run_forked(child)


def test_a_process_that_has_ended_is_no_error():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    ports.close(pid)
