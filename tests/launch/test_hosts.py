from __future__ import annotations

import socket

import pytest

from hvdlite.errors import StartError
from hvdlite.launch.hosts import (
    Host,
    all_local,
    check_names,
    choose_hosts,
    on_this_host,
    own_addresses,
    parse_hostfile,
    parse_hosts,
)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1:2,node2:4", [("node1", 2), ("node2", 4)]),
        ("node1", [("node1", 1)]),
        ("10.0.0.1:8, gpu-3.example.org:16", [("10.0.0.1", 8), ("gpu-3.example.org", 16)]),
    ],
)
def test_hosts(text, hosts):
    assert parse_hosts(text) == hosts


MALFORMED = ["", ",", "a:b", "a:0", "a:-1", "a:1,", ":2", "a:1:2", "a b:2"]
# An option of ssh, and texts that do not end.
MALFORMED += ["b,-oX=y:2", "a" * 254, f"a:{'9' * 5000}"]


@pytest.mark.parametrize("text", MALFORMED, ids=lambda text: text[:10])
def test_malformed_hosts(text):
    with pytest.raises(StartError, match="expected host1:slots") as caught:
        parse_hosts(text)
    assert caught.value.code == 2
    assert len(str(caught.value)) < 600


def test_hostfile_of_either_form(tmp_path):
    path = tmp_path / "hosts"
    path.write_text(
        "# the cluster\n\n"
        "node1 slots=2\n"
        "  node2   slots = 4 max_slots=8  # the big one\n"
        "node3:3\n"
        "node4\tslots=5\n"
        "node5\n"
    )
    expected = [("node1", 2), ("node2", 4), ("node3", 3), ("node4", 5), ("node5", 1)]
    assert parse_hostfile(str(path)) == expected


@pytest.mark.parametrize(
    "line", ["node1 2", "node1 slots=x", "node1:2 slots=2", "a slots=0", "a max_slots=2"]
)
def test_malformed_hostfile_names_the_line(tmp_path, line):
    path = tmp_path / "hosts"
    path.write_text(f"node0:1\n{line}\n")
    with pytest.raises(StartError, match=r"hosts, line 2: found .*expected 'host slots=N'"):
        parse_hostfile(str(path))


def test_hostfile_that_was_written_on_windows(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfnode1 slots=2\r\nnode2:3\r\n")
    assert parse_hostfile(str(path)) == [Host("node1", 2), Host("node2", 3)]


def test_hostfile_that_is_missing_empty_or_not_text(tmp_path):
    with pytest.raises(StartError, match="No such file"):
        parse_hostfile(str(tmp_path / "missing"))
    (tmp_path / "empty").write_text("# nothing\n")
    with pytest.raises(StartError, match="names no host"):
        parse_hostfile(str(tmp_path / "empty"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(StartError, match="not a text file"):
        parse_hostfile(str(tmp_path / "binary"))


def test_slots():
    assert choose_hosts("a:2,b", None, 3) == [Host("a", 2), Host("b", 1)]
    assert choose_hosts(None, None, 100) == []
    with pytest.raises(StartError, match="-np 4 is more than the 3 slots of a:2,b:1"):
        choose_hosts("a:2,b", None, 4)


def test_local():
    assert all_local([])
    assert all_local([Host("localhost", 2), Host("127.0.0.1", 1), Host(socket.gethostname(), 1)])
    assert not all_local([Host("localhost", 2), Host("elsewhere.example.org", 1)])


@pytest.mark.parametrize("networks", ["", "lo", "127.0.0.0/8", "no-such-card,lo"])
def test_addresses_on_the_way_to_hosts_or_of_networks(networks):
    assert own_addresses([Host("127.0.0.1", 1)], networks) == ["127.0.0.1"]


@pytest.mark.parametrize("networks", ["no-such-card", "203.0.113.0/24", "300.0.0.0/8"])
def test_networks_that_this_host_does_not_have(networks):
    with pytest.raises(StartError, match=f"--network-interfaces {networks}: this host has lo "):
        own_addresses([], networks)


def test_a_host_that_nobody_knows(tmp_path, monkeypatch):
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\ncase "$*" in *alias*) exit 0;; esac\necho why >&2; exit 255\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    check_names(["127.0.0.9", "alias.invalid"])
    with pytest.raises(StartError, match=r"^host no.invalid does not answer: why; .*`ssh no.inv"):
        check_names(["alias.invalid", "no.invalid"])


def test_the_hosts_of_batch_jobs():
    here, there = [Host("localhost", 2)], [Host("localhost", 1), Host("no-such-host", 1)]
    assert not on_this_host([], {"SLURM_JOB_ID": "7"})
    assert on_this_host([], {"SLURM_CONF": "/etc/slurm.conf"})
    for environment in ({}, {"SLURM_JOB_ID": "7"}):
        assert on_this_host(here, environment)
        assert not on_this_host(there, environment)
