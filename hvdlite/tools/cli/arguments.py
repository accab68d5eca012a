"""Values of options that several commands have."""

from __future__ import annotations

import argparse


def numbers(text: str) -> list[int]:
    """Return the numbers of ranks in a text such as ``1,2,4``, in ascending order."""
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected numbers of ranks as in 1,2,4")
    return sorted({int(word) for word in words})


def positive(text: str) -> int:
    """Return a number from 1 on."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a number from 1 on")
    return int(text)
