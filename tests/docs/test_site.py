"""The documentation builds without a warning, and its reference has every public call."""

import html
import re
import subprocess
import sys

import pytest

import hvdlite
from hvdlite.launch import options
from hvdlite.tools.cli import main, plots
from tests import api_table
from tests.docs import pages

INDEXES = [page for page in pages.PAGES if page.name == "index.md"]


@pytest.mark.parametrize("page", INDEXES, ids=pages.name)
def test_an_index_is_readable_in_the_repository(page):
    text = re.sub(r"^<!-- on the site\n.*?^-->$", "", page.read_text(), flags=re.M | re.DOTALL)
    assert not re.search(r"^(```|:::)\{", text, re.MULTILINE)
    if page.parent.name != "docs":  # that one has the folders' indexes in its comment
        linked = re.findall(r"^- \[.+?\]\((\w+)\.md\)", text, re.MULTILINE)
        assert sorted(linked) == sorted(
            {each.stem for each in page.parent.glob("*.md")} - {"index"}
        )


def test_a_contender_has_one_colour_in_all_figures():
    drawn = (pages.ROOT / "docs" / "figures" / "step_overhead.svg").read_text()
    assert {plots.COLORS["hvdlite"], plots.COLORS["ddp"]} < {*re.findall(r"#\w{6}", drawn)}


def text_of(page):
    """Return the text of a page of the site, without its tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", page.read_text()))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for framework in ("torch", "tensorflow", "keras"):
        pytest.importorskip(framework)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-E"]
    done = subprocess.run(
        [*command, "-d", folder / "doctrees", pages.ROOT / "docs", folder / "html"],
        cwd=pages.ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_it_builds_and_describes_each_public_call(site):
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    described = {name for kind in inventory.data.values() for name in kind}
    for module, _, names in api_table.SECTIONS:
        for name in names.split():
            if "." not in name:
                ways = (f"{module}.{name}", f"hvdlite.errors.{name}", f"hvdlite.elastic.{name}")
                assert described.intersection(ways), f"{module}.{name} is on no page"
    assert "hvdlite.gone" not in described


@pytest.mark.slow
def test_the_first_page_says_which_version_it_is_and_how_to_install_it(site):
    text = text_of(site / "index.html")
    assert f"hvdlite {hvdlite.__version__}" in text
    assert "pip install" in text
    assert "ShardSampler" in text  # of README.md
    assert "on the site" not in text


@pytest.mark.slow
def test_each_option_and_each_variable_is_on_its_page(site):
    text = text_of(site / "reference" / "command_line.html")
    for option in options.make_parser().options:
        assert option.option_strings[-1] in text, option
    for command in main.COMMANDS:
        assert f"hvdlite {command}" in text
    page = site / "reference" / "environment.html"
    assert "HVDLITE_FUSION_THRESHOLD" in text_of(page)
    assert "FUSION_</span><wbr>" in page.read_text()  # a narrow column breaks it there alone
