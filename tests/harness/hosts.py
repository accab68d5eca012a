"""Simulate several network hosts on one machine.

    with network_hosts(2, rate=100e6) as network:
        hosts = network.slots(2, 2)
        done = network.run(["hvdliterun", "-np", "4", "-H", hosts, "python", "train.py"])

Each host is a set of Linux namespaces: its own interfaces, address, host name and /etc/hosts. A
bridge joins them, in a network namespace of its own, so nothing is made outside, and the networks
of several processes do not meet. Files and process numbers are shared, as they would not be
between machines.

A namespace lasts as long as there are processes in it, and its interfaces last as long. So each
has a keeper, which is this file run as a program. It waits for the end of its standard input,
which comes with the end of the process that made the network, however that ends, and then ends
all other processes in its namespace.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

BURST = 2**17
"""The bytes that a host of limited rate may send at once after it has been silent."""

_NAMESPACES = ("--net", "--uts", "--mount")
_SECONDS_TO_START = 10.0
_SECONDS_TO_LEAVE = 2.0


class HostsUnavailableError(Exception):
    """Hosts cannot be made here; the message says why."""


@dataclass(frozen=True)
class Host:
    """One host."""

    name: str  # which the other hosts can resolve
    address: str  # IPv4, of its interface eth0
    keeper: int  # the process that keeps its namespaces

    def enter(self, *command: str) -> list[str]:
        """Return the command line that runs a command on this host, in the repository's root."""
        return ["nsenter", f"--target={self.keeper}", *_NAMESPACES, f"--wd={ROOT}", *command]

    def received(self) -> int:
        """Return the bytes received through eth0, including headers."""
        return self._counters()[0]

    def sent(self) -> int:
        """Return the bytes sent through eth0, including headers."""
        return self._counters()[8]

    def processes(self) -> list[int]:
        """Return the processes on this host, without its keeper."""
        return _companions(self.keeper)

    def _counters(self) -> list[int]:
        table = Path(f"/proc/{self.keeper}/net/dev").read_text()
        return [int(number) for number in table.partition("eth0:")[2].split("\n")[0].split()]


