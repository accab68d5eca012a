import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


IMAGES = 333
"""What `few_digits` leaves of 1,437."""


def few_digits(monkeypatch):
    """Have the scripts, imported by their bare names, train on a few images."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import digits

    whole = digits.load

    def load(folder=None):
        found = whole(folder)
        return found._replace(train=digits.Samples(*(each[:IMAGES] for each in found.train)))

    monkeypatch.setattr(digits, "load", load)


@pytest.fixture
def example(monkeypatch):
    """Import a file of examples/ as it is imported there: by its bare name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module
