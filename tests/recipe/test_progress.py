"""Progress of all ranks: its numbers, its lines, and its bar in a terminal."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import io
import os
import pty
import re
import struct
import sys
import termios
import time

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.base import observers
from tests.harness import mpirun, ranks

module = importlib.import_module("hvdlite.recipe.progress")  # the function has its name, too


class Clock:
    """A clock that the test sets."""

    now = 0.0
    monotonic_ns = staticmethod(time.monotonic_ns)

    def perf_counter(self):
        return self.now


@contextlib.contextmanager
def written():
    """Collect what this rank writes on standard error."""
    lines = []
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        yield lines
    lines += text.getvalue().splitlines()


def batches(count, rows):
    return [(np.zeros((rows, 2)), np.zeros(rows)) for _ in range(count)]


@ranks(1, 2, 3)
def test_rates_and_time_left(monkeypatch):
    """A first step of 100 s, then steps of 2 s with 8 images on each rank, a line every 10 s."""
    hvd.init()
    monkeypatch.setattr(module, "time", clock := Clock())
    size = hvd.size()
    with written() as lines:
        own = batches(21 - hvd.rank(), 8)  # ranks end at different steps
        for step, _ in enumerate(bar := hvd.progress(own, "epoch 3"), start=1):
            clock.now += 100 if step == 1 else 2
            bar.set_postfix(loss=1 / step, phase="a")
    clock.now += 100  # the rate is that of the loop
    assert bar.samples_per_s == pytest.approx(4 * size, rel=0.1)
    exchange = "" if size == 1 else ", exchange 0%"
    rate = f"{4 * size} images/s"  # without the first step
    expected = [
        f"epoch 3 step 1 of 21, loss 1, phase a{exchange}",
        f"epoch 3 step 6 of 21, {rate}, loss 0.167, phase a, 00:30 left{exchange}",
        f"epoch 3 step 11 of 21, {rate}, loss 0.0909, phase a, 00:20 left{exchange}",
        f"epoch 3 step 16 of 21, {rate}, loss 0.0625, phase a, 00:10 left{exchange}",
        f"epoch 3 step 21 of 21, {rate}, loss 0.0476, phase a, in 02:20{exchange}",
    ]
    assert lines == (expected if hvd.rank() == 0 else [])


@ranks(2)
def test_rates_are_those_of_as_many_ranks_as_there_are(monkeypatch):
    hvd.init()
    monkeypatch.setattr(module, "time", clock := Clock())
    with written(), hvd.progress(4) as bar:
        bar.update(8)
        for size in (2, 1, 1):  # the others have died
            monkeypatch.setattr(module.world, "size", lambda size=size: size)
            clock.now += 1
            bar.update(16 // size)  # of the same global batch
    monkeypatch.undo()
    assert bar.samples_per_s == pytest.approx(16)


@ranks(1)
def test_steps_without_samples_and_what_ends_early(monkeypatch):
    hvd.init()
    monkeypatch.setattr(module, "time", clock := Clock())
    with written() as lines, hvd.progress(5, initial=2) as bar:
        for _ in range(2):
            clock.now += 4
            bar.update()
    assert lines == ["step 4 of 5, 0.25 steps/s, in 00:08"]
    with written() as lines:
        for step in hvd.progress(iter("abc"), share=0.25, samples=lambda letter: 3):
            if step == "c":
                break
            clock.now += 1
    assert lines == ["step 2, 12 images/s, in 00:02"]
    assert list(hvd.progress(range(3), total=3)) == [0, 1, 2]
    with written(), contextlib.suppress(KeyError), hvd.progress(3):
        raise KeyError
    assert observers.current == ()
    for arguments in ({"iterable": -1}, {"iterable": 1, "initial": -1}):
        with pytest.raises(ValueError, match="integer of 0 or more"):
            hvd.progress(**arguments)
    with pytest.raises(ValueError, match="share=0"):
        hvd.progress(1, share=0)


@ranks(1)
def test_the_bar_goes_on_where_rank_0_has_died(monkeypatch):
    hvd.init()
    monkeypatch.setattr(module.world, "rank", lambda: 1)
    with written() as lines, hvd.progress(3) as bar:
        bar.update()
        bar.update()
        monkeypatch.undo()
        bar.update()
    assert [line[:11] for line in lines] == ["step 3 of 3"]
    assert observers.current == ()


@ranks(1)
def test_samples_in_a_batch():
    images, labels = np.zeros((3, 2)), np.zeros(3)
    for batch in (images, (images, labels), [images, labels], {"x": (images,)}, [1, 2, 3], "abc"):
        assert module.count_samples(batch) == 3
    assert module.count_samples(()) == module.count_samples(7) == 0


@ranks(2)
def test_share_of_exchange():
    """Rank 1 comes 0.05 s late to each exchange, so rank 0 waits most of the time."""
    hvd.init()
    with written() as lines:
        for _ in hvd.progress(6):
            time.sleep(0.05 * hvd.rank())
            hvd.allreduce(np.zeros(1))
    if hvd.rank() == 0:
        assert int(re.search(r"exchange (\d+)%$", lines[-1])[1]) > 50


@ranks(1)
def test_threads_that_wait_at_a_time_count_once(monkeypatch):
    hvd.init()
    with written(), hvd.progress(3) as bar:
        begin = time.monotonic_ns()
        for name, began, ended in (("a", 0, 2), ("b", 1, 3), ("c", 5, 6)):
            now = begin + ended * 10**9
            monkeypatch.setattr(module.time, "monotonic_ns", lambda now=now: now)
            bar._observe("waited", name, begin + began * 10**9)
        monkeypatch.undo()
    assert bar._waited == pytest.approx(4, abs=0.01)


@ranks(2)
def test_bytes_of_a_step():
    """Two ranks send half of 4 kB twice, as float16."""
    hvd.init()
    with written() as lines:
        for _ in hvd.progress(6):
            hvd.allreduce(np.zeros(1000, np.float32), compression=hvd.Compression.fp16)
    if hvd.rank() == 0:
        assert lines[-1].endswith(", sent 0.002 MB/step")


SCRIPT = """
import time
import numpy as np
import hvdlite as hvd

