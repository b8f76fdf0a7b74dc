"""The C version of the search for BTF types finds the same types as the Python version."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_kprofiler.speedups import find_btf_types, library_problem, pure

pytestmark = pytest.mark.skipif(library_problem is not None, reason=str(library_problem))

FIXED = bytes(3 + kind % 3 for kind in range(32))
EACH = bytes(kind % 4 for kind in range(32))
WORDS = st.sampled_from([0, 1, 0x04000002, 0x0D00FFFF, 0x84000001, 0xFFFFFFFF])


@given(st.lists(WORDS, max_size=40), st.binary(max_size=3))
def test_the_same_types_are_found(words, rest):
    types = b"".join(word.to_bytes(4, "little") for word in words) + rest
    assert find_btf_types(types, FIXED, EACH) == pure.find_btf_types(types, FIXED, EACH)


@pytest.mark.parametrize("fixed", [FIXED[:31], bytes(32)])
def test_sizes_that_would_never_end_are_rejected(fixed):
    with pytest.raises(ValueError, match="size of each kind"):
        find_btf_types(bytes(64), fixed, EACH)
