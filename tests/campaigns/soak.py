"""Soak: long jobs in which ranks stall, die and fail at random times, and what is left of them.

python -m tests.campaigns.soak --minutes 30
python -m tests.campaigns.soak --minutes 30 --set HVDLITE_SHARED_MEMORY=0

Each job has three ranks and six spares. Most jobs come to their end; some are killed as a whole, in
others only ``hvdliterun`` or mpirun is killed. The ranks report what they hold
(`tests/elastic/soaking_torch.py`), and the campaign requires that it does not grow, that the result
is right, and that neither a process of the job remains, nor, once another has started, a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.campaigns import add_settings, make_parser
from tests.harness import mpirun
from tests.launch import launcher

RANKS, SPARES = 3, 6  # as many die at most
MARK = "HVDLITE_SOAK"
"""The variable by which the processes of a job are known."""
_SCRIPT = "tests/elastic/soaking_torch.py"
_PACE = 0.03
_PAUSE = (1.0, 8.0)  # the least and the most seconds between two faults
_TICK = 0.05
_SECONDS_TO_START = 120.0
# Nothing changes for so long: the job hangs.
_PATIENCE = 90.0
_SECONDS_TO_GO = 10.0
_EXACT = ("descriptors", "threads", "segments", "mounted")
# KiB that a process may grow with each recovery or reset once it is warm, and beside that.
_GROWTH, _SLACK = 100.0, 3000.0
_WARM = 2  # changes of the ranks that a process has been through
_WATCHED = ("/dev/shm/", "/tmp/", "/run/", "/var/tmp/")


@dataclass
class Process:
    """A process of a job that has begun the script."""

    number: int  # at the start; those from `RANKS` on are spares
    pid: int = 0
    records: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0

    def update(self, folder: Path) -> None:
        """Read what it has reported since."""
        with contextlib.suppress(FileNotFoundError), (folder / f"{self.number}.jsonl").open() as f:
            f.seek(self._read)
            text = f.read()
            whole = text[: text.rfind("\n") + 1]
            self._read += len(whole.encode())
            self.records += map(json.loads, whole.splitlines())
        if self.records:
            self.pid = self.records[0]["pid"]

    @property
    def is_rank(self) -> bool:
        """Return whether it has trained."""
        return any(record["event"] != "start" for record in self.records)

    @property
    def step(self) -> int:
        """The last step that it has told."""
        return max((record.get("step", 0) for record in self.records), default=0)

    def is_alive(self) -> bool:
        """Return whether it runs or is stopped."""
        return self.pid > 0 and _is_alive(self.pid)

    def held(self) -> dict[str, list[int]]:
        """Return what it held after each change of the ranks to `RANKS`, once warm."""
        reports = [
            each
            for each in self.records
            if each["event"] == "usage" and each["first"] and each["size"] == RANKS
        ]
        return {
            name: [each[name] for each in reports[_WARM:]]
            for name in (*_EXACT, "memory", "communicators")
        }


class Job:
    """A job under ``hvdliterun``, its processes and files."""

    def __init__(self, extra: Mapping[str, str], spares: int = SPARES) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="soak-"))
        self.temporary = self.folder / "tmp"
        self.reports = self.folder / "reports"
        for each in (self.temporary, self.reports):
            each.mkdir()
        self.mark = self.folder.name
        self.processes = [Process(number) for number in range(RANKS + spares)]
        self.faults: Counter[str] = Counter()
        self.log: list[str] = []
        self.files: set[str] = set()  # that its processes had open or mapped
        self.pids: set[int] = set()
        own = {MARK: self.mark, "TMPDIR": str(self.temporary), "SOAK_PACE": str(_PACE)}
        own["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder / "inductor")  # made by PyTorch's import
        # Exceptions come at random, perhaps several between two commits.
        own["HVDLITE_ELASTIC_RETRIES"] = "0"
        self._environment = mpirun.environment({**own, **extra})
        self._looked = 0.0
        self._before = _names()
        self._mounts = _mounts()
        self.began = time.monotonic()
        self.output = self.folder / "output"
        with self.output.open("w") as output:
            self.launcher = subprocess.Popen(
                launcher.command(
                    *("-np", RANKS, "--elastic", "--spares", spares),
                    *(sys.executable, _SCRIPT, self.reports),
                ),
                env=self._environment,
                cwd=mpirun.ROOT,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def step(self) -> int:
        """The last step that any process has told."""
        return max(process.step for process in self.processes)

    @property
    def ranks(self) -> list[Process]:
        """The processes that train."""
        return [each for each in self.processes if each.is_rank and each.is_alive()]

    @property
    def waiting(self) -> list[Process]:
        """The spares that wait."""
        return [each for each in self.processes if not each.is_rank and each.is_alive()]

    def note(self, text: str) -> None:
        """Remember what has been done to the job, and when."""
        self.log.append(f"{time.monotonic() - self.began:.2f} s, step {self.step}: {text}")

    def look(self) -> None:
        """Read the reports, and now and then which files the processes use."""
        for process in self.processes:
            process.update(self.reports)
        if time.monotonic() > self._looked + 1.0:
            self._looked = time.monotonic()
            for pid in _marked(self.mark):
                self.pids.add(pid)
                self.files |= _files_of(pid)

    def wait_for_start(self) -> None:
        """Wait until the ranks train."""
        deadline = time.monotonic() + _SECONDS_TO_START
        while sum(each.step > 0 for each in self.processes) < RANKS:
            assert self.launcher.poll() is None, self.describe("the job ended at its start")
            assert time.monotonic() < deadline, self.describe("the job does not start")
            time.sleep(_TICK)
            self.look()
        self._looked = 0.0
        self.look()

    def describe(self, text: str) -> str:
        """Return a text with all that helps to find out what has happened."""
        reports = "\n".join(
            f"{each.number} ({each.pid}, {'alive' if each.is_alive() else 'gone'}): "
            f"{each.records[-1] if each.records else None}"
            for each in self.processes
        )
        output = self.output.read_text(errors="replace")[-6000:]
        log = "\n".join(self.log[-40:])
        return f"{text}\n{log}\n{reports}\n{output}\nfiles: {self.folder}"

    def end(self) -> None:
        """Kill all processes, those, too, that begin in the meantime."""
        for _ in range(3):
            for pid in _marked(self.mark):
                _signal(pid, signal.SIGKILL)
        self.launcher.wait()

    def wait_until_gone(self) -> float:
        """Wait until no process of the job is left; return how many seconds that took."""
        began = time.monotonic()
        while left := [pid for pid in _marked(self.mark) if _is_alive(pid)]:
            if time.monotonic() > began + _SECONDS_TO_GO:
                lines = "\n".join(f"{pid}: {_command_line(pid)}" for pid in left)
                raise AssertionError(self.describe(f"these processes stay:\n{lines}"))
            time.sleep(_TICK)
        return time.monotonic() - began

    def leftovers(self) -> list[str]:
        """Return the job's files that are still there, and mounts that were not there before."""
        inside = [str(path) for path in self.temporary.rglob("*")]
        used = [path for path in sorted(self.files) if not path.startswith(str(self.folder))]
        after = _names()
        own = re.compile("|".join([r"(?!)", *(rf"\.{pid}\b" for pid in self.pids)]))
        new = [path for path in after - self._before if own.search(path)]
        mounts = [line for line in _mounts() - self._mounts if str(self.folder) in line]
        return [*inside, *(path for path in used if os.path.exists(path)), *new, *mounts]

    def remove(self) -> None:
        """Remove the job's folder."""
        shutil.rmtree(self.folder)

    def next_start(self) -> None:
        """Start another job in the same place."""
        command = launcher.command("-np", 1, sys.executable, "-c", "")
        env = {**self._environment, MARK: "the next job"}
        subprocess.run(command, env=env, cwd=mpirun.ROOT, check=True, stdin=subprocess.DEVNULL)


