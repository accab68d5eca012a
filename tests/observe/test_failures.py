"""Ranks report the exceptions that end them, and end the job."""

from __future__ import annotations

import sys
import textwrap

import pytest

import hvdlite
from hvdlite.errors import HorovodInternalError, RankGoneError
from hvdlite.observe import failures
from tests.harness import run_script

BEGIN = """
import io, os, sys, threading, time
import numpy as np, hvdlite as hvd
from hvdlite.observe import failures
failures._OTHERS = 2.0  # Time enough for ranks on busy cores.
"""

BOOM = """
if hvd.rank() == 1:
    raise KeyError("boom")
hvd.barrier()
"""
HOOK = """
sys.excepthook = lambda *caught: print("theirs:", repr(caught[1]), file=sys.stderr)
"""


def job(np, *parts):
    """Run a script whose ranks fail; return the lines of its standard error."""
    done = run_script("\n".join([BEGIN, *map(textwrap.dedent, parts)]), np=np)
    assert done.returncode != 0, done.stderr
    return done.stderr.splitlines()


def count(lines, *words):
    return sum(all(word in line for word in words) for line in lines)


@pytest.mark.slow
def test_a_hook_that_was_installed_later_calls_ours_with_another_stderr():
    """torch.distributed's collects what is printed, and prints it with the rank."""
    lines = job(
        2,
        """
        hvd.init()
        ours = sys.excepthook

        def theirs(*caught):
            real, sys.stderr = sys.stderr, io.StringIO()
            try:
                ours(*caught)
            finally:
                collected, sys.stderr = sys.stderr.getvalue(), real
            for line in collected.splitlines():
                print("theirs:", line, file=sys.stderr)

        sys.excepthook = theirs
        """,
        BOOM,
    )
    assert count(lines, "theirs: hvdlite: rank 1 of 2 ends the job:") == 1
    assert count(lines, "theirs: KeyError: 'boom'") == 1
    assert count(lines, "Traceback") == 1
    assert count(lines, "rank 0 of 2 ends the job: hvdlite.errors.", "script.py:") <= 1


@pytest.mark.slow
def test_a_hook_that_was_installed_later_does_not_call_ours():
    """As rich's and IPython's; and a thread that waits must not keep the job from ending."""
    thread = "if hvd.rank() == 1: threading.Thread(target=time.sleep, args=(60,)).start()"
    lines = job(2, "hvd.init()", HOOK, thread, BOOM)
    assert count(lines, "theirs: KeyError('boom')") == 1
    assert count(lines, "hvdlite: rank 1 of 2 ends the job: KeyError: 'boom' (", "script.py:") == 1
    assert count(lines, "Traceback") == 0


def test_a_hook_that_was_there_prints_the_traceback():
    lines = job(2, HOOK, "hvd.init()", BOOM)
    assert count(lines, "hvdlite: rank 1 of 2 ends the job:") == 1
    assert count(lines, "theirs: KeyError('boom')") == 1


def test_an_error_on_all_ranks_has_one_traceback():
    lines = job(3, "hvd.init()", 'hvd.allreduce(np.ones(2 + hvd.rank() % 2), name="loss")')
    assert count(lines, "Traceback") == 1
    assert count(lines, "ends the job:") == 3
    assert lines[0].startswith("hvdlite: rank")
    assert count(lines, "ends the job: hvdlite.errors.MismatchError: the ranks disagree") == 1
    assert count(lines, "MismatchError") == 1
    assert count(lines, "ends the job: the same error (", "script.py:") == 2
    assert count(lines, 'File "', "hvdlite") == 0


@pytest.mark.slow
def test_no_rank_loses_an_error_of_its_own():
    lines = job(
        4,
        """
        hvd.init()
        hvd.barrier()
        if hvd.rank() == 0:
            raise KeyError("zero")
        if hvd.rank() == 1:
            # An error of this rank, although communication raises the last one.
            try:
                raise ValueError("one")
            finally:
                hvd.allreduce(np.ones(1), name="x")
        raise TypeError("the same")
        """,
    )
    assert count(lines, "KeyError: 'zero'") == 1
    assert count(lines, "TypeError: the same") == 2
    assert count(lines, "ends the job: TypeError: the same (") == 1
    # Of rank 1, if it failed before the job ended: both errors, and the cause of the last one if
    # the exchange was under way.
    of_rank_1 = count(lines, "Traceback") - 2
    assert of_rank_1 in ((2, 3) if count(lines, "ValueError: one") else (0,))


def test_closed_streams_do_not_keep_the_job_from_ending():
    closed = """
    sys.stdout.close()
    sys.stderr = sys.stdin = None
    del sys.argv, sys.orig_argv
    hvd.init()
    """
    job(2, closed, BOOM)


def test_an_exception_that_was_caught_has_not_ended_the_program(monkeypatch):
    """pytest and IPython remember theirs in ``sys.last_value``."""
    try:
        raise KeyError
    except KeyError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        monkeypatch.setattr(sys, "last_traceback", error.__traceback__, raising=False)
    monkeypatch.setattr(failures, "_job_rank", lambda error: pytest.fail("it has"))
    failures._end_after_other_hooks()


