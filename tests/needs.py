"""Marks tests that need certain privileges, hardware or tools."""

import os
import shutil

import pytest

from otel_kprofiler.bpf import LibbpfLoader

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
X86_64 = pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs x86-64")
LIBBPF = pytest.mark.skipif(not LibbpfLoader.is_installed(), reason="libbpf1 is not installed")
CLANG = pytest.mark.skipif(
    not all(map(shutil.which, ("clang-14", "llvm-strip-14"))),
    reason="clang-14 and llvm-14 are not installed",
)
PACKAGES = pytest.mark.skipif(
    "KPROFILER_PACKAGES" not in os.environ, reason="`make test-packages` makes roots"
)