def survive(job: Job, chance: random.Random, seconds: float) -> None:
    """Plant faults for some seconds, and then let the job come to its end.

    One of the first ranks is never killed, so that it lives through all recoveries.
    """
    job.wait_for_start()
    survivor = chance.randrange(RANKS)
    job.note(f"process {survivor} survives")
    stopped: list[tuple[float, Process]] = []
    began = moved = time.monotonic()
    following = began + chance.uniform(*_PAUSE)
    again = False  # another death follows at once
    last = 0
    deaths = fault_at = 0
    while job.launcher.poll() is None:
        time.sleep(0.01)
        job.look()
        now = time.monotonic()
        if job.step != last:
            last, moved = job.step, now
        assert now < moved + _PATIENCE, job.describe("the job hangs")
        for due, process in list(stopped):
            if now >= due:
                stopped.remove((due, process))
                _signal(process.pid, signal.SIGCONT)
        if now > began + seconds and not stopped:
            if job.step > fault_at + 20:  # the last spares have come in
                (job.reports / "stop").touch()
            continue
        if now < following:
            continue
        kind = (
            "kill" if again else chance.choices(["stop", "kill", "raise", "spare"], [9, 6, 4, 1])[0]
        )
        again = False
        following = now + chance.uniform(*_PAUSE)
        ranks, waiting = job.ranks, job.waiting
        mortal = [each for each in ranks if each.number != survivor] if kind == "kill" else waiting
        if kind == "stop":
            process, pause = chance.choice(ranks + waiting[:1]), chance.uniform(0.1, 3.0)
            job.note(f"stop {process.number} for {pause:.2f} s")
            _signal(process.pid, signal.SIGSTOP)
            stopped.append((now + pause, process))
        elif kind == "raise":
            process = chance.choice(ranks)
            job.note(f"raise in {process.number}")
            _signal(process.pid, signal.SIGUSR1)
        elif mortal and deaths < SPARES:
            process = chance.choice(mortal)
            job.note(f"kill {process.number}")
            _signal(process.pid, signal.SIGKILL)
            deaths += 1
            again = kind == "kill" and chance.random() < 0.25
            following = now + chance.uniform(0.0, 0.3) if again else following
        else:
            continue
        job.faults[kind] += 1
        fault_at = job.step
    job.look()
    code = job.launcher.returncode
    assert code == 0, job.describe(f"exit code {code}")
    output = job.output.read_text()
    left = re.findall(r"^left (\d+): (\d+) (\d+) (\w+)$", output, re.MULTILINE)
    assert len({tuple(rest) for _, *rest in left}) == 1, job.describe(f"the ranks differ: {left}")
    assert int(left[0][1]) == job.step, job.describe(f"steps: {left}")
    assert len(left) == int(left[0][2]) == RANKS, job.describe(f"ranks: {left}")
    assert str(survivor) in {number for number, *_ in left}, job.describe("the survivor is gone")


