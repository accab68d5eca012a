"""The tables show the interface and the settings as they are, and a test of each call."""

import pytest

from tests import api_table


@pytest.fixture(scope="module")
def table():
    for module in ("torch", "tensorflow", "keras"):
        pytest.importorskip(module)
    return api_table.table()


@pytest.mark.slow
def test_it_is_up_to_date(table):
    assert api_table.TABLE.read_text() == table, "run `python -m tests.api_table`"


def test_the_strategies_are_up_to_date():
    text = api_table.about_strategies()
    assert api_table.STRATEGIES.read_text() == text, "run `python -m tests.api_table`"
    assert "| `TopK(ratio, count, per)` | Send the entries of the greatest" in text


def test_the_settings_are_up_to_date():
    text = api_table.environment()
    assert api_table.ENVIRONMENT.read_text() == text, "run `python -m tests.api_table`"
    assert "| `HVDLITE_CACHE_CAPACITY=1024` | a number of calls, 0 or more | Named calls" in text


@pytest.mark.slow
def test_no_cell_is_empty(table):
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    for row in rows:
        cells = [cell.strip(" `") for cell in row.replace("\\|", "").strip("|").split("|")]
        assert len(cells) == 3, row
        assert all(cells), row


@pytest.mark.slow
def test_a_call_without_a_test_is_noticed():
    with pytest.raises(LookupError, match=r"no test uses hvdlite\.no_such_call"):
        api_table.covering_test("hvdlite", "no_such_call")
