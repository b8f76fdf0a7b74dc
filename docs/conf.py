"""Configuration for the documentation site, which ``make docs`` builds in build/docs.

The source directory is the checkout, so that links work as in a clone. README.md is the home page,
linked files are downloads, and each linked directory becomes a page that lists its files.
"""

from __future__ import annotations

import html
import os
import posixpath
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

from otel_kprofiler import __version__

sys.path.insert(0, str(Path(__file__).parent))
from api_pages import document_package

# Signatures show the repr of default values; os.environ's would reveal the build's environment.
type(os.environ).__repr__ = lambda _: "os.environ"

ROOT = Path(__file__).parents[1]
CONTENTS = {
    "Use": "installation tutorial gallery commands record report view top dump flame-graph off-cpu "
    "events python coming-from faq troubleshooting glossary",
    "Operate": "configuration permissions reliability monitoring faults fleet backends kernels "
    "platforms",
    "Build on it": "how-it-works embedding spans symbols otlp export processes unwinding",
    "Python API": "api/sdk api/thread_context api/symbols api/otlp api/export api/formats "
    "api/analysis api/model api/tracking api/elf api/errors",
    "Develop": "../CONTRIBUTING architecture modules ../SECURITY ../CHANGELOG",
}
"""Pages in the navigation, by heading, as paths relative to docs/."""

LANGUAGES = {".yaml": "yaml", ".py": "python", ".sh": "sh", "": "sh"}
"""Languages of files in linked directories, by suffix. Files with other suffixes are text."""

project = "otel-kprofiler"
author = "The otel-kprofiler authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "README"
include_patterns = ["*.md", "docs/**.md"]
exclude_patterns = [".*", "build", "dist", "node_modules", "otel_kprofiler", "tests", "viewer"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "undoc-members": True, "imported-members": True}
autodoc_typehints_format = "short"
napoleon_use_ivar = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
highlight_language = "none"
html_theme = "furo"
html_title = f"otel-kprofiler {__version__}"
html_copy_source = False


def add_names(_app: Sphinx, page: str, source: list[str]) -> None:
    """Append the documentation of a package's public names to its page."""
    packages = {f"otel_kprofiler.{path.stem}" for path in ROOT.glob("docs/api/*.md")}
    package = page.replace("docs/api/", "otel_kprofiler.")
    if package in packages:
        text = "\n\n".join(document_package(package, packages))
        source[0] += f"\n```{{eval-rst}}\n{text}\n```\n"


def add_contents(_app: Sphinx, page: str, source: list[str]) -> None:
    """Append the navigation to the home page, because README.md contains no toctree."""
    if page == root_doc:
        for heading, names in CONTENTS.items():
            pages = "\n".join(posixpath.normpath(f"docs/{name}") for name in names.split())
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {heading}\n\n{pages}\n```\n"


def link_directories(app: Sphinx, doctree: nodes.document) -> None:
    """Resolve a page's links to directories in the checkout."""
    page = app.env.docname
    for link in list(doctree.findall(pending_xref)):
        directory = Path(app.env.doc2path(page)).parent.joinpath(link["reftarget"]).resolve()
        if link["reftype"] == "myst" and directory.is_dir():
            name = f"files/{directory.relative_to(ROOT)}"
            app.env.domaindata.setdefault("directories", {})[name] = directory
            uri = posixpath.relpath(f"{name}.html", posixpath.dirname(page))
            link.replace_self(nodes.reference("", "", *link.children, internal=True, refuri=uri))


def collect_directories(app: Sphinx) -> Iterator[tuple[str, dict[str, object], str]]:
    """Yields a page for each linked directory, with the text of its files."""
    for name, directory in app.env.domaindata.get("directories", {}).items():
        title = html.escape(f"{directory.relative_to(ROOT)}/")
        body = [f"<h1>{title}</h1>"]
        for file in sorted(path for path in directory.rglob("*") if path.is_file()):
            text = file.read_text()
            language = "none" if "{{-" in text else LANGUAGES.get(file.suffix, "none")
            text = app.builder.highlighter.highlight_block(text, language)
            body.append(f"<h2>{html.escape(str(file.relative_to(directory)))}</h2>{text}")
        yield name, {"title": title, "body": "".join(body)}, "page.html"


def add_index(app: Sphinx, error: Exception | None) -> None:
    """Copy the home page to index.html, which web servers serve by default."""
    if error is None and app.builder.format == "html":
        shutil.copy(app.outdir / "README.html", app.outdir / "index.html")


def setup(app: Sphinx) -> None:
    """Register the build steps."""
    app.connect("source-read", add_contents)
    app.connect("source-read", add_names)
    app.connect("doctree-read", link_directories)
    app.connect("html-collect-pages", collect_directories)
    app.connect("build-finished", add_index)
