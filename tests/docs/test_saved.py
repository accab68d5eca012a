"""A script that a page tells its reader to save runs as it stands, by the command below it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import pages
from tests.launch import launcher

SAVED = re.compile(
    r"Save this as `([\w.]+)`.*?^```python\n(.*?)^```$(.*)", re.MULTILINE | re.DOTALL
)


def scripts():
    """Yield each script that a page has its reader save: its name, the code, and the command."""
    for page in pages.PAGES:
        rest = page.read_text()
        while found := SAVED.search(rest):
            name, code, rest = found.groups()
            words = next(c.words for c in pages.commands(rest, pages.name(page)) if name in c.words)
            slow = "torch" in code and page != pages.ROOT / "README.md"
            marks = pytest.mark.slow if slow else ()
            yield pytest.param(name, code, words, id=f"{pages.name(page)}-{name}", marks=marks)


SCRIPTS = [*scripts()]


def test_those_that_a_newcomer_meets_first_are_found():
    found = [script.id for script in SCRIPTS]
    assert {"README.md-train.py", "docs/quickstart.md-hello.py"} < {*found}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "code", "words"), SCRIPTS)
def test_it_runs_as_saved(name, code, words, tmp_path):
    for package in ("torch", "accelerate", "lightning", "transformers"):
        if re.search(rf"^(import|from) {package}\b", code, re.MULTILINE):
            pytest.importorskip(package)
    (tmp_path / name).write_text(code)
    variables = [word for word in words if re.fullmatch(r"[A-Z_]+=.*", word)]
    program, *arguments = words[len(variables) :]
    assert program == "hvdliterun"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {"PYTHONPATH": str(pages.ROOT), "PATH": path, **dict(v.split("=", 1) for v in variables)}
    done = subprocess.run(
        launcher.command(*arguments),
        cwd=tmp_path,
        env=launcher.environment(env),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    ranks = arguments[arguments.index("-np") + 1]
    assert ranks in done.stdout.splitlines()[-1]
