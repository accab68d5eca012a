"""Build the documentation: ``make docs`` writes it to build/docs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # as Sphinx does

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util.nodes import make_refnode

FOLDER = Path(__file__).parent
sys.path[:0] = [str(FOLDER.parent), str(FOLDER)]
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # or it prints notices in spite of that

import from_code  # noqa: E402

import hvdlite  # noqa: E402

project = "hvdlite"
author = "hvdlite contributors"
release = version = hvdlite.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 4
smartquotes_action = "D"  # dashes; quotation marks stay as they are typed

# In docstrings `name` is a link, where the name has a place in the reference.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # docstrings give types together with shapes and units
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 80
add_module_names = False
nitpick_ignore_regex = [
    ("py:obj", ".*"),
    ("py:class", ".*"),  # bases, and types of attributes
    ("py:exc", r"[A-Z]\w*Error|SystemExit|tf\..*"),  # Python's and TensorFlow's
]

html_theme = "furo"
pygments_dark_style = "github-dark"
html_title = f"hvdlite {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
# Below each page: the links of the project, once pyproject.toml has some ([project.urls]).
html_theme_options = {
    "footer_icons": [
        {"name": name, "url": url, "html": name, "class": ""}
        for name, url in tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())["project"]
        .get("urls", {})
        .items()
    ]
}
# Nobody copies the output of a command, or the prompt in front of it.
copybutton_exclude = ".linenos, .gp, .go"

# Pages link to files above docs/ as a person who browses the repository follows them.
_PAGES_OF_FILES = {"CHANGELOG.md": "/changelog.md", "README.md": "/index.md"}


def _link_to_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    """Replace links to files of the repository by links to their pages on the site."""
    for file, page in _PAGES_OF_FILES.items():
        source[0] = re.sub(rf"\]\((?:\.\./)+{re.escape(file)}\b", f"]({page}", source[0])
    script = r"\]\((?:\.\./)+examples/(\w+)\.py\)"
    source[0] = re.sub(script, r"](/reference/examples.md#\1py)", source[0])


def _find_by_last_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contents: nodes.Element
) -> nodes.reference | None:
    """Link a name in a docstring, written as at its place in the code, to the public object."""
    if node["refdomain"] != "py":
        return None
    target = node["reftarget"].split("(")[0].lstrip(".")
    found = [
        entry
        for name, entry in env.domains.python_domain.objects.items()
        if name == target or name.endswith(f".{target}") or target == f"hvd.{name}"
    ]
    # An adapter's page links to that page, before others.
    found.sort(key=lambda entry: entry.docname != node["refdoc"])
    if not found:
        return None
    return make_refnode(app.builder, node["refdoc"], found[0].docname, found[0].node_id, contents)


def _mark_figures(app: Sphinx, doctree: nodes.document) -> None:
    """Give the cells of tables that hold a short figure a class, so that it is not broken."""
    for cell in doctree.findall(nodes.entry):
        if re.fullmatch(r"[-+]?\d\S*( \S+){0,3}", text := cell.astext()) and len(text) <= 13:
            cell["classes"].append("figures")


def _break_long_names(
    app: Sphinx, pagename: str, template: str, context: dict[str, Any], doctree: nodes.Node | None
) -> None:
    """Let code in tables be broken behind its signs, so that narrow columns break no word.

    This is done in the page, because the search would index the parts of the names.
    """

    def broken(name: re.Match[str]) -> str:
        parts = re.split(r"(?<=[\w)][_./=,(-])(?=[A-Za-z])", name[0])
        return '</span><wbr><span class="pre">'.join(parts)

    context["body"] = re.sub(
        r"<td\b.*?</td>",
        lambda cell: re.sub(r'(?<=<span class="pre">)[^<]+', broken, cell[0]),
        context.get("body", ""),
        flags=re.DOTALL,
    )


def setup(app: Sphinx) -> None:
    """Connect the functions above to Sphinx."""
    app.connect("doctree-read", _mark_figures)
    app.connect("html-page-context", _break_long_names)
    app.connect("source-read", _link_to_pages)
    app.connect("source-read", from_code.expand)
    app.connect("missing-reference", _find_by_last_name)
