"""Prints whether subinterpreters use the C version: those that share a GIL, then others."""

import importlib
import os
import sys

import otel_kprofiler

CODE = """if True:
    import os, sys
    sys.path[:] = {path!r}
    from otel_kprofiler import speedups
    cache = speedups.FrameCache()
    for at in range(100):
        cache[at] = f"frame {{at}}"
    assert cache.find(bytes(16), 0, (None,) * 16, str) == ("frame 0",) * 2
    os.write({writing}, str(speedups.library_problem is None).encode() + b" ")
"""

name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
interpreters = importlib.import_module(name)
folder = os.path.dirname(os.path.dirname(otel_kprofiler.__file__))
reading, writing = os.pipe()
modes = (["legacy"], ["isolated"]) if sys.version_info >= (3, 13) else ([],)
for mode in modes:
    options = {} if mode else {"isolated": False}
    other = interpreters.create(*mode, **options)
    code = CODE.format(path=[*sys.path, folder], writing=writing)
    for _ in range(2):
        failure = interpreters.run_string(other, code)
        assert not failure, failure
    interpreters.destroy(other)
os.close(writing)
sys.stdout.write(os.read(reading, 1000).decode() + "\n")
