"""Makes writes fail as on a full disk."""

import resource
from contextlib import contextmanager


@contextmanager
def full_disk(limit=0):
    """Prevents this process from extending any file beyond ``limit`` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
