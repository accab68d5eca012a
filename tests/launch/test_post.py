"""The connections between the caller and the ranks, without ranks."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading

import pytest

from hvdlite.launch import post as post_module
from hvdlite.launch import wire
from hvdlite.launch.post import Trouble, post

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=["a socket of this host", "TCP"])
def box(request):
    names = ["no-such-host.invalid", "localhost"] if request.param == "TCP" else []
    with post(names, b"task", [b"part", b"", b"function"]) as opened:
        yield opened


@contextlib.contextmanager
def serving(box):
    """A thread that waits for what comes; the reports."""
    ended = threading.Event()
    reports = []

    def serve():
        while not ended.is_set():
            reports.extend(box.wait(0.01))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield reports
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def served(box):
    """The post, while a thread waits for what comes."""
    with serving(box) as reports:
        yield box, reports


_LAST_WORDS = "what it printed last may say why"


def dial(box, rank, key=None):
    return contextlib.closing(wire.Wire(box.address, rank, {wire.KEY: (key or box.key).hex()}))


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


def test_a_temporary_folder_with_a_long_name(tmp_path, monkeypatch):
    folder = tmp_path / ("d" * 60) / ("e" * 60)
    folder.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with post([], b"task", [b"function"]) as box, serving(box):
        assert len(box.address) > 120
        with dial(box, 1) as connection:
            connection.send(wire.ASK)
            assert connection.receive(10) == (wire.TASK, b"task")
    assert list(folder.iterdir()) == []


def test_what_mpirun_prints(box, capsys):
    os.write(box.stderr, b"one\ntw")
    box.wait(1)
    os.write(box.stderr, b"o\n" + b"many\n" * 30)
    box.wait(1)
    assert capsys.readouterr().err == "one\ntwo\n" + "many\n" * 30
    assert box.said == ["many"] * 20


@pytest.mark.slow
def test_strangers_that_say_nothing_are_dropped(served, monkeypatch):
    box, _ = served
    monkeypatch.setattr(post_module, "_MOST_STRANGERS", 8)
    monkeypatch.setattr(post_module, "_SECONDS_WHEN_FULL", 0.5)
    monkeypatch.setattr(post_module, "_SECONDS_TO_PROVE", 1.0)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(box)) for _ in range(20)]
        with dial(box, 1) as welcome:  # It waits its turn.
            welcome.send(wire.ASK)
            assert welcome.receive(10)[0] == wire.TASK
            for connection in connections:
                assert connection.recv(wire.PROOF)
                assert connection.recv(1) == b""
            welcome.send(wire.ASK)  # Who has shown the key stays.
            welcome.receive_parts()
            assert welcome.receive(10)[0] == wire.TASK


def test_ranks_that_connect_all_at_once_wait_their_turn():
    with post([], b"task", [b"function"]) as box, contextlib.ExitStack() as stack:
        with contextlib.suppress(BlockingIOError):
            for _ in range(5000):  # as many as the system takes without an answer
                stack.enter_context(connect(box))
        connected = []
        thread = threading.Thread(target=lambda: connected.append(dial(box, 1)))
        thread.start()
        thread.join(0.2)
        stack.close()
        with serving(box):
            thread.join()
            with connected[0] as connection:
                connection.send(wire.ASK)
                assert connection.receive(10)[0] == wire.TASK


def test_a_process_without_descriptors_drops_a_stranger(box, monkeypatch):
    with connect(box) as stranger:
        box.wait(1)

        class Full:
            def accept(self):
                raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(box, "_listener", Full())
            box._accept(0)
            assert stranger.recv(1) == b""
            with pytest.raises(OSError, match="Too many"):
                box._accept(0)


def connect(box):
    """A connection of somebody who knows the address only."""
    address = box.address.removeprefix(wire.PREFIX)
    if "@" in address:
        return socket.create_connection(("localhost", int(address.rpartition("@")[2])), 10)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def test_frames_of_somebody_else_are_not_taken():
    def frame(connection, body):
        header = wire.HEADER.pack(wire.RESULT, len(body))
        seal = connection._mine
        return header + seal.tag(header) + body + seal.tag(body)

    def changed(connection):
        return frame(connection, b"one").replace(b"one", b"two")

    def repeated(connection):
        return 2 * frame(connection, b"one")

    def unsealed(connection):
        return wire.HEADER.pack(wire.RESULT, 3) + b"one" + bytes(64)

    def of_another_connection(connection):
        with dial(box, 0) as other:
            return frame(other, b"one")

    for forge, taken in [(changed, 0), (repeated, 1), (unsealed, 0), (of_another_connection, 0)]:
        with post(["localhost"], b"task", [b"function"]) as box:
            with serving(box), dial(box, 0) as connection:
                connection._socket.sendall(forge(connection))
                with contextlib.suppress(wire.WireError):
                    while True:
                        connection.receive(10)
            assert len(box.results) == taken
            (trouble,) = box.troubles
            assert "what came from rank 0 was not sent by it" in trouble.text


def test_frames_to_a_rank_from_somebody_else_are_not_taken():
    with (
        post(["localhost"], b"task", [b"function"]) as box,
        serving(box),
        dial(box, 0) as connection,
    ):
        (peer,) = box._peers
        peer.socket.sendall(wire.HEADER.pack(wire.TASK, 4) + b"task" + bytes(64))
        with pytest.raises(wire.WireError, match="was not sent by it"):
            connection.receive(10)
