"""What a rank of `hvdlite.run` prints, on its way to the caller in whole lines.

It is read by the process around the rank, so that the last words of one that is killed arrive.
That process loads nothing of hvdlite but this and the wire.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading

from hvdlite.launch import wire

_MOST_AT_ONCE = 1 << 16
_LONGEST_LINE = 1 << 16


class Stream:
    """The connection of the process around a rank.

    Args:
        address: the launcher's.
        rank: the rank.
        redirect: whether to carry what the command prints.

    Raises:
        WireError: the launcher cannot be reached.
    """

    def __init__(self, address: str, rank: int, redirect: bool) -> None:
        self._wire = wire.Wire(address, rank, os.environ)
        self._pipes = [os.pipe(), os.pipe()] if redirect else []
        self._ended, self._end = os.pipe()
        self._reader = threading.Thread(target=self._forward, daemon=True)

    def enter(self) -> None:
        """In the command's process: print into the pipes."""
        for number, (_, writer) in enumerate(self._pipes, start=1):
            os.dup2(writer, number)

    def start(self) -> None:
        """In this process: begin to read them."""
        for _, writer in self._pipes:
            os.close(writer)
        self._reader.start()

    def report(self, line: str) -> None:
        """Report a failure."""
        self._wire.send(wire.REPORT, line.encode())

    def left(self) -> None:
        """Tell that the command has ended well."""
        with contextlib.suppress(OSError):
            self._wire.send(wire.LEFT)

    def finish(self, seconds: float) -> None:
        """Pass on what is left when the command has ended."""
        os.close(self._end)
        self._reader.join(seconds)

    def _forward(self) -> None:
        kinds = dict(zip((pipe[0] for pipe in self._pipes), (wire.OUT, wire.ERR), strict=False))
        unfinished = dict.fromkeys(kinds, b"")
        # Without a caller nobody is left to tell.
        with contextlib.suppress(OSError):
            while kinds:
                ready = select.select([*kinds, self._ended], [], [])[0]
                # A child that the command has left behind may keep its pipes open.
                if ready == [self._ended]:
                    break
                for reader in set(ready) & set(kinds):
                    received = os.read(reader, _MOST_AT_ONCE)
                    text = unfinished[reader] + received
                    unfinished[reader] = self._pass_on(kinds[reader], text, last=not received)
                    if not received:
                        del kinds[reader]
            for reader, kind in kinds.items():
                self._pass_on(kind, unfinished[reader], last=True)

    def _pass_on(self, kind: bytes, text: bytes, last: bool) -> bytes:
        """Send whole lines, and return the rest."""
        lines, end, rest = text.rpartition(b"\n")
        if rest and (last or len(rest) > _LONGEST_LINE):
            lines, end, rest = text, b"\n", b""
        if end:
            self._wire.send(kind, lines)
        return rest
