"""One rank of a job: runs the tests that the parent sends, until the parent hangs up.

Arguments: the parent's socket, and the folder for this rank's output and stacks.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import queue
import shutil
import signal
import socket
import sys
import threading
import warnings
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from _pytest.config import _prepareconfig, parse_warning_filter

from tests.harness.messages import SECONDS_TO_LEAVE, Report, Request


def main(address: str, folder: str) -> None:
    """Run tests until the parent asks to leave or is gone."""
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    _redirect(Path(folder), rank)
    # pytest's set-up installs the import hook that makes assert show values.
    _prepareconfig(["-c", os.devnull, "--noconftest"])
    client = socket.socket(socket.AF_UNIX)
    client.connect(address)
    parent = Connection(client.detach())
    parent.send((rank, os.getpid()))
    requests: queue.SimpleQueue[Request | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(parent, requests, folder), daemon=True).start()
    while (request := requests.get()) is not None:
        outcome, text = _run(request)
        parent.send(Report(rank, outcome, text))


def _redirect(folder: Path, rank: int) -> None:
    """Redirect the output of this process and its children to the rank's own files."""
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(2)
    stacks = os.open(folder / f"stacks-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    # When one rank dies, mpirun ends the others: where they were is worth knowing, too.
    faulthandler.register(signal.SIGTERM, file=stacks, all_threads=True, chain=True)


def _receive(parent: Connection, requests: queue.SimpleQueue[Request | None], folder: str) -> None:
    """Pass requests on; once the parent has hung up, end this process even within a test."""
    try:
        while True:
            requests.put(parent.recv())
    except (EOFError, OSError):
        requests.put(None)
    shutil.rmtree(folder, ignore_errors=True)  # The parent may have been killed.
    # The kernel's timer still works where MPI hangs in the last moments of the interpreter.
    signal.alarm(SECONDS_TO_LEAVE)


def _run(request: Request) -> tuple[str, str]:
    __tracebackhide__ = True
    try:
        _call(request)
    except pytest.skip.Exception as skip:
        return "skipped", str(skip)
    except BaseException as error:
        caught = pytest.ExceptionInfo.from_exception(error)
        summary = caught.exconly(tryshort=True).splitlines()[0]
        return "failed", f"{summary}\n{caught.getrepr(style='short')}"
    return "passed", ""


def _call(request: Request) -> None:
    __tracebackhide__ = True
    sys.path.extend(entry for entry in request.path if entry not in sys.path)
    with warnings.catch_warnings():
        # Third-party code may warn when it is first imported; that is not the test's affair.
        warnings.simplefilter("ignore")
        test = _find(request)
        arguments: dict[str, Any] = pickle.loads(request.arguments)
    # As in a process of its own: weights must not depend on the tests that ran here before.
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
    if request.settings:
        _leave_world()
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as monkeypatch:
        for text in request.filters:
            warnings.filterwarnings(*parse_warning_filter(text, escape=False))
        for name, value in request.settings.items():
            monkeypatch.setenv(name, value)
        test(**arguments, **dict.fromkeys(request.local_fixtures, monkeypatch))
    if request.settings or _has_process_sets():  # the next test may register the same sets
        _leave_world()


def _leave_world() -> None:
    hvdlite: Any = sys.modules.get("hvdlite")
    if hvdlite is not None:
        hvdlite.shutdown()


def _has_process_sets() -> bool:
    hvdlite: Any = sys.modules.get("hvdlite")
    if hvdlite is None or not hvdlite.is_initialized():
        return False
    return bool(hvdlite.engine.runtime.process_sets().added)


def _find(request: Request) -> Any:
    found: Any = importlib.import_module(request.module)
    for name in request.qualname.split("."):
        found = getattr(found, name)
        if isinstance(found, type):
            found = found()
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
