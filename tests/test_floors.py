"""The rule of floors: a file imports from its own room, or from a room on a lower floor.

Rooms beside the core may import from all of the core; only the facade and the tools, which use
hvdlite as programs do, import them. Each room has a budget of lines, so that a feature gives back
what it adds, there or elsewhere: their sum may only shrink. ``python -m tests.test_floors`` prints
the sizes.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_BESIDE, _FACADE, _TOOLS = 10, 11, 12

# Each room's floor, its budget of lines, and its modules. A package stands for all in it, but for
# what another room names.
ROOMS: dict[str, tuple[int, int, str]] = {
    "base": (1, 1503, "base errors version"),
    "world": (2, 807, "world"),
    "observe": (2, 1198, "observe"),
    "transport": (3, 3747, "transport"),
    "engine": (4, 3729, "engine"),
    "compression": (5, 2698, "compression"),
    "collectives": (6, 1906, "collectives"),
    "gradients": (7, 3341, "gradients"),
    "recipe": (7, 2418, "recipe"),
    "torch": (8, 6090, "torch"),
    "tensorflow": (8, 2921, "tensorflow"),
    "keras": (9, 2214, "keras tensorflow.keras"),
    "elastic": (
        _BESIDE,
        2534,
        "elastic keras._elastic keras.elastic tensorflow.elastic tensorflow.keras.elastic "
        "torch.elastic",
    ),
    "virtual": (_BESIDE, 1917, "tensorflow.virtual torch.virtual virtual"),
    "schedule": (
        _BESIDE,
        1220,
        "schedule tensorflow.local_steps torch.scheduled",
    ),
    "horovod": (_BESIDE, 394, "horovod"),
    "launch": (_BESIDE, 3472, "launch"),
    "tools": (_TOOLS, 3920, "__main__ tensorflow.benchmark tools torch.benchmark"),
    "facade": (_FACADE, 571, "common"),
}
# What gathers the public names of an adapter: it may import all that it names.
_FACADES = {"keras", "keras._public", "tensorflow", "tensorflow.keras", "torch"}
_OF = {module: room for room, (_, _, modules) in ROOMS.items() for module in modules.split()}


@cache
def files() -> dict[str, Path]:
    """Return all files by module, without the package's name."""
    paths = [
        path
        for top in ("hvdlite", "adapters")
        for path in (_ROOT / top).glob("**/*.py")
        if path.relative_to(_ROOT).parts[:2] not in _LINKS
    ]
    names = [path.relative_to(_ROOT).with_suffix("").parts[1:] for path in paths]
    return {
        ".".join(parts[:-1] if parts[-1] == "__init__" else parts): path
        for parts, path in zip(names, paths, strict=True)
    }


_LINKS = [("hvdlite", name) for name in ("torch", "tensorflow", "keras")]


def room_of(module: str) -> str:
    """Return the room of a module."""
    if module in _FACADES:
        return "facade"
    while module and module not in _OF:
        module = module.rpartition(".")[0]
    return _OF.get(module, "facade")


def _imports(path: Path) -> Iterator[str]:
    """Yield the modules of the package that a file imports, also in functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, module = name.partition(".")
            if package == "hvdlite":
                yield module if module in files() else module.rpartition(".")[0]


def _broken(module: str) -> set[str]:
    """Return what a module imports against the rule."""
    room = room_of(module)
    others = {each for each in _imports(files()[module]) if room_of(each) != room}
    return {each or "hvdlite" for each in others if ROOMS[room_of(each)][0] >= ROOMS[room][0]}


def test_files_import_from_lower_floors_only():
    found = {module: _broken(module) for module in files() if room_of(module) != "facade"}
    found = {module: sorted(targets) for module, targets in found.items() if targets}
    assert not found, "these imports break the rule of floors (docs/contributing.md)"


def _texts(room: str) -> list[str]:
    return [path.read_text() for module, path in files().items() if room_of(module) == room]


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_keep_their_budgets(room):
    lines = sum(len(text.splitlines()) for text in _texts(room))
    assert lines <= ROOMS[room][1], "what is added gives something else back"


def main() -> None:
    """Print the size of each room, and of all."""
    total: Counter[str] = Counter()
    print(f"{'':<12}{'lines':>8}{'budget':>8}{'files':>8}{'classes':>9}")
    for room, (_, budget, _) in ROOMS.items():
        texts = _texts(room)
        size = Counter(
            lines=sum(len(text.splitlines()) for text in texts),
            budget=budget,
            files=len(texts),
            classes=sum(
                isinstance(each, ast.ClassDef) for t in texts for each in ast.walk(ast.parse(t))
            ),
        )
        total += size
        print(f"{room:<12}{size['lines']:>8}{budget:>8}{size['files']:>8}{size['classes']:>9}")
    print(
        f"{'all':<12}{total['lines']:>8}{total['budget']:>8}{total['files']:>8}{total['classes']:>9}"
    )


if __name__ == "__main__":
    main()
