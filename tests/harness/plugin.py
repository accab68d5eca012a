"""The pytest plugin that sends tests marked with ``ranks`` to jobs of that many ranks."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from tests.harness.job import Job, JobError
from tests.harness.messages import Report, Request

# The number of ranks in all processes of pytest-xdist together: one that has imported PyTorch and
# TensorFlow takes nearly 1 GB. A plain session has fewer in one environment.
_MAX_RANKS = 12


class Jobs:
    """The jobs of a session, by number of ranks and environment, started when first used.

    Those that have not been used for longest end when there would be too many ranks.
    """

    def __init__(self) -> None:
        self._jobs: dict[tuple[int, str], Job] = {}
        self._room = _MAX_RANKS // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))

    def get(self, size: int, env: Mapping[str, str]) -> Job:
        """Return a running job of `size` ranks with these environment variables."""
        key = (size, _words(env))
        job = self._jobs.pop(key, None)
        if job is None or not job.alive:
            while self._jobs and sum(each for each, _ in self._jobs) + size > self._room:
                _end([self._jobs.pop(next(iter(self._jobs)))])
            job = Job(size, env)
        self._jobs[key] = job  # the last is the one used last
        return job

    def end(self) -> None:
        """End all jobs, which takes as long as the slowest."""
        _end(self._jobs.values())


def _end(jobs: Iterable[Job]) -> None:
    running = [job for job in jobs if job.alive]
    for job in running:
        job.leave()
    for job in running:
        job.join()


_JOBS = pytest.StashKey[Jobs]()
_FRAMEWORKS = ("keras", "tensorflow", "torch")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose tests."""
    parser.addoption(
        "--fast",
        action="store_true",
        help="run each test on one number of ranks (two if it can), and none that is marked slow",
    )
    parser.addoption(
        "--ranks",
        type=int,
        action="append",
        metavar="N",
        help="run only the tests on N ranks (may be repeated)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks and create the place for the jobs."""
    config.addinivalue_line("markers", "ranks(*sizes): run on every rank (see tests.harness.ranks)")
    config.addinivalue_line("markers", "slow: left out by --fast")
    config.stash[_JOBS] = Jobs()


def pytest_unconfigure(config: pytest.Config) -> None:
    """End the jobs; this is called after an interrupt, too."""
    config.stash[_JOBS].end()


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per number of ranks."""
    mark = metafunc.definition.get_closest_marker("ranks")
    if mark is None:
        return
    if "size" not in metafunc.fixturenames:
        metafunc.fixturenames.append("size")
    metafunc.parametrize("size", mark.args, ids=[f"{size}ranks" for size in mark.args])


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests that share a job, or a fixture of their module.

    pytest-xdist (``--dist loadgroup``) keeps them together. It reads the marks when all are
    collected. The tests of a framework are a group of their own, so that its ranks alone import it.
    """
    if not item.config.pluginmanager.hasplugin("xdist"):
        return
    mark, size = item.get_closest_marker("ranks"), _size(item)
    if size and not mark.kwargs["fresh"]:
        group = f"{size} ranks {_framework(item)}{_words(mark.kwargs['env'])}"
        item.add_marker(pytest.mark.xdist_group(group.strip()))
    elif size is None and _uses_fixture_of_module(item):
        item.add_marker(pytest.mark.xdist_group(item.module.__name__))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that the command line asks for."""
    for item in items:
        # With pytest 9.2 pytest-xdist 3.8 does not, and nearly every test would start a job.
        if item.get_closest_marker("xdist_group") and not _is_grouped(item):
            raise pytest.UsageError("this pytest-xdist cannot group the tests of this pytest")
    deselected = [item for item in items if not _is_chosen(item)]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if _is_chosen(item)]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Refuse a test that leaves pytest's own process a rank, which others do not expect."""
    hvdlite = sys.modules.get("hvdlite")
    if hvdlite is not None and hvdlite.is_initialized():
        hvdlite.shutdown()
        pytest.fail("hvd.init() in pytest's own process: mark the test with @ranks", pytrace=False)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test in a job instead of here."""
    mark = pyfuncitem.get_closest_marker("ranks")
    if mark is None:
        return None
    request = _request(pyfuncitem)
    try:
        reports = _run(pyfuncitem, request, mark.kwargs)
    except JobError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
    for report in reports:
        pyfuncitem.add_report_section(
            "call", f"stdout and stderr of rank {report.rank}", report.output
        )
    _conclude(reports, mark.kwargs["timeout"])
    return True


def _uses_fixture_of_module(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    info = item._fixtureinfo
    found = [info.name2fixturedefs.get(name, ()) for name in info.argnames]
    return any(each[-1].scope == "module" for each in found if each)


def _framework(item: pytest.Item) -> str:
    """Return the framework that a test is about, by its folder, its file or its name."""
    places = (item.path.parent.name, item.path.stem, getattr(item, "originalname", ""))
    names = [place.removeprefix("test_") for place in places]
    return next((name for name in names if name in _FRAMEWORKS), "")


def _is_grouped(item: pytest.Item) -> bool:
    return "@" in item.nodeid or not getattr(item.config.option, "loadgroup", False)


def _words(env: Mapping[str, str]) -> str:
    return "".join(f" {name}={value}" for name, value in sorted(env.items()))


def _is_chosen(item: pytest.Item) -> bool:
    size, sizes = _size(item), item.config.getoption("ranks")
    if sizes and size not in sizes:
        return False
    if not item.config.getoption("fast"):
        return True
    if item.get_closest_marker("slow"):
        return False
    return size is None or size in _fast_sizes(item.get_closest_marker("ranks"))


def _fast_sizes(mark: pytest.Mark) -> tuple[int, ...]:
    """Return the numbers of ranks on which --fast runs a test."""
    return mark.kwargs["fast"] or ((2,) if 2 in mark.args else (min(mark.args),))


def _size(item: pytest.Item) -> int | None:
    marked = item.get_closest_marker("ranks") and isinstance(item, pytest.Function)
    return item.callspec.params["size"] if marked else None


def _request(item: pytest.Function) -> Request:
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    local = [name for name, value in arguments.items() if isinstance(value, pytest.MonkeyPatch)]
    filters = list(item.config.getini("filterwarnings"))
    for mark in reversed(list(item.iter_markers("filterwarnings"))):
        filters.extend(mark.args)
    return Request(
        module=item.module.__name__,
        qualname=".".join(filter(None, [item.cls and item.cls.__qualname__, item.originalname])),
        arguments=_pickle({name: arguments[name] for name in arguments if name not in local}),
        local_fixtures=tuple(local),
        settings=item.get_closest_marker("ranks").kwargs["settings"],
        filters=tuple(filters),
        path=tuple(sys.path),
    )


def _pickle(arguments: dict[str, Any]) -> bytes:
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as error:
            pytest.fail(
                f"the argument {name!r} ({type(value).__name__}) cannot be sent to the ranks: "
                f"{error}. Pass something that can be pickled, and build the rest in the test.",
                pytrace=False,
            )
    return pickle.dumps(arguments)


def _run(item: pytest.Function, request: Request, options: Mapping[str, Any]) -> list[Report]:
    size, timeout = _size(item), options["timeout"]
    if not options["fresh"]:
        return item.config.stash[_JOBS].get(size, options["env"]).run(request, timeout)
    job = Job(size, options["env"])
    start = time.monotonic()
    reports = job.run(request, timeout)
    if job.alive:
        job.finish(max(1.0, timeout - (time.monotonic() - start)))
    return reports


def _conclude(reports: list[Report], timeout: float) -> None:
    """Turn the ranks' reports into this test's outcome."""
    outcomes = {report.outcome for report in reports}
    if not outcomes <= {"passed", "skipped"}:
        guilty_first = sorted(reports, key=lambda report: _TOLD.index(report.outcome))
        text = "\n\n".join(_describe(report, timeout) for report in guilty_first)
        raise pytest.fail.Exception(text, pytrace=False)
    if "skipped" in outcomes:
        reasons = {report.text: report.rank for report in reversed(reports) if report.text}
        pytest.skip("; ".join(f"rank {rank}: {reason}" for reason, rank in reasons.items()))


_TOLD = ("died", "failed", "silent", "ended", "skipped", "passed")


def _describe(report: Report, timeout: float) -> str:
    said = {
        "died": "died; mpirun wrote:\n",
        "failed": "failed: ",
        "silent": f"did not report in {timeout:g} s or soon after another had failed; it is at\n",
        "ended": "was ended by mpirun when another rank had died; it was at\n",
        "skipped": "skipped: ",
        "passed": "passed",
    }
    return f"rank {report.rank} {said[report.outcome]}{report.text}".rstrip()