@dataclass(frozen=True)
class Network:
    """Hosts that reach each other."""

    hosts: Sequence[Host]  # host0, host1, ...
    folder: Path  # for as long as they exist, with their ``ssh`` and a TMPDIR for each

    def slots(self, *counts: int) -> str:
        """Return the first hosts with these numbers of slots, in the format of ``-H``."""
        pairs = zip(self.hosts, counts, strict=False)
        return ",".join(f"{host.name}:{count}" for host, count in pairs)

    def run(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, timeout: float = 30.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the first host, in the repository's root; see `mpirun.captured`.

        There mpirun reaches the others by their ``ssh``. Processes that still run on the hosts
        after it are killed.
        """
        from tests.harness.mpirun import captured  # which a keeper does not find

        env = {**(os.environ if env is None else env), **self._variables()}
        return captured(self.hosts[0].enter(*command), env, timeout, self._end)

    def _variables(self) -> dict[str, str]:
        agent = str(self.folder / "ssh")
        temporary = str(self.folder / self.hosts[0].name)
        # Open MPI's name for it, MPICH's, and what sshd would have set.
        return {
            "PRTE_MCA_plm_ssh_agent": agent,
            "HYDRA_LAUNCHER_EXEC": agent,
            "TMPDIR": temporary,
        }

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        # mpirun's daemons may end a little later than it.
        left = 0.0 if process.returncode is None else _SECONDS_TO_LEAVE
        for host in self.hosts:
            _end_companions(host.keeper, left)
        process.kill()  # It may not have entered the host yet.
        process.wait()


@contextlib.contextmanager
def network_hosts(count: int, rate: float | None = None) -> Iterator[Network]:
    """Create hosts that are joined by a network, and end all their processes afterwards.

    Args:
        count: the number of hosts.
        rate: what each host can send, and what it can receive, in bits per second; None: no
            limit.

    Raises:
        HostsUnavailableError: they cannot be made here.
        RuntimeError: they could have been, but it failed; the message has the reason.
    """
    if reason := why_unavailable():
        raise HostsUnavailableError(reason)
    addresses = {f"host{number}": f"10.0.0.{number + 1}" for number in range(count)}
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="hosts-", ignore_cleanup_errors=True)
        folder = Path(stack.enter_context(temporary))
        names = "".join(f"{address} {name}\n" for name, address in addresses.items())
        (folder / "names").write_text(f"127.0.0.1 localhost\n{names}")
        switch = stack.enter_context(_keeper("switch", folder))
        hosts = [
            Host(name, address, stack.enter_context(_keeper(name, folder)))
            for name, address in addresses.items()
        ]
        _connect(switch, hosts, rate)
        _write_ssh(hosts, folder)
        yield Network(hosts, folder)


@functools.cache
def why_unavailable() -> str | None:
    """Return why this process cannot create hosts, or None."""
    needed = ("unshare", "nsenter", "mount", "ip", "tc")
    missing = [program for program in needed if shutil.which(program) is None]
    if sys.platform != "linux" or missing:
        return f"network hosts need Linux with {', '.join(needed)}; missing: {missing}"
    if os.geteuid() != 0:
        return "network hosts need root, to make network namespaces"
    trial = (
        "mount --bind /dev/null /etc/hosts && ip link add bridge0 type bridge"
        " && ip link add port0 type veth peer name eth0"
        f" && tc qdisc add dev eth0 root tbf rate 1gbit burst {BURST} latency 100ms"
    )
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "sh", "-c", trial], capture_output=True, text=True, timeout=30
    )
    said = tried.stderr.strip().replace("\n", "; ")
    return f"network hosts cannot be made here: {said}" if tried.returncode else None


@contextlib.contextmanager
def _keeper(name: str, folder: Path) -> Iterator[int]:
    """Start a process that keeps the namespaces of one host; yield its process number."""
    (folder / name).mkdir()
    keep = [sys.executable, "-I", "-S", __file__, name, str(folder)]
    process = subprocess.Popen(
        ["unshare", *_NAMESPACES, *keep],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is not for it.
    )
    try:
        ready = select.select([process.stdout], [], [], _SECONDS_TO_START)[0]
        if not ready or not process.stdout.readline():
            raise RuntimeError(
                f"{name} did not come up; standard error may have its keeper's words"
            )
        yield process.pid
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()


def _connect(switch: int, hosts: Sequence[Host], rate: float | None) -> None:
    """Plug the hosts into a bridge."""
    _inside(switch, "ip link add bridge0 type bridge")
    _inside(switch, "ip link set bridge0 up")
    for number, host in enumerate(hosts):
        port = f"port{number}"
        _inside(switch, f"ip link add {port} type veth peer name eth0 netns {host.keeper}")
        _inside(switch, f"ip link set {port} master bridge0 up")
        _inside(host.keeper, f"ip address add {host.address}/24 dev eth0")
        _inside(host.keeper, "ip link set eth0 up")
        if rate is not None:
            _limit(switch, port, rate)
            _limit(host.keeper, "eth0", rate)


def _limit(keeper: int, interface: str, rate: float) -> None:
    """Limit the rate of an interface's outgoing traffic."""
    burst = max(BURST, round(rate / 8 / 1000))  # A millisecond, which a timer may take to fire.
    limits = f"rate {round(rate)}bit burst {burst} latency 100ms"
    _inside(keeper, f"tc qdisc add dev {interface} root tbf {limits}")


def _write_ssh(hosts: Sequence[Host], folder: Path) -> None:
    """Write a program that runs a command on another host, in a fresh environment as ssh does."""
    keepers = "\n".join(f"    {host.name}) keeper={host.keeper} ;;" for host in hosts)
    inside = " ".join(_NAMESPACES)
    (folder / "ssh").write_text(f"""#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
case $host in
{keepers}
    *) echo "ssh: no host $host" >&2; exit 255 ;;
esac
exec env -i HOME="$HOME" PATH=/usr/bin:/bin TMPDIR={folder}/"$host" \\
    nsenter --target=$keeper {inside} sh -c "$*"
""")
    (folder / "ssh").chmod(0o700)


def _inside(keeper: int, command: str) -> None:
    done = subprocess.run(
        ["nsenter", f"--target={keeper}", "--net", *command.split()],
        capture_output=True,
        text=True,
        timeout=30,
    )
    if done.returncode:
        raise RuntimeError(f"{command!r} failed on a network host: {done.stderr.strip()}")


def _companions(keeper: int) -> list[int]:
    """Return the other processes in the network namespace of a process."""
    try:
        namespace = os.readlink(f"/proc/{keeper}/ns/net")
    except OSError:
        return []  # The keeper has ended, and before that the others.
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        # A process may end at any time, and one that has is in no namespace any more.
        with contextlib.suppress(OSError):
            if pid != keeper and os.readlink(f"/proc/{pid}/ns/net") == namespace:
                found.append(pid)
    return found


def _end_companions(keeper: int, seconds: float = 0.0) -> None:
    """Kill the other processes in a namespace that have not left after some seconds."""
    deadline = time.monotonic() + seconds
    while pids := _companions(keeper):
        if time.monotonic() >= deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _keep(name: str, folder: str) -> None:
    """Keep the namespaces that this process has been started in."""
    socket.sethostname(name)
    subprocess.run(["mount", "--bind", f"{folder}/names", "/etc/hosts"], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print("up", flush=True)
    sys.stdin.read()
    _end_companions(os.getpid())
    # Its maker may have been killed.
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _keep(*sys.argv[1:])
