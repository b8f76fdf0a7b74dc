"""Files and tests named in CONTRIBUTING.md exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
PLACEHOLDERS = re.compile(r"NAME|SUBJECT|\*")
PATHS = {
    path.partition("::")[0]
    for path in re.findall(r"(?:otel_kprofiler|tests|docs|config)/[\w./*-]+", PAGE)
    if not PLACEHOLDERS.search(path)
}
TESTS = set(re.findall(r"`(test_\w+)`", PAGE))


@pytest.mark.parametrize("path", sorted(PATHS))
def test_every_path_mentioned_in_the_guide_exists(path):
    assert any(place.exists() for place in [ROOT / path, ROOT / "otel_kprofiler" / path]), path


@pytest.mark.parametrize("name", sorted(TESTS))
def test_every_test_mentioned_in_the_guide_exists(name):
    sources = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert any(f"def {name}(" in source for source in sources), name
