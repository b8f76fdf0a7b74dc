"""A file system on which readers wait when a test freezes it."""

import pytest

from tests.fuse import mounted


@pytest.fixture
def fuse(tmp_path):
    """Mounts a FUSE file system with one file, which tests can freeze."""
    with mounted(tmp_path / "fuse", {"file": b"content"}) as fuse:
        yield fuse