def test_the_line_says_where_the_users_own_code_has_failed():
    (folder,), own = hvdlite.__path__, {}
    exec(compile("def call():\n    raise KeyError", f"{folder}/torch/autograd.py", "exec"), own)
    for name in ("/home/user/train.py", f"{folder}_project/train.py"):
        with pytest.raises(KeyError) as caught:
            exec(compile("call()", name, "exec"), own)
        assert failures._users_line(caught.value) == f" ({name}:1)"


@pytest.mark.parametrize(
    "folder", [".local/lib/python3.11/site-packages", "lib64/site-packages", "lib/dist-packages"]
)
def test_packages_are_not_the_users_own_code(folder):
    error = raised(KeyError(), "/home/user/train.py", f"/home/user/{folder}/package/module.py")
    assert failures._users_line(error) == " (/home/user/train.py:2)"


def test_the_line_has_the_error_that_a_longer_text_tells_of():
    job_rank = failures.JobRank(1, 2, "job")
    text = "Graph execution error:\n\nDetected at node\nMismatchError: shape\n\t [[node]]"
    assert failures._line(job_rank, RuntimeError(text)).endswith("job: MismatchError: shape\n")
    assert failures._line(job_rank, KeyError("x\ny")).endswith("ends the job: KeyError: 'x\\ny'\n")
    assert failures._line(job_rank, KeyboardInterrupt()).endswith(
        "ends the job: KeyboardInterrupt\n"
    )


@pytest.fixture
def written(monkeypatch):
    """The texts that a rank writes; the claims of a test live as long as it."""
    written = []
    monkeypatch.setattr(failures, "_write", written.append)
    monkeypatch.setattr(failures, "_claims", [])
    yield written
    for claim in failures._claims:
        claim.close()


def raised(error, *files):
    """Return an error that was raised through files, the last of which raises it."""
    inner = None
    for number, file in enumerate(reversed(files)):
        source = "raise inner()" if number else "raise error"
        names = {"error": error, "inner": inner}
        exec(compile(f"def call():\n    {source}", file, "exec"), names)
        inner = names["call"]
    try:
        inner()
    except type(error) as caught:
        return caught.with_traceback(caught.__traceback__.tb_next)


def report(error, rank, job):
    """Report an error of a rank; the names of jobs tell the tests apart."""
    failures._report(failures.JobRank(rank, 2, job), error, None)


OWN = f"{hvdlite.__path__[0]}/nowhere.py"


@pytest.mark.parametrize(("level", "is_shown"), [("WARNING", False), ("DEBUG", True)])
def test_the_line_that_helps_comes_first_and_once(written, level, is_shown, caplog):
    """Frames of hvdlite come only where they are asked for; those of the program stay."""
    caplog.set_level(level, "hvdlite")
    for rank in range(2):
        error = HorovodInternalError("the parameters differ; call hvd.broadcast_parameters()")
        error = raised(error, "/home/train.py", OWN, "/home/callback.py", OWN, OWN)
        report(error, rank, f"once {level}")
    first, second = (text.splitlines() for text in written)
    summary = "hvdlite.errors.HorovodInternalError: the parameters differ; call hvd.broadcast_"
    assert first[0] == f"hvdlite: rank 0 of 2 ends the job: {summary}parameters()"
    assert count(first, "the parameters differ") == 1
    files = [line.split('"')[1] for line in first if line.startswith("  File")]
    own = [OWN] if is_shown else []
    assert files == ["/home/train.py", *own, "/home/callback.py", *own, *own]
    assert len(second) == 1
    assert second[0].endswith(" ends the job: the same error (/home/callback.py:2)")


def test_an_error_of_the_program_is_shown_as_python_does_and_one_of_hvdlite_whole(written):
    """Without the lines of hvdlite between those of the program, unless it makes the error."""
    report(raised(KeyError("a"), "/home/train.py", OWN), 0, "bug")
    assert OWN in written.pop()
    report(raised(KeyError("a"), "/home/train.py", OWN, "/home/step.py"), 0, "user")
    lines = written[0].splitlines()
    assert lines[:2] == [
        "hvdlite: rank 0 of 2 ends the job:",
        "Traceback (most recent call last):",
    ]
    assert lines[-1] == "KeyError: 'a'"
    assert OWN not in written[0]


def test_only_what_comes_from_other_ranks_is_a_consequence(written):
    def lines(error, job):
        written.clear()
        report(error, 1, job)
        return len(written[0].splitlines())

    gone, other = RankGoneError("rank 0 has ended"), HorovodInternalError("x")
    other.__cause__ = OSError("the network")
    assert lines(gone, "a") == 1
    assert lines(other, "b") > 1
    assert lines(other, "b") == 1
    assert lines(HorovodInternalError("y"), "b") == 1
    assert lines(HorovodInternalError("y"), "c") > 1
    assert lines(HorovodInternalError("z"), "c") == 1
    assert lines(ValueError("z"), "c") > 1