hvd.init()
batches = [np.zeros((32, 2))] * (40 - hvd.rank())
for step, _ in enumerate(bar := hvd.progress(batches, "epoch 1")):
    time.sleep(0.02)
    bar.set_postfix(loss=1 / (step + 1))
"""


@pytest.mark.parametrize("columns", [80, pytest.param(40, marks=pytest.mark.slow)])
def test_a_bar_in_a_terminal(tmp_path, columns):
    (tmp_path / "script.py").write_text(SCRIPT)
    run = "import sys; from hvdlite.launch.cli import main; sys.exit(main())"
    job = ["-np", "2", sys.executable, str(tmp_path / "script.py")]
    code, text = in_terminal([sys.executable, "-c", run, *job], columns)
    assert code == 0, text
    pictures = [each.rstrip() for each in re.split(r"\x1b\[K|[\r\n]+", text) if each.strip()]
    assert len(pictures) >= 3
    assert all(picture.startswith("epoch 1") for picture in pictures)
    assert all(len(picture) < columns for picture in pictures)  # no picture takes two lines
    rate = r"\d[\d,]* images/s, loss 0\.025"
    if columns == 80:
        assert re.fullmatch(rf"epoch 1 100% \|█+\| {rate}, in 00:0\d, exchange \d+%", pictures[-1])
        assert len(pictures[-1]) == 79
    else:
        # What is too long is cut.
        assert re.fullmatch(r"epoch 1 100% \|█\| \d[\d,]* images/s.*", pictures[-1])
    assert text.count("\n") == 1  # one bar, of one rank


def test_lines_in_a_terminal_without_tqdm(tmp_path):
    (tmp_path / "script.py").write_text(f"import sys\nsys.modules['tqdm'] = None\n{SCRIPT}")
    run = "import sys; from hvdlite.launch.cli import main; sys.exit(main())"
    job = ["-np", "2", sys.executable, str(tmp_path / "script.py")]
    code, text = in_terminal([sys.executable, "-c", run, *job], 80)
    assert code == 0, text
    words = r"epoch 1 step 40 of 40, \d[\d,]* images/s, loss 0\.025, in 00:0\d, exchange \d+%"
    # The launcher may show a line's beginning before its end.
    pictures = [each for each in re.split(r"\x1b\[K|[\r\n]+", text) if each]
    assert re.fullmatch(words, pictures[-1])
    assert text.count("\n") == 1


def in_terminal(command, columns):
    """Run a command in a terminal, and return its exit code and what it has written there."""
    process, terminal = pty.fork()
    if process == 0:
        fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.execvpe(command[0], command, mpirun.environment({}))
    text = b""
    with contextlib.suppress(OSError):  # at the end
        while data := os.read(terminal, 1 << 16):
            text += data
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), text.decode()
