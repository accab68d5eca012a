"""Parts of pages that are made for the site: calls, command lines, examples, the list of pages."""

from __future__ import annotations

import argparse
import ast
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx

from hvdlite.launch import options
from hvdlite.tools.cli import main
from tests.api_table import ROOT, SECTIONS

_BLOCK = re.compile(
    r"^```\{(calls|options|examples)\} ?([\w.]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
# Directives that a reader of the repository would see as they stand are hidden from it.
_HIDDEN = re.compile(r"^<!-- on the site\n(.*?)^-->$", re.MULTILINE | re.DOTALL)
_PAGE = re.compile(r"^- \[.+?\]\((\w+)\.md\)", re.MULTILINE)
_REST = "..."


def expand(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace the blocks in a page.

    ``{calls} MODULE`` has names of the module; ``...`` stands for the public names that the
    page has nowhere else. ``{options} PROGRAM`` and ``{examples}`` have no content. A comment
    that begins with ``on the site`` is shown. The list of an index is its folder's navigation.
    """
    named = {name for block in _BLOCK.finditer(source[0]) for name in block[3].split()}

    def replacement(block: re.Match[str]) -> str:
        if block[1] == "options":
            return "\n".join(_programs(block[2]))
        if block[1] == "examples":
            return "\n".join(_examples())
        names = [
            name
            for word in block[3].split()
            for name in (_others(block[2], named) if word == _REST else [word])
        ]
        lines = [line for name in names for line in _directive(block[2], name)]
        return "\n".join(["```{eval-rst}", f".. py:currentmodule:: {block[2]}", *lines, "```"])

    if docname.endswith("/index"):
        pages = _PAGE.findall(source[0])
        source[0] += "\n".join(["", "```{toctree}", ":hidden:", "", *pages, "```", ""])
    source[0] = _BLOCK.sub(replacement, _HIDDEN.sub(r"\1", source[0]))


def _others(module: str, named: set[str]) -> list[str]:
    public = [name for owner, _, names in SECTIONS if owner == module for name in names.split()]
    rest = [name for name in public if name not in named and "." not in name]
    # Errors have a page.
    return [name for name in rest if not _is_error(getattr(importlib.import_module(module), name))]


def _is_error(found: Any) -> bool:
    return isinstance(found, type) and issubclass(found, BaseException)


def _members(kind: type) -> str:
    """Return what a class and its bases in hvdlite describe, and not what a framework adds."""
    return ", ".join(
        name
        for base in kind.__mro__
        if base.__module__.startswith("hvdlite")
        for name, value in vars(base).items()
        if not name.startswith("_") and not isinstance(value, type) and _is_described(value)
    )


def _is_described(member: Any) -> bool:
    function = getattr(member, "fget", None) or getattr(member, "__func__", member)
    own = str(getattr(function, "__module__", "")).startswith("hvdlite")
    return own and callable(function) and bool(function.__doc__)


def _directive(module: str, name: str) -> Iterator[str]:
    """Yield the lines of reStructuredText that describe an object."""
    found = getattr(importlib.import_module(module), name)
    yield ""
    if _is_error(found):
        yield f".. autoexception:: {module}.{name}"
        yield "   :show-inheritance:"
    elif isinstance(found, type):
        yield f".. autoclass:: {module}.{name}"
        if issubclass(found, enum.Enum):
            yield "   :members:\n   :undoc-members:"
        elif members := _members(found):
            yield f"   :members: {members}"
    elif inspect.isroutine(found):
        yield f".. autofunction:: {module}.{name}"
    else:
        yield f".. py:data:: {name}"
        yield ""
        yield f"   {inspect.getdoc(found) or ''}".splitlines()[0]


def _programs(program: str) -> Iterator[str]:
    """Yield the Markdown of a program's options, by its commands if it has some."""
    if program == "hvdliterun":
        yield from _usage(options.make_parser())
        return
    parser = main.make_parser()
    yield f"```text\n{parser.format_help()}```\n"
    for name, command in _commands(parser):
        if name != "run":  # the other program
            yield f"### `hvdlite {name}`\n"
            yield from _usage(command)


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield the commands of a parser, each before those that it has itself."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, command in action.choices.items():
                yield name, command
                yield from ((f"{name} {inner}", each) for inner, each in _commands(command))


def _examples() -> Iterator[str]:
    """Yield the scripts in examples/, each below the first line of its docstring."""
    for path in sorted((ROOT / "examples").glob("*.py")):
        summary = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]
        yield f"## {path.name}\n\n{_text(summary)}\n"
        yield f"```{{literalinclude}} /../examples/{path.name}\n:language: python\n```\n"


def _usage(parser: argparse.ArgumentParser) -> Iterator[str]:
    formatter = parser._get_formatter()
    usage = parser.format_usage().removeprefix("usage: ").rstrip()
    yield f"```text\n{usage}\n```\n\n{_text(parser.description)}\n"
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help is not argparse.SUPPRESS]
        actions = [a for a in actions if a.dest != "help"]
        actions = [a for a in actions if not isinstance(a, argparse._SubParsersAction)]
        if actions:
            yield f"**{group.title}**\n"
        for action in actions:
            default = action.dest.upper()
            values = formatter._format_args(action, action.metavar or default)
            spellings = [f"{name} {values}".strip() for name in action.option_strings]
            yield ", ".join(f"`{spelling}`" for spelling in spellings or [default])
            yield f": {_text(formatter._expand_help(action) if action.help else '')}\n"
    if parser.epilog:
        yield f"```text\n{parser.epilog.strip()}\n```\n"


def _text(text: str | None) -> str:
    """Return a help text as Markdown: options are code, other signs mean nothing."""
    plain = re.sub(r"([*_<>\[\]$])", r"\\\1", " ".join((text or "").split()))
    return re.sub(r"(?<![\w`-])(--?[a-zA-Z][\w-]*)", r"`\1`", plain)
