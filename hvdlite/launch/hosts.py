"""Hosts and their slots, from ``-H`` or from a hostfile."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from hvdlite.errors import StartError
from hvdlite.launch.programs import ask

# A name that began with a hyphen would be an option of ssh; DNS allows 253 characters.
_HOST = re.compile(r"(?P<name>\w[\w.-]{0,252})(?::(?P<slots>\d{1,9}))?")
_SLOTS = re.compile(r"\s.*?(?<!\w)slots\s*=\s*(\d{1,9}).*")
_ADDRESS = re.compile(r"[\d.]+|.*:.*")
_LOOPBACK = {"localhost", "127.0.0.1"}
_MAX_SHOWN = 200
_LOGIN = 6  # seconds
# Variables that say that a batch system may have given mpirun other hosts.
BATCH = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "COBALT_JOBID")


class Host(NamedTuple):
    """One machine and the number of processes that may run on it."""

    name: str
    slots: int


def choose_hosts(hosts: str | None, hostfile: str | None, num_proc: int) -> list[Host]:
    """Read the hosts of ``num_proc`` processes from a list or a file; empty: neither is given."""
    chosen = parse_hosts(hosts) if hosts is not None else []
    if hostfile is not None:
        chosen = parse_hostfile(hostfile)
    slots = sum(host.slots for host in chosen)
    if chosen and num_proc > slots:
        raise StartError(
            f"-np {num_proc} is more than the {slots} slots of {listed(chosen)}; "
            "raise the slots or lower -np"
        )
    return chosen


def parse_hosts(text: str) -> list[Host]:
    """Read ``host1:2,host2:2``; a host without a number has one slot."""
    form = "expected host1:slots,host2:slots, e.g. -H node1:2,node2:2"
    return [
        parse_host(part, f"-H {shortened(text)}: {form}; found {shortened(part)!r}")
        for part in map(str.strip, text.split(","))
    ]


def shortened(text: str) -> str:
    """Return a text that is short enough for a message."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def parse_hostfile(path: str) -> list[Host]:
    """Read a hostfile: one host per line, ``host slots=2`` or ``host:2``, ``#`` comments."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise StartError(f"--hostfile {path}: {reason}") from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        if text := line.partition("#")[0].strip():
            found = f"--hostfile {path}, line {number}: found {shortened(text)!r}"
            problem = f"{found}, expected 'host slots=N' or 'host:N'"
            hosts.append(parse_host(_SLOTS.sub(r":\1", text), problem))
    if not hosts:
        raise StartError(f"--hostfile {path}: names no host; write one 'host slots=N' per line")
    return hosts


def listed(hosts: Sequence[Host]) -> str:
    """Return the hosts as ``host1:2,host2:2``."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def all_local(hosts: Sequence[Host]) -> bool:
    """Return whether every host is this machine; True for an empty list."""
    here = socket.gethostname()
    names = _LOOPBACK | {here, here.partition(".")[0]}
    return all(host.name in names for host in hosts)


def on_this_host(hosts: Sequence[Host], environment: Mapping[str, str]) -> bool:
    """Return whether all ranks run here; without named hosts, a batch system may choose others."""
    return all_local(hosts) and (bool(hosts) or not any(name in environment for name in BATCH))


def login(host: str, arguments: Sequence[str] = ()) -> str:
    """Log in to a host by ssh with more arguments; return why that fails, or an empty text."""
    options = ["-o", "BatchMode=yes", *arguments, "-o", f"ConnectTimeout={_LOGIN // 2}"]
    works, line = ask(["ssh", *options, host, "true"], _LOGIN)
    return "" if works else line


def check_names(names: Sequence[str], arguments: Sequence[str] = ()) -> None:
    """Refuse hosts that neither this host's resolver nor ssh, with more arguments, knows."""
    for name in names:
        with contextlib.suppress(OSError, UnicodeError):
            socket.getaddrinfo(name, None)
            continue
        reason = login(name, arguments)  # which may have another name for it
        if reason:
            raise StartError(
                f"host {name} does not answer: {reason}; correct its name in -H or the "
                f"hostfile, or make `ssh {name} true` work without a password"
            )


def host_key(name: str) -> str:
    """Return the same text for all names of a host, as far as the names themselves tell."""
    if _ADDRESS.fullmatch(name):
        return "localhost" if name in {*_LOOPBACK, *dict(_interfaces()).values()} else name
    key, here = (each.lower().partition(".")[0] for each in (name, socket.gethostname()))
    return "localhost" if key == here else key


def own_addresses(hosts: Sequence[Host], networks: str = "") -> list[str]:
    """Return the addresses by which other hosts reach this one; empty: unknown.

    Args:
        networks: names of interfaces or networks, with commas between, as eth0 or 10.0.0.0/16;
            empty: those on the way to the hosts.

    Raises:
        StartError: this host has none of the networks.
    """
    found = []
    if networks:
        present = dict(_interfaces())
        found = [
            address
            for name in networks.split(",")
            for interface, address in present.items()
            if name == interface or ("/" in name and _is_in(address, name))
        ]
        if not found:
            names = ", ".join(f"{name} ({address})" for name, address in present.items())
            raise StartError(f"--network-interfaces {networks}: this host has {names or 'none'}")
    for host in () if networks else hosts:
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((host.name, 9))  # Sends nothing, but chooses the way.
            found.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys(found))


def _interfaces() -> Iterator[tuple[str, str]]:
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(type=socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(asking, get_address, struct.pack("256s", name.encode()))
                yield name, socket.inet_ntoa(answer[20:24])


def _is_in(address: str, network: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(address) in ipaddress.ip_network(network, strict=False)
    return False


def parse_host(text: str, problem: str, slots: int = 1) -> Host:
    """Read ``host:slots``, or ``host`` with the default; else raise StartError(problem)."""
    match = _HOST.fullmatch(text)
    slots = int(match["slots"] or slots) if match else 0
    if not match or not slots:
        raise StartError(problem)
    return Host(match["name"], slots)
