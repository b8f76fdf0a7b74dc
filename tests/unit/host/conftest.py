"""A file system for tests of readers that wait for it."""

import pytest

from tests.fuse import mounted


@pytest.fixture
def fuse(tmp_path):
    """A FUSE file system with one file, which a test can freeze."""
    with mounted(tmp_path / "fuse", {"file": b"content"}) as fuse:
        yield fuse
