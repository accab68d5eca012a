"""The connections between the launcher and the ranks, without ranks."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time

import pytest

from hvdlite.launch import server as server_module
from hvdlite.launch.server import Failure, Server
from hvdlite.observe import protocol
from tests.launch.launcher import serve_until

pytestmark = pytest.mark.timeout(60)

TASK = [b"task", b"part", b"", b"function"]


@pytest.fixture(params=["a socket of this host", "TCP"])
def server(request):
    addresses = ["127.0.0.1", "127.0.0.2"] if request.param == "TCP" else None
    with Server(addresses, TASK) as opened:
        if addresses:
            opened.address = f"no-such-host.invalid,{opened.address}"
        yield opened


def connect(server, rank, key=None):
    environment = {protocol.KEY: (key or server.key).hex()}
    return contextlib.closing(protocol.connect(server.address, rank, environment))


def stranger(server):
    """Connect as somebody who knows the address only."""
    if "@" in server.address:
        return socket.create_connection(("localhost", int(server.address.rpartition("@")[2])), 10)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    try:
        connection.connect(server.address)
    except OSError:
        connection.close()
        raise
    return connection


def assert_served(server, rank=1):
    """A rank gets what it asks for."""
    with connect(server, rank) as channel:
        channel.send(protocol.ASK)
        assert channel.receive(10) == (protocol.TASK, TASK)


def test_a_conversation(server, capsys):
    with connect(server, 3) as around, connect(server, 3) as worker:
        worker.send(protocol.ASK)
        assert worker.receive(10) == (protocol.TASK, TASK)
        large = os.urandom(5_000_000)
        worker.send(protocol.RESULT, large, b"", b"last")
        assert worker.receive(10) == (protocol.SEEN, [b""])
        around.send(protocol.OUT, b"one\ntwo\n")
        around.send(protocol.ERR, b"three")
        around.send(protocol.REPORT, b"137", b"rank 3 was killed")
        around.send(protocol.END_JOB)
        serve_until(server, lambda: server.wants_end)
    assert server.results == {3: [large, b"", b"last"]}
    text = "rank 3 was killed after its function had returned; what it printed last may say why"
    assert server.exited == Failure(3, 137, text)
    assert server.failures == {3: server.exited}
    assert list(server.hosts) == [3]
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("[3] one\n[3] two\n", "[3] three\n")


def test_the_first_failure_of_each_rank_counts(server):
    with connect(server, 1) as around, connect(server, 1) as worker, connect(server, 0) as other:
        worker.send(protocol.ERROR, b"pickled")
        assert worker.receive(10)[0] == protocol.SEEN
        around.send(protocol.REPORT, b"1", b"rank 1 exited with code 1")
        serve_until(server, lambda: server.exited)
        other.send(protocol.LEFT)
        serve_until(server, lambda: server.wants_end)
    assert server.exited.rank == 1
    assert list(server.failures) == [1, 0]
    assert server.failures[1] == Failure(1, 1, "", b"pickled")
    assert "rank 0 ended without a result" in server.failures[0].text


def test_a_stranger_who_does_not_know_the_key_gets_nothing():
    with Server(["localhost"], TASK) as server:
        with pytest.raises(OSError, match="connection to the launcher has failed"):
            connect(server, 0, key=b"guessed")
        assert server.hosts == {}
        assert_served(server)


def test_it_listens_at_the_addresses_that_are_given():
    with Server(["127.0.0.1", "127.0.0.3"], TASK) as server:
        port = int(server.address.rpartition("@")[2])
        for address in ("127.0.0.1", "127.0.0.3"):
            socket.create_connection((address, port), 10).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), 10)


def test_a_rank_without_the_key_says_so():
    with Server(["localhost"], TASK) as server:
        with pytest.raises(ConnectionError, match="HVDLITE_LAUNCH_KEY is not set here"):
            protocol.connect(server.address, 0, {})
        assert server.hosts == {}


def test_a_stranger_cannot_ask_for_much_memory():
    stranger, own = socket.socketpair()
    with stranger, contextlib.closing(protocol.Channel(own, b"", is_launchers=True)) as channel:
        stranger.sendall(protocol.HEADER.pack(protocol.HELLO, 2**40))
        with pytest.raises(protocol.ForgedError, match=f"a first message of {2**40} bytes"):
            channel.receive(10)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n" * 20, bytes(100), b"\xff" * 100])
def test_a_stranger_ends_and_blocks_nothing(server, sent):
    with stranger(server) as connection:
        connection.sendall(sent)
        assert_served(server)
        if len(sent) > 50:
            with contextlib.suppress(ConnectionError):
                while connection.recv(100):
                    pass  # until the server has closed it
        server.serve(0)
        assert list(server.hosts) == [1]
        assert server.failures == {}


@pytest.mark.slow
def test_strangers_that_say_nothing_are_dropped(server, monkeypatch):
    monkeypatch.setattr(server_module, "_MAX_STRANGERS", 8)
    monkeypatch.setattr(server_module, "_SECONDS_TO_PROVE", 0.5)
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(stranger(server)) for _ in range(20)]
        with connect(server, 1) as welcome:  # It waits its turn.
            for connection in connections:
                while connection.recv(protocol.NONCE):
                    pass
            welcome.send(protocol.ASK)  # Who has shown the key stays.
            assert welcome.receive(10)[0] == protocol.TASK


def test_ranks_that_connect_all_at_once_wait_their_turn(monkeypatch):
    monkeypatch.setattr(server_module, "_MAX_STRANGERS", 0)  # as if it were too busy to accept
    with Server(None, TASK) as server, contextlib.ExitStack() as stack:
        full = False
        for _ in range(5000):  # as many as the system takes without an answer
            try:
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(server.address)
            except BlockingIOError:
                full = True
                break
        assert full
        thread = threading.Thread(target=assert_served, args=(server,))
        thread.start()
        thread.join(0.2)
        assert thread.is_alive()
        stack.close()
        monkeypatch.setattr(server_module, "_MAX_STRANGERS", 64)
        thread.join(10)
        assert list(server.hosts) == [1]


def test_a_process_without_descriptors_waits_until_a_stranger_is_dropped(server, monkeypatch):
    monkeypatch.setattr(server_module, "_SECONDS_TO_PROVE", 0.5)
    accept, is_full = socket.socket.accept, lambda: bool(server._strangers)

    def fail_when_full(listener):
        if is_full():
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fail_when_full)
    with stranger(server) as connection:
        while connection.recv(protocol.NONCE):
            pass
    assert_served(server)
    while server._known:
        time.sleep(0.01)
    is_full = lambda: True  # noqa: E731
    with pytest.raises(OSError, match="Too many"):
        server.serve(10)


def test_a_launcher_that_does_not_know_the_key():
    with socket.create_server(("localhost", 0)) as listener:

        def pretend():
            with listener.accept()[0] as accepted:
                accepted.sendall(bytes(protocol.NONCE))
                with accepted.makefile("rb") as received:
                    received.read(protocol.NONCE + protocol.HEADER.size + 1 + 2 * 32)
                accepted.sendall(bytes(1000))

        thread = threading.Thread(target=pretend)
        thread.start()
        address = f"localhost@{listener.getsockname()[1]}"
        with pytest.raises(protocol.ForgedError, match="does not know the job's key"):
            protocol.connect(address, 0, {protocol.KEY: "00"})
        thread.join()


def test_nobody_there(tmp_path):
    with pytest.raises(ConnectionError, match="found no launcher at"):
        protocol.connect(f"{tmp_path}/none", 0, {})
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConnectionError, match=f"cannot reach the launcher on port {port}"):
        protocol.connect(f"localhost@{port}", 0, {})


def test_a_temporary_folder_with_a_long_name(tmp_path, monkeypatch):
    folder = tmp_path / ("d" * 60) / ("e" * 60)
    folder.mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    with Server(None, TASK) as server:
        assert len(server.address) > 120
        assert_served(server)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("addresses", [None, ["192.0.2.1"]])  # none of this host's
def test_no_folder_stays_where_no_socket_can_be_opened(addresses, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(protocol, "short", lambda path: contextlib.nullcontext("/no/such/folder"))
    with pytest.raises(OSError, match=r"No such file|assign requested"), Server(addresses):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_output_of_mpirun(server, capsys):
    reader, writer = os.pipe()
    server.read(os.fdopen(reader, "rb"), protocol.ERR)
    os.write(writer, b"one\ntw")
    server.serve(1)
    assert capsys.readouterr().err == "one\n"
    os.write(writer, b"o\n" + b"many\n" * 30 + b"last")
    os.close(writer)
    server.finish()
    assert capsys.readouterr().err == "two\n" + "many\n" * 30 + "last\n"
    assert server.printed == [*["many"] * 19, "last"]


def test_frames_of_somebody_else_are_not_taken():
    def frame(channel, body):
        header, seal = protocol.HEADER.pack(protocol.RESULT, len(body)), channel._mine
        return header + seal.tag(header) + body + seal.tag(body)

    def changed(channel):
        return frame(channel, b"one").replace(b"one", b"two")

    def repeated(channel):
        return 2 * frame(channel, b"one")

    def unsealed(channel):
        return protocol.HEADER.pack(protocol.RESULT, 3) + b"one" + bytes(64)

    def of_another_connection(channel):
        with connect(server, 0) as other:
            return frame(other, b"one")

    for forge, taken in [(changed, 0), (repeated, 1), (unsealed, 0), (of_another_connection, 0)]:
        with Server(["localhost"], TASK) as server, connect(server, 0) as channel:
            channel._socket.sendall(forge(channel))
            with contextlib.suppress(OSError):
                while True:
                    channel.receive(10)
            server.serve(0)
            assert len(server.results) == taken
            assert "what came from rank 0 was not sent by it" in server.failures[0].text


def test_frames_to_a_rank_from_somebody_else_are_not_taken():
    with Server(["localhost"], TASK) as server, connect(server, 0) as channel:
        (connection,) = server._known
        connection.sendall(protocol.HEADER.pack(protocol.TASK, 4) + b"task" + bytes(64))
        with pytest.raises(protocol.ForgedError, match="what came from the launcher was not sent"):
            channel.receive(10)
