"""A file system on which readers wait when a test freezes it."""

import pytest

from tests.fuse import mounted


@pytest.fixture
def fuse(tmp_path):
    with mounted(tmp_path / "fuse", {"file": b"content"}) as fuse:
        yield fuse
