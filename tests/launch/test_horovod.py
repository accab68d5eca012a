"""Scripts that import horovod get hvdlite."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from hvdlite.horovod import util
from hvdlite.horovod.finder import FOLDERS, METADATA
from hvdlite.horovod.names import MODULES, REASONS, VERSION
from hvdlite.launch.cli import with_paths
from tests.launch.launcher import ROOT, environment, hvdliterun

pytestmark = pytest.mark.timeout(120)


def python(*arguments, cwd=ROOT, path=(), **options):
    """Run Python with the repository, and other folders before it, on its path."""
    variables = {"PYTHONPATH": ":".join(map(str, [*path, ROOT]))}
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment(variables),
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=240,
        **options,
    )


def under_horovod(code, **options):
    """Run code with the alias, and return the lines that it prints."""
    done = python("-m", "hvdlite.horovod", "-c", code, **options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def raised(statement, kind):
    """Code that prints what a statement raises."""
    return f"try: exec({statement!r})\nexcept {kind} as error: print(type(error).__name__, error)"


@pytest.fixture
def another_horovod(tmp_path):
    """A folder with an installed Horovod."""
    package = tmp_path / "site" / "horovod"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("print('the real one')\n")
    return package.parent


def test_the_names_of_the_core():
    lines = under_horovod(
        "import hvdlite, horovod, horovod.common.util as util\n"
        "from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt\n"
        "from horovod.common.basics import *\n"
        "print(horovod.__version__, horovod.run is horovod.runner.run is hvdlite.run)\n"
        "print(HorovodInternalError is hvdlite.HorovodInternalError, rank is hvdlite.rank)\n"
        "print(util.nccl_built(verbose=True) == hvdlite.nccl_built(), Average, util.__name__)\n"
        "import inspect\n"
        "print(inspect.getfile(horovod) == hvdlite.__file__, inspect.getfile(util))\n"
        + raised("from horovod.common.util import is_iterable", "ImportError")
    )
    assert lines[:3] == ["0.28.1 True", "True True", "True 0 horovod.common.util"]
    assert lines[3] == f"True {util.__file__}"
    assert "hvdlite has no answer for horovod.common.util.is_iterable; in horovod." in lines[4]
    assert "split_list" in lines[4]


def test_the_version_as_libraries_ask_for_it():
    code = "from importlib.metadata import version; print(version('horovod'), version('numpy'))"
    assert under_horovod(code) == [f"{VERSION} {np.__version__}"]
    # In a process with nothing but the folder, before the first import.
    done = python("-c", code, path=[METADATA])
    assert done.stdout.split() == [VERSION, np.__version__]
    missing = python("-c", code)
    assert "PackageNotFoundError" in missing.stderr


def test_pytorch():
    pytest.importorskip("torch")
    lines = under_horovod(
        "import importlib.util, torch, hvdlite.torch\n"
        "from torch import cuda\n"
        "from hvdlite.torch.wrapping import Wrapped, change_class\n"
        "def name():\n"
        "    plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)\n"
        "    kind = type(change_class(plain, Wrapped, {}))\n"
        "    return kind.__name__, 'horovod' in str(kind)\n"
        "print(importlib.util.find_spec('horovod.torch').name, *name())\n"
        "import horovod.torch as hvd\n"
        "import horovod.torch.mpi_ops as ops\n"
        "from horovod.torch.compression import Compression\n"
        "from horovod.torch.functions import broadcast_object\n"
        "from horovod.torch import *\n"
        "print(all(getattr(hvd, n) is getattr(hvdlite.torch, n) for n in hvdlite.torch.__all__))\n"
        "print(ops.allreduce_async_ is allreduce_async_ is hvdlite.torch.allreduce_async_)\n"
        "print(Compression is hvd.Compression, hvd.mpi_ops is ops, hvd.Average == 0)\n"
        "print(hvd.gpu_available('torch') is ops.gpu_available('torch') is cuda.is_available())\n"
        # Programs look for Horovod's name in the class's, and import its module.
        "print(*name())\n"
        "import horovod.torch.optimizer as module\n"
        "print(module.DistributedOptimizer is hvd.DistributedOptimizer)\n"
        "print(hasattr(hvd, 'nosuch'), hasattr(hvd, '__nosuch__'))\n"
        + raised("hvd.nosuch", "AttributeError")
        + "\n"
        + raised("from horovod.torch import nosuch", "ImportError")
    )
    assert lines[:4] == ["horovod.torch SGD False", "True", "True", "True True True"]
    assert lines[4:8] == ["True", "SGD True", "True", "False False"]
    for line, kind in zip(lines[8:], ("AttributeError", "ModuleNotFoundError"), strict=True):
        assert line.startswith(f"{kind} hvdlite has no answer for horovod.torch.nosuch; in ")
        assert "allreduce_async_, " in line


# Not in horovod.tensorflow, whose start logs: see tests/tensorflow/test_sessions.py.
OUTER = [name for name in REASONS if name.count(".") == 1]


def test_modules_without_an_answer():
    names = [*OUTER, "horovod.spark.torch", "horovod.nosuch"]
    block = "import sys; sys.modules['hvdlite.keras'] = None"
    code = [raised(f"import {name}", "ImportError") for name in names]
    code += [block, raised("import horovod.keras", "ImportError")]
    *lines, broken = under_horovod("\n".join(code))
    for name, line in zip(names, lines, strict=True):
        outermost = ".".join(name.split(".")[:2])
        assert line.startswith(f"ModuleNotFoundError hvdlite has no answer for {outermost}; ")
        assert REASONS.get(outermost, "in horovod there is: ") in line
    assert broken.startswith(
        "ImportError hvdlite has no answer for horovod.keras: hvdlite.keras cannot be imported"
    )


def test_every_answer_lies_in_another():
    for name in MODULES:
        outer = name.rpartition(".")[0]
        assert not outer or outer in MODULES


def test_only_then(another_horovod):
    missing = python("-c", "import hvdlite, hvdlite.horovod, horovod")
    assert missing.returncode == 1
    assert "No module named 'horovod'" in missing.stderr
    real = python("-c", "import hvdlite, horovod", path=[another_horovod])
    assert (real.returncode, real.stdout) == (0, "the real one\n")


def test_an_installed_horovod_is_not_picked_up(another_horovod):
    code = "import horovod; print(horovod.__version__)"
    assert under_horovod(code, path=[another_horovod]) == ["0.28.1"]
    # Not even where it lies beside the code, as in a checkout of Horovod.
    assert under_horovod(code, cwd=another_horovod) == ["0.28.1"]


def test_an_imported_horovod_is_not_replaced(another_horovod):
    code = "import horovod, hvdlite.horovod; hvdlite.horovod.install()"
    done = python("-c", code, path=[another_horovod])
    assert "ImportError: horovod has been imported already" in done.stderr


_SHOW = """
import sys
print(sys.argv, __name__, globals().get("__file__"), repr(sys.path[0]), flush=True)
"""


@pytest.mark.parametrize("how", ["script", "module", "package", "code"])
def test_as_with_plain_python(how, tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "show.py").write_text(_SHOW)
    (tmp_path / "inner" / "__main__.py").write_text(_SHOW)
    command = {
        "script": ["inner/show.py"],
        "module": ["-m", "inner.show"],
        "package": ["-m", "inner"],
        "code": ["-c", _SHOW],
    }[how]
    arguments = [*command, "a", "-m", "--b"]
    plain = python(*arguments, cwd=tmp_path)
    alias = python("-m", "hvdlite.horovod", *arguments, cwd=tmp_path)
    assert (alias.returncode, alias.stderr) == (0, "")
    assert plain.stdout == alias.stdout
    assert "'a', '-m', '--b'" in plain.stdout


def test_exit_codes_and_mistakes(tmp_path):
    assert python("-m", "hvdlite.horovod", "-c", "import sys; sys.exit(7)").returncode == 7
    failed = python("-m", "hvdlite.horovod", "-c", "raise KeyError('reason')")
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "KeyError: 'reason'")
    for arguments, words in (
        (["/no/script.py"], "/no/script.py: no such file"),
        (["-m"], "-m needs an argument"),
        (["-u", "script.py"], "-u: not known here"),
        ([], "python -m hvdlite.horovod SCRIPT"),
    ):
        done = python("-m", "hvdlite.horovod", *arguments)
        assert done.returncode in (1, 2)
        assert words in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert python("-m", "hvdlite.horovod", "--help").returncode == 0


_STARTS_OTHERS = """
import multiprocessing, subprocess, sys
import horovod

