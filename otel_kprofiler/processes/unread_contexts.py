"""Counts, by reason, the processes whose contexts are not read."""

import logging
from collections import Counter
from typing import Final

from otel_kprofiler.host import CONTEXTS, HostFiles, read_capabilities, read_stat
from otel_kprofiler.model import ProcessKey
from otel_kprofiler.text import describe_count

_CAPACITY: Final = 8192
_MAX_REASONS: Final = 64

_log = logging.getLogger(__name__)


class UnreadContexts:
    """Counts processes with unreadable contexts.

    Reading the counts is thread-safe; all other operations are not.
    """

    def __init__(self, files: HostFiles) -> None:
        self._files = files
        self._seen: set[ProcessKey] = set()
        self._counts: Counter[tuple[str, str]] = Counter()

    def deny(self, key: ProcessKey) -> None:
        """Count a process whose memory cannot be read. Ignores kernel threads and repeated calls.

        Raises ``OSError`` if the process has exited.
        """
        if key in self._seen:
            return
        stat = read_stat(self._files, key.tgid)
        if stat is None or stat.is_kernel_thread:
            return
        if len(self._seen) >= _CAPACITY:
            self._seen.clear()
        self._seen.add(key)
        missing = read_capabilities(self._files, "thread-self").missing(CONTEXTS)
        reason = f"{' and '.join(missing)} missing" if missing else "the kernel forbids it"
        self.count(key.tgid, "spans and service attributes", reason)

    def count(self, pid: int, subject: str, reason: str) -> None:
        """Count a process, and log it if it is the first with this reason.

        ``subject`` is the kind of data that is not read, such as spans. At most 64 different
        reasons are kept.
        """
        if (subject, reason) not in self._counts:
            if len(self._counts) >= _MAX_REASONS:
                return
            _log.info("%s of process %d were not read: %s", subject, pid, reason)
        self._counts[subject, reason] += 1

    def as_dict(self) -> dict[str, int]:
        """Returns the number of processes with unread data, by kind and reason. Thread-safe."""
        return {
            f"{subject}: {reason}": count
            for (subject, reason), count in self._counts.copy().items()
        }

    def remarks(self) -> list[str]:
        """Returns the counts as lines for reports, one line per reason."""
        return [
            f"{subject} of {describe_count(count, 'process', 'processes')} not read: {reason}"
            for (subject, reason), count in self._counts.copy().items()
        ]
