"""Hosts and their slots, from ``-H`` or from a hostfile."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hvdlite.errors import StartError

_HOST = re.compile(r"(?P<name>[\w.-]+)(?::(?P<slots>\d+))?")
_SLOTS = re.compile(r"(?<!\w)slots\s*=\s*(?P<slots>\d+)")
_ADDRESS = re.compile(r"[\d.]+|.*:.*")
_LOOPBACK = {"localhost", "127.0.0.1"}


class Host(NamedTuple):
    """One machine and the number of processes that may run on it."""

    name: str
    slots: int


def choose_hosts(hosts: str | None, hostfile: str | None, num_proc: int) -> list[Host]:
    """Read the hosts of ``num_proc`` processes from a list or a file; empty: neither is given.

    Raises:
        StartError: they are malformed, or have too few slots.
    """
    chosen = parse_hosts(hosts) if hosts is not None else []
    if hostfile is not None:
        chosen = parse_hostfile(hostfile)
    check_slots(chosen, num_proc)
    return chosen


def parse_hosts(text: str) -> list[Host]:
    """Read ``host1:2,host2:2``; a host without a number has one slot.

    Raises:
        StartError: a part is not of the form ``host`` or ``host:slots``.
    """
    hosts = [parse_host(part.strip()) for part in text.split(",")]
    if None in hosts:
        raise StartError(f"-H {text}: expected host1:slots,host2:slots, e.g. -H node1:2,node2:2")
    return [host for host in hosts if host]


def parse_hostfile(path: str) -> list[Host]:
    """Read a hostfile: one host per line, ``host slots=2`` or ``host:2``, ``#`` comments.

    Raises:
        StartError: the file cannot be read, names no host, or has a line of another form.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise StartError(f"--hostfile {path}: {reason}") from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        host = _parse_line(text)
        if host is None:
            raise StartError(
                f"--hostfile {path}, line {number}: found {text!r}, "
                "expected 'host slots=N' or 'host:N'"
            )
        hosts.append(host)
    if not hosts:
        raise StartError(f"--hostfile {path}: names no host; write one 'host slots=N' per line")
    return hosts


def check_slots(hosts: Sequence[Host], num_proc: int) -> None:
    """Refuse more processes than the hosts have slots.

    Raises:
        StartError: ``num_proc`` is greater than the sum of the slots.
    """
    slots = sum(host.slots for host in hosts)
    if hosts and num_proc > slots:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise StartError(
            f"-np {num_proc} is more than the {slots} slots of {listed}; "
            "raise the slots or lower -np"
        )


def all_local(hosts: Sequence[Host]) -> bool:
    """Return whether every host is this machine; True for an empty list."""
    here = socket.gethostname()
    names = _LOOPBACK | {here, here.partition(".")[0]}
    return all(host.name in names for host in hosts)


def host_key(name: str) -> str:
    """Return the same text for all names of a host, as far as the names themselves tell."""
    if all_local([Host(name, 1)]):
        return "localhost"
    return name if _ADDRESS.fullmatch(name) else name.partition(".")[0].lower()


def own_names(hosts: Sequence[Host]) -> list[str]:
    """Return what other hosts may know this one by: its addresses on the way to them, its name."""
    names = []
    for host in hosts:
        with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
            probe.connect((host.name, 9))  # Sends nothing, but chooses the way.
            names.append(str(probe.getsockname()[0]))
    return list(dict.fromkeys([*names, socket.getfqdn(), socket.gethostname()]))


def parse_host(text: str, slots: int = 1) -> Host | None:
    """Read ``host:slots`` or ``host``; return None for a text of another form.

    Args:
        text: Without spaces around it.
        slots: Those of a host without a number.
    """
    match = _HOST.fullmatch(text)
    if match is None:
        return None
    slots = int(match["slots"] or slots)
    return Host(match["name"], slots) if slots > 0 else None


def _parse_line(text: str) -> Host | None:
    name, *options = text.split(maxsplit=1)
    match = _SLOTS.search(options[0]) if options else None
    if options and (match is None or ":" in name):
        return None
    return parse_host(f"{name}:{match['slots']}" if match else name)