def child(word):
    import horovod.common.util
    return word + horovod.__version__

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(pool.map(child, ["v"]))
    code = "import horovod.common.util, horovod; print(horovod.__version__)"
    print(subprocess.check_output([sys.executable, "-c", code], text=True).strip())
"""


@pytest.mark.slow
def test_processes_that_a_script_starts(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_STARTS_OTHERS)
    done = python("-m", "hvdlite.horovod", script, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["['v0.28.1']"] * 3 + ["0.28.1"]


_RUNS = """
import horovod

def function(x):
    import horovod.common.basics as hvd
    hvd.init()
    return horovod.__version__, hvd.rank() * x

print(horovod.run(function, (3,), np=2))
"""


def test_a_function_of_a_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(_RUNS)
    done = python("-m", "hvdlite.horovod", script, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "[('0.28.1', 0), ('0.28.1', 3)]\n"


@pytest.mark.parametrize(("path", "others"), [(None, ""), ("", ""), ("/a", ":/a"), (":/a", "::/a")])
def test_the_path_of_other_processes_keeps_its_entries(path, others):
    """An empty one among them is the current folder."""
    before = {"A": "b"} if path is None else {"A": "b", "PYTHONPATH": path}
    assert with_paths(before, "horovod") == {"A": "b", "PYTHONPATH": ":".join(FOLDERS) + others}


_ANY = """
import hidden
import horovod.common.basics as hvd
hvd.init()
print(hvd.size(), hidden.found, flush=True)
"""


def test_hvdliterun_with_any_command(tmp_path, another_horovod):
    # A Horovod beside the script, and a sitecustomize that the user has.
    (another_horovod / "script.py").write_text(_ANY)
    (tmp_path / "sitecustomize.py").write_text("import hidden; hidden.found = True")
    (tmp_path / "hidden.py").write_text("found = False")
    line = f"{sys.executable} {another_horovod}/script.py; true"
    result = hvdliterun(
        *("--horovod", "-np", 2, "env", "sh", "-c", line), env={"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines() == ["2 True"] * 2


def test_horovodrun_is_horovods_own_where_that_is_installed(tmp_path, another_horovod):
    (tmp_path / "script.py").write_text("import horovod; print(horovod.__version__)")
    start = "import sys; from hvdlite.launch.cli import horovodrun; sys.exit(horovodrun())"
    words = ["-c", start, "-np", 1, sys.executable, tmp_path / "script.py"]
    done = python(*words)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{VERSION}\n", "")
    launch = another_horovod / "horovod" / "launch.py"
    launch.write_text("def run_commandline(): print('its own launcher'); return 3")
    info = another_horovod / "horovod-0.28.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\n")
    (info / "entry_points.txt").write_text(
        "[console_scripts]\nhorovodrun = horovod.launch:run_commandline\n"
    )
    done = python(*words, path=[another_horovod])
    assert (done.returncode, done.stdout) == (3, "the real one\nits own launcher\n")


def test_hvdlite_that_is_a_folder_only():
    code = """
import hvdlite.horovod, sys
sys.modules["hvdlite"].__file__ = None
hvdlite.horovod.install()
"""
    done = python("-c", code)
    assert done.returncode == 1
    assert "/hvdlite for the package hvdlite; start in another folder" in done.stderr
