"""Address ranges of CPython's evaluation loops, by file."""

from typing import Final

from otel_kprofiler.model.stack import BuildId

MAX_LOOPS: Final = 4096
"""Maximum number of interpreter files. Loops in further files appear as native frames."""


class KnownLoops:
    """Stores the evaluation loops of the interpreters seen so far. Thread-safe."""

    def __init__(self) -> None:
        self._loops: dict[BuildId, tuple[range, ...]] = {}
        self._version = 0

    @property
    def version(self) -> int:
        """Returns a number that is incremented whenever a loop is added."""
        return self._version

    def add(self, build_id: BuildId | None, loop: tuple[range, ...]) -> None:
        """Record the SVMAs of a file's evaluation loop, if the file has a build id."""
        if build_id is not None and len(self._loops) < MAX_LOOPS:
            self._loops[build_id] = loop
            self._version += 1

    def has(self, build_id: BuildId | None, address: int) -> bool:
        """Returns whether an address (SVMA) is in a file's evaluation loop."""
        if build_id is not None:
            return any(address in part for part in self._loops.get(build_id, ()))
        return False
