"""Options that several commands have, and their values."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from hvdlite.errors import StartError
from hvdlite.launch.options import at_least


def numbers(text: str) -> list[int]:
    """Return the numbers of ranks in a text such as ``1,2,4``, in ascending order."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected numbers of ranks as in 1,2,4")
    return sorted({int(word) for word in words})


positive = at_least(1)


def above_zero(value: Any) -> float:
    """Return a finite number above 0."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"found {value!r}, expected a number above 0")
    return number


def add_hosts(parser: argparse.ArgumentParser) -> None:
    """Add the options that say where ranks run."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOSTS", help="as for hvdliterun: node1:2,node2:2")
    where.add_argument("--hostfile", metavar="FILE", help="as for hvdliterun")


def add_plot(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the file of a plot."""
    parser.add_argument("--plot", metavar="FILE", help="write a plot: .png, .pdf or .svg")


def check_file(option: str, path: str) -> None:
    """Refuse the name of a file that could not be written in the end."""
    folder = Path(path).parent
    if Path(path).is_dir():
        raise StartError(f"{option} {path}: it is a folder; name a file")
    if not folder.is_dir():
        raise StartError(f"{option} {path}: there is no folder {folder}; make it first")
