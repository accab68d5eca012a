import importlib
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch):
    """Import a file of examples/ as it is imported there: by its bare name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module