def check_growth(job: Job) -> list[str]:
    """Require that no process has grown; return a line for each that lived through changes."""
    lines = []
    for process in job.processes:
        held = process.held()
        memory, changes = held["memory"], len(held["memory"])
        if changes < 2:
            continue
        for name in _EXACT:
            text = f"process {process.number}: {name} {held[name]}"
            assert max(held[name]) <= held[name][0], job.describe(text)
        text = f"process {process.number}: {held}"
        assert memory[-1] - memory[0] < _SLACK + _GROWTH * changes, job.describe(text)
        values = ", ".join(f"{name} {each[0]}->{each[-1]}" for name, each in held.items())
        lines.append(f"process {process.number} in {changes} worlds: {values} (memory in KiB); ")
    return lines


def kill_one(job: Job, which: str) -> None:
    """Kill hvdliterun or mpirun."""
    found = [pid for pid in _marked(job.mark) if which in _command_line(pid).split(" -np ")[0]]
    for pid in found or [job.launcher.pid]:
        _signal(pid, signal.SIGKILL)
    job.launcher.wait()


def _wait_a_moment(job: Job, chance: random.Random) -> None:
    """Wait until some moment of the job's start or of its training, with a death shortly before."""
    deadline = time.monotonic() + chance.uniform(0.2, 25.0)
    killed = False
    while time.monotonic() < deadline and job.launcher.poll() is None:
        time.sleep(_TICK)
        job.look()
        ranks = [each for each in job.ranks if each.step > 0]
        if not killed and len(ranks) == RANKS and time.monotonic() > deadline - 2.0:
            killed = True
            _signal(chance.choice(ranks).pid, signal.SIGKILL)
            deadline = time.monotonic() + chance.uniform(0.0, 0.5)


