"""The blocks of Python on all pages run, on one rank and on two.

One start of a framework serves all pages: its job is that of the framework's other tests.
"""

import re

import pytest

from tests.docs import pages
from tests.harness import ranks

_BY_FRAMEWORK = {page: pages.framework(page) for page in pages.PAGES}


def pages_for(framework):
    """Parametrise a test by the pages whose blocks need a framework."""
    found = []
    for page in (page for page, needed in _BY_FRAMEWORK.items() if needed == framework):
        # TensorBoard imports TensorFlow, if there is one.
        slow = "summary_writer" in page.read_text()
        found.append(pytest.param(pages.name(page), marks=pytest.mark.slow if slow else ()))
    return pytest.mark.parametrize("page", found)


@ranks(2)
@pages_for("core")
def test_core(page, size, tmp_path):
    pages.run(pages.ROOT / page, tmp_path, size)


@ranks(2)
@pages_for("torch")
def test_torch(page, size, tmp_path):
    pytest.importorskip("torch")
    pages.run(pages.ROOT / page, tmp_path, size)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:keras")  # on batches that fit shuffles
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras saves
@ranks(2)
@pages_for("tensorflow")
def test_tensorflow(page, size, tmp_path):
    pytest.importorskip("tensorflow").random.set_seed(None)  # other tests leave one
    pages.run(pages.ROOT / page, tmp_path, size)


@pytest.mark.slow
@ranks(2, fresh=True)  # JAX warns of every later fork
@pages_for("jax")
def test_jax(page, size, tmp_path):
    pytest.importorskip("jax")
    pytest.importorskip("optax")
    pages.run(pages.ROOT / page, tmp_path, size)


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_a_block_is_skipped_with_a_reason(page):
    for line in re.findall(r"^(?:%|<!---?) *skip: *(.*)", page.read_text(), re.MULTILINE):
        assert re.match(r'(next|start) (if\(.*, reason=)?".{10,}"|end', line), line


def test_an_error_in_a_block_is_found_and_a_skipped_block_is_not_run(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        '<!-- skip: next "a reason" -->\n```python\n1 / 0\n```\n\n'
        "<!-- invisible-code-block: python\nx = 5\n-->\n\n```python\ny = x\nx.missing\n```\n"
    )
    with pytest.raises(AttributeError, match="missing") as error:
        pages.run(page, tmp_path, 1)
    assert error.traceback[-1].lineno == 11  # counted from 0
