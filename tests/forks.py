"""Forked children of a test's process."""

import gc
import os
import signal
import traceback
import warnings


def run_forked(child, parent=lambda: None):
    """Run a function in a forked child, which fails if that raises, and another one beside it."""
    # What other tests have left goes here, and not in the child, which lacks the threads that some
    # of it may wait for.
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks with threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            child()
            gc.collect()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        parent()
    except BaseException:
        os.kill(pid, signal.SIGKILL)  # it may wait for what the parent has not come to
        os.waitpid(pid, 0)
        raise
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 0, f"the child ended with {code}"


class Signal:
    """A signal that one process waits for and another gives, once."""

    def __init__(self):
        self._read, self._write = os.pipe()

    def wait(self):
        os.read(self._read, 1)

    def give(self):
        os.write(self._write, b".")
