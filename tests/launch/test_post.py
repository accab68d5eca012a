"""The connections between the caller and the ranks, without ranks."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing

import pytest

from hvdlite.launch import wire
from hvdlite.launch.post import Trouble, post

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["a socket of this host", "TCP"])
def box(request):
    names = ["no-such-host.invalid", "localhost"] if request.param == "TCP" else []
    with post(names, b"task", [b"part", b"", b"function"]) as opened:
        yield opened


@pytest.fixture
def served(box):
    """The post, while a thread waits for what comes."""
    ended = threading.Event()
    reports = []

    def serve():
        while not ended.is_set():
            reports.extend(box.wait(0.01))

    thread = threading.Thread(target=serve)
    thread.start()
    yield box, reports
    ended.set()
    thread.join()


_LAST_WORDS = "what it printed last may say why"


def dial(box, rank, key=None):
    return closing(wire.Wire(box.address, rank, {wire.KEY: (key or box.key).hex()}))


def test_a_conversation(served, capsys):
    box, reports = served
    with dial(box, 3) as first, dial(box, 3) as second:
        second.send(wire.ASK)
        assert second.receive(10) == (wire.TASK, b"task")
        assert second.receive_parts() == [b"part", b"", b"function"]
        large = os.urandom(5_000_000)
        second.send_parts(wire.RESULT, [large, b"", b"last"])
        assert second.receive(10) == (wire.SEEN, b"")
        assert box.results == {3: [large, b"", b"last"]}
        first.send(wire.OUT, b"one\ntwo\n")
        first.send(wire.ERR, b"three")
        first.send(wire.REPORT, b"9 rank 3 was killed")
        first.send(wire.ASK)
        assert first.receive(10)[0] == wire.TASK
    assert reports == ["9 rank 3 was killed"]
    assert box.troubles == [
        Trouble(3, "rank 3 was killed after its function had returned; " + _LAST_WORDS, b"")
    ]
    assert box.connected == {3}
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("[3] one\n[3] two\n", "[3] three\n")


def test_who_does_not_know_the_key_gets_nothing(served):
    box, _ = served
    with pytest.raises(wire.WireError, match=r"closed the connection|has failed"):
        dial(box, 0, key=b"guessed")
    assert box.connected == set()
    with dial(box, 1) as welcome:  # The others are served as before.
        welcome.send(wire.ASK)
        assert welcome.receive(10)[0] == wire.TASK


def test_a_launcher_that_does_not_know_the_key():
    with socket.create_server(("localhost", 0)) as listener:

        def pretend():
            with listener.accept()[0] as accepted:
                accepted.sendall(bytes(wire.PROOF))
                accepted.recv(wire.HELLO.size)
                accepted.sendall(bytes(wire.PROOF))

        thread = threading.Thread(target=pretend)
        thread.start()
        address = wire.tcp_address(["localhost"], listener.getsockname()[1])
        with pytest.raises(wire.WireError, match="does not know the job's key"):
            wire.Wire(address, 0, {wire.KEY: "00"})
        thread.join()


def test_nobody_there(tmp_path):
    with pytest.raises(wire.WireError, match="found no launcher at"):
        wire.Wire(f"{wire.PREFIX}{tmp_path}/none", 0, {})
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(wire.WireError, match=f"cannot reach the launcher on port {port}"):
        wire.Wire(wire.tcp_address(["localhost"], port), 0, {})


def test_what_mpirun_prints(box, capsys):
    os.write(box.stderr, b"one\ntw")
    box.wait(1)
    os.write(box.stderr, b"o\n" + b"many\n" * 30)
    box.wait(1)
    assert capsys.readouterr().err == "one\ntwo\n" + "many\n" * 30
    assert box.said == ["many"] * 20
