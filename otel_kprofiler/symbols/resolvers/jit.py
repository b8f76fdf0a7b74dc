"""Names runtime-generated code, using the files that JIT compilers write for perf(1)."""

from collections import OrderedDict
from typing import Final

from otel_kprofiler.clock import Clock
from otel_kprofiler.host import ReferableFiles
from otel_kprofiler.model import USER_SIDE, Frame, ProcessKey
from otel_kprofiler.symbols.user.jit_code import ProcessCode, make_named

MAX_PROCESSES: Final = 64
"""Maximum number of processes whose code is cached."""


class MadeCode:
    """Symbolizes runtime-generated code. Not thread-safe."""

    def __init__(self, files: ReferableFiles) -> None:
        self._files = files
        self._clock = Clock()
        self._processes: OrderedDict[ProcessKey, ProcessCode] = OrderedDict()

    def frame(self, process: ProcessKey, address: int) -> Frame | None:
        """Returns the frame of the code currently at an address; None if the code is unknown."""
        code = self._processes.get(process)
        if code is None:
            code = self._processes[process] = ProcessCode(process, self._files, self._clock)
            while len(self._processes) > MAX_PROCESSES:
                self._processes.popitem(last=False)[1].close()
        self._processes.move_to_end(process)
        now_ns = self._clock.boot_ns()
        try:
            while code.update(now_ns):
                pass
        except OSError:  # the perf map or jitdump is missing or writable by other users
            return None
        function = code.lookup(address, now_ns)
        if function is None:
            return None
        named = make_named(function)
        return Frame(None, address, named.lines, named.offset(address), USER_SIDE)

    def close(self) -> None:
        """Forget all code."""
        while self._processes:
            self._processes.popitem()[1].close()
