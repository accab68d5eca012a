"""The list of examples has every file, and each script says how it is started."""

import ast
import re

import pytest

from tests.examples.conftest import EXAMPLES

FILES = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh", ".ipynb"))
SCRIPTS = [path for path in FILES if "\nif __name__ ==" in path.read_text()]


def test_the_list_has_every_file():
    listed = re.findall(r"`(\w+\.(?:py|sh|ipynb))`", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == [path.name for path in FILES]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_first_lines_say_what_it_shows_and_how_to_start_it(script):
    first, *lines = ast.get_docstring(ast.parse(script.read_text()), clean=False).splitlines()
    assert first.endswith(".")
    assert any(re.match(rf"    .*\b{script.name}\b", line) for line in lines)
