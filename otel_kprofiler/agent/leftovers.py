"""Reports spools with samples that no exporter delivers, for example because it was renamed."""

import logging
import os
import threading
from collections.abc import Mapping
from urllib.parse import unquote

from otel_kprofiler.export import ExporterSettings, count_undelivered
from otel_kprofiler.text import describe_count

_log = logging.getLogger(__name__)


class Leftovers:
    """Looks for such spools in another thread, because reading a spool may take long.

    Attributes:
        problems: a sentence for each spool, by the id of the exporter that wrote it. Replaced after
            each search.
    """

    def __init__(self) -> None:
        self.problems: Mapping[str, str] = {}

    def look(self, exporters: Mapping[str, ExporterSettings]) -> threading.Thread | None:
        """Search the directories in the configured exporters' ``sending_queue.storage``.

        Returns the thread that searches; None if there is nothing to search.
        """
        spools = {name: settings.queue.spool for name, settings in exporters.items()}
        used = {spool.find_path(name) for name, spool in spools.items() if spool}
        directories = {spool.directory for spool in spools.values() if spool}
        if not directories and not self.problems:
            return None
        thread = threading.Thread(
            target=self._look, args=(directories, used), name="kprofiler-leftovers", daemon=True
        )
        thread.start()
        return thread

    def _look(self, directories: set[str], used: set[str]) -> None:
        problems = {}
        for directory in sorted(directories):
            for name in sorted(_list(directory)):
                path = os.path.join(directory, name)
                if path not in used and (samples := _count(path)):
                    problems[unquote(name)] = (
                        f"the spool {path} holds {describe_count(samples, 'sample')}, but no"
                        f" exporter is named {unquote(name)} and uses it. To deliver the samples,"
                        " add this exporter again; to give them up, remove the directory"
                    )
        for name in problems.keys() - self.problems.keys():
            _log.warning("%s", problems[name])
        self.problems = problems


def _list(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:  # reported when the exporter's spool was opened
        return []


def _count(path: str) -> int:
    try:
        return count_undelivered(path).total()
    except OSError:  # a file, another user's directory, or a removed exporter's spool, still in use
        return 0
