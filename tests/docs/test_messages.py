"""The messages on the page of troubleshooting stand in the code."""

import ast
import re

import pytest

from tests.docs import pages

PAGE = pages.ROOT / "docs" / "troubleshooting.md"
# Messages of other programs have a section of their own.
OTHERS = "\n## Messages of other programs"
BLOCK = re.compile(r"^```text\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
PLACEHOLDER = re.compile(r"%[.\d]*[a-z]|\{\w*\}")


def messages(text):
    """Return the messages of hvdlite on a page; a placeholder in them is ``...``."""
    return [" ".join(block.split()) for block in BLOCK.findall(text.partition(OTHERS)[0])]


def literal(node):
    """Return a string of the code, with ``...`` for each placeholder; "" for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return PLACEHOLDER.sub("...", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or "..." for part in node.values)
    return ""


def literals():
    """Return all strings of the library, with ``...`` for their placeholders."""
    return {
        text
        for folder in ("hvdlite", "adapters")
        for path in (pages.ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (text := literal(node))
    }


def missing(message, known):
    """Return whether no string of the code has all words of a message, in their order."""
    words = [re.escape(part.strip()) for part in message.split("...")]
    pattern = re.compile(".*".join(words), re.DOTALL)
    return not any(pattern.search(text) for text in known)


@pytest.fixture(scope="module")
def known():
    return literals()


def test_messages_stand_in_the_code(known):
    found = messages(PAGE.read_text())
    assert len(found) > 20
    assert [message for message in found if missing(message, known)] == []


@pytest.mark.parametrize(
    "message", ["do all ranks run the same steps? A rank", "-np is missing: give"]
)
def test_a_message_is_found_and_a_changed_one_is_not(message, known):
    assert not missing(message, known)
    assert missing(message.replace(":", ";").replace("do all", "do any"), known)
