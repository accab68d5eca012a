"""The pages of the documentation, their blocks of Python, and their commands."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest import SkipTest

from sybil import Document
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Scripts of the reader's own.
OWN_SCRIPTS = {"train.py", "their_script.py", "script.py", "hello.py"}

_FRAMEWORKS = (("tensorflow", "keras"), ("torch",), ("jax",))
_BLOCK = re.compile(r"^ *```(console|sh|bash)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(
    r"`((?:hvdlite (?:run|check|bench|timeline|scale)|hvdliterun|make|mpirun) [^`]+)`"
)


def name(page: Path) -> str:
    """Return the path of a page in the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Document:
    """Parse the blocks of Python on a page, and the comments that skip some of them."""
    return Document.parse(str(page), PythonCodeBlockParser(), SkipParser())


def framework(page: Path) -> str:
    """Return the framework that the blocks of a page need, "core", or "" if it has no block."""
    source = "\n".join(str(example.parsed) for example in blocks(page))
    for names in _FRAMEWORKS:
        if re.search(rf"\bimport (hvdlite\.)?({'|'.join(names)})\b", source):
            return names[0]
    return "core" if source else ""


def run(page: Path, folder: Path, size: int) -> None:
    """Run the blocks of a page in this process, one of `size` ranks, with `folder` for files."""
    document = blocks(page)
    document.namespace |= {"__name__": "__main__", "size": size}
    before = os.getcwd()
    os.chdir(folder)
    try:
        for example in document:
            with contextlib.suppress(SkipTest):
                example.evaluate()
    finally:
        os.chdir(before)


@dataclass(frozen=True)
class Command:
    """A command that a page tells its reader to type.

    Attributes:
        place: where it stands.
        words: the command as a shell splits it; an ``&&`` is a word.
    """

    place: str
    words: tuple[str, ...]


def commands(text: str, place: str = "page") -> Iterator[Command]:
    """Yield the commands in a text: in blocks of ``console`` behind ``$``, in those of ``sh`` all.

    Of code within the text, those of hvdlite, make and mpirun; with an ellipsis they are no
    commands. A command that ends with a backslash goes on in the next line.
    """
    for block in _BLOCK.finditer(text):
        first = text.count("\n", 0, block.start(2)) + 1
        joined = re.sub(r"\\\n *(?:> )?(.*)", r" \1\n", block[2])  # with as many lines
        for number, line in enumerate(joined.splitlines(), first):
            line = line.strip()
            if block[1] == "console":
                line = line[2:] if line.startswith("$ ") else ""
            if words := shlex.split(line, comments=True):
                yield Command(f"{place}:{number}", tuple(words))
    for code in _CODE.finditer(_BLOCK.sub("", text)):
        if "..." not in code[1]:
            yield Command(f"{place}: `{code[1]}`", tuple(shlex.split(code[1])))
