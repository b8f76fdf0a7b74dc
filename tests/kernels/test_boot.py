"""Checks that the guest boots, a precondition of all other tests."""

import os
import platform

import pytest

pytestmark = pytest.mark.kernel


def test_the_kernel_boots_and_mounts_the_checkout():
    """Debian's kernel boots and runs this test suite."""
    release, boot = os.environ["OTEL_KPROFILER_GUEST"].split()
    assert platform.release() == release
    assert os.cpu_count() == (2 if boot == "kaslr" else 1)