def run(kind: str, chance: random.Random, seconds: float, extra: Mapping[str, str]) -> str:
    """Run a job of one kind, and return a line about it; if it fails, the job's folder is left.

    The kind is "well", which trains for some seconds, or what is killed: "all", "hvdliterun" or
    "mpirun".
    """
    job = Job(extra, SPARES if kind == "well" else 2)
    try:
        text = ""
        if kind == "well":
            survive(job, chance, seconds)
        else:
            _wait_a_moment(job, chance)
            if kind == "all":
                job.end()
            else:
                kill_one(job, "hvdlite.launch" if kind == "hvdliterun" else "prterun")
        gone = job.wait_until_gone()
        left = job.leftovers()
        if kind in ("all", "hvdliterun"):
            job.next_start()
            text = f"{len(left)} files were left until the next start; "
            left = job.leftovers()
        assert not left, job.describe("these are left:\n" + "\n".join(left))
        if kind == "well":
            text = f"{job.step} steps, {dict(job.faults)}; {''.join(check_growth(job))}"
        text = f"{text}gone after {gone:.2f} s"
    except BaseException:
        job.end()
        raise
    job.remove()
    return f"{kind}: {time.monotonic() - job.began:.0f} s, {text}"


def _marked(mark: str) -> list[int]:
    """Return the processes that have the mark of a job in their environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def _signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if there still is one."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in "ZX"


def _command_line(pid: int) -> str:
    try:
        return (
            Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        )
    except OSError:
        return ""


def _files_of(pid: int) -> set[str]:
    """Return the paths, in folders for temporary files, that a process has open or mapped."""
    found = set()
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            found.add(line.partition("/")[1] + line.partition("/")[2])
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(entry))
    root = str(mpirun.ROOT)
    return {
        path.removesuffix(" (deleted)")
        for path in found
        if path.startswith(_WATCHED) and not path.startswith((root, sys.prefix))
    }


def _names() -> set[str]:
    return {str(path) for folder in ("/dev/shm", "/tmp") for path in Path(folder).iterdir()}


def _mounts() -> set[str]:
    return set(Path("/proc/self/mounts").read_text().splitlines())


def kinds(chance: random.Random) -> Iterator[str]:
    """Yield the kinds of the jobs."""
    while True:
        yield "well"
        yield from chance.sample(["all", "hvdliterun", "mpirun", "all", "hvdliterun"], 3)


def main() -> None:
    """Run jobs for some minutes, and print a line about each."""
    parser = make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--job-minutes", type=float, default=3.0, help="of a job that ends well")
    parser.add_argument("--kind", choices=["well", "all", "hvdliterun", "mpirun"], help="only")
    add_settings(parser)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    end = time.monotonic() + 60.0 * options.minutes
    counts: Counter[str] = Counter()
    for kind in kinds(chance):
        left = end - time.monotonic()
        if left <= 0:
            break
        kind = options.kind or kind
        seconds = min(60.0 * options.job_minutes, max(left, 20.0))
        try:
            print(run(kind, chance, seconds, dict(options.set)), flush=True)
        except AssertionError as error:
            print(
                f"seed {options.seed}, job {sum(counts.values())} ({kind}) failed: {error}",
                flush=True,
            )
            raise SystemExit(1) from None
        counts[kind] += 1
    print(f"{sum(counts.values())} jobs ended well: {dict(counts)}")


if __name__ == "__main__":
    main()
