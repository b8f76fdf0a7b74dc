"""The documentation site: every page is in its navigation, and every link resolves."""

import importlib.util
import inspect
import posixpath
import re
import subprocess
import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from otel_kprofiler.model import SIDES, LossCause

ROOT = Path(__file__).parents[2]
MISSING = [name for name in ("furo", "myst_parser", "sphinx") if not importlib.util.find_spec(name)]
pytestmark = pytest.mark.timeout(900)  # the build takes 15 s of CPU time


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.anchors = [], {""}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        names = dict(attrs)
        self.links += [names[name] for name in ("href", "src") if names.get(name)]
        self.anchors |= {names[name] for name in ("id", "name") if names.get(name)}


def broken_links(site):
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    broken = defaultdict(list)
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            target = path.parent / unquote(parts.path) if parts.path else path
            target = Path(posixpath.normpath(target))
            if parts.scheme or parts.netloc:
                continue
            anchors = pages[target].anchors if target in pages else {"", parts.fragment}
            if not target.is_file() or unquote(parts.fragment) not in anchors:
                broken[str(path.relative_to(site))].append(link)
    return dict(broken)


def test_broken_links_and_anchors_are_reported(tmp_path):
    (tmp_path / "b.html").write_text('<h1 id="top">B</h1>')
    (tmp_path / "a.html").write_text(
        '<a href="b.html#top"></a><a href="b.html#end"></a><img src="c.png"><a href="#here">'
        '<a href="https://example.com/x#y"></a>'
    )
    assert broken_links(tmp_path) == {"a.html": ["b.html#end", "c.png", "#here"]}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if MISSING:
        pytest.skip(f"not installed: {', '.join(MISSING)} (extra 'docs')")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", out]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr  # -W: a warning fails the build
    return out


@pytest.mark.long
def test_every_link_on_the_site_resolves_to_a_file_and_an_anchor(site):
    assert broken_links(site) == {}


@pytest.mark.long
def test_every_page_is_in_the_home_pages_navigation(site):
    home = Page((site / "index.html").read_text())
    pages = [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    names = {str(page.relative_to(ROOT).with_suffix(".html")) for page in pages}
    assert names - {"README.html"} <= set(home.links)


@pytest.mark.long
def test_the_api_pages_describe_every_public_name(site):
    for page in (ROOT / "docs/api").glob("*.md"):
        package = f"otel_kprofiler.{page.stem}"
        module = importlib.import_module(package)
        values = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
        names = {f"{package}.{name}" for name, one in values.items() if not inspect.ismodule(one)}
        anchors = Page((site / "docs/api" / f"{page.stem}.html").read_text()).anchors
        if package != "otel_kprofiler.sdk":  # sdk re-exports names from export and otlp
            assert names <= anchors, names - anchors


@pytest.mark.long
def test_the_api_pages_do_not_contain_the_build_environment(site):
    pages = (site / "docs/api").glob("*.html")
    assert not [page.name for page in pages if "environ({" in page.read_text()]


@pytest.mark.long
def test_a_linked_directory_has_a_page_that_lists_its_files(site):
    page = Page((site / "docs/troubleshooting.html").read_text())
    assert "../files/config/collector.html" in page.links
    assert "profiles" in (site / "files/config/collector.html").read_text()
    chart = (site / "files/config/helm/otel-kprofiler.html").read_text()
    assert "<h2>templates/daemonset.yaml</h2>" in chart


def test_every_module_imported_in_the_documentation_has_an_api_page():
    modules = set()
    for page in [*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]:
        text = page.read_text()
        modules.update(re.findall(r"^from otel_kprofiler\.(\w+)", text, re.MULTILINE))
        for names in re.findall(r"^from otel_kprofiler import (.+)", text, re.MULTILINE):
            modules.update(
                name
                for name in names.split(", ")
                if importlib.util.find_spec(f"otel_kprofiler.{name}")
            )
    pages = {page.stem for page in (ROOT / "docs/api").glob("*.md")}
    assert "sdk" in modules
    assert modules <= pages, modules - pages


def test_the_glossary_defines_the_terms_used_in_reports():
    text = (ROOT / "docs/glossary.md").read_text()
    words = {word.strip() for row in text.splitlines() for word in row.split("|")[1:2]}
    causes = {LossCause.NOT_OFFERED, LossCause.SELF_PROFILED}
    shown = {cause.value.replace("_", " ").replace("self ", "self-") for cause in causes}
    shown |= {"taken", "missed", "lost", "coarse", "idle", "truncated", "unresolved", "hidden"}
    assert shown - words == set()
    sides = text.partition("| side |")[2].partition("\n")[0]
    assert [side.name for side in SIDES if side.name not in sides] == []
