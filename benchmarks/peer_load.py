"""``python -m benchmarks.peer_load SECONDS``: runs many kinds of user code.

Runs multithreaded C++ code, an interpreter, a shell, a compiler, a JIT compiler and cryptography,
all built without frame pointers. Skips programs that are not installed.
"""

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path

CPP = r"""
#include <algorithm>
#include <map>
#include <string>
#include <thread>
#include <vector>
static volatile long sink;
template <int DEPTH> struct Nest {
    __attribute__((noinline)) static long run(std::vector<int> &v) {
        long found = Nest<DEPTH - 1>::run(v);
        return found + v[found % v.size()];
    }
};
template <> struct Nest<0> {
    __attribute__((noinline)) static long run(std::vector<int> &v) {
        auto less = [](int a, int b) { return (a * 7919) % 1009 < (b * 7919) % 1009; };
        std::sort(v.begin(), v.end(), less);
        std::map<std::string, int> words;
        for (int i = 0; i < 64; i++)
            words[std::to_string(v[i])] += i;
        return words.size();
    }
};
static void work() {
    std::vector<int> v(512);
    for (unsigned round = 0;; round++) {
        for (unsigned i = 0; i < v.size(); i++)
            v[i] = (i * 2654435761u + round) >> 8 & 0xffff;
        sink += Nest<12>::run(v);
    }
}
int main() {
    std::thread other(work);
    work();
}
"""
PYTHON = """
import json, re
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
while True:
    fib(16); json.loads(json.dumps([{"a": i, "b": str(i)} for i in range(200)]))
    re.findall(r"(\\w+)-(\\d+)", "abc-123 " * 50); sorted(range(500), key=lambda x: -x)
"""
BASH = """
walk() { if (( $1 > 0 )); then walk $(($1 - 1)); else text=${PATH//bin/x}; fi; }
while :; do walk 12; done
"""
NODE = """
const tree = (depth) => depth ? [tree(depth - 1), tree(depth - 1)] : [];
for (;;) { JSON.parse(JSON.stringify(tree(9))); "abc def".repeat(200).split(" ").sort(); }
"""

PROGRAMS = {"cpp-load", "python3.11", "bash", "clang", "clang-14", "node", "openssl"}
"""The names of the executables that the workload runs."""


def _commands(folder: Path) -> Iterator[list[str]]:
    source = folder / "load.cpp"
    source.write_text(CPP)
    if shutil.which("g++"):
        program = str(folder / "cpp-load")
        flags = ["-O2", "-fomit-frame-pointer", "-pthread"]
        subprocess.run(["g++", *flags, "-o", program, str(source)], check=True)
        yield [program]
    yield ["/usr/bin/python3", "-c", PYTHON]
    yield ["bash", "-c", BASH]
    for clang in filter(shutil.which, ("clang++-14", "clang-14")):
        compiling = f"while :; do {clang} -x c++ -O2 -c {source} -o {folder}/x.o; done"
        yield ["bash", "-c", compiling]
        break
    if shutil.which("node"):
        yield ["node", "-e", NODE]
    if shutil.which("openssl"):
        yield ["openssl", "speed", "-seconds", "1000", "rsa2048"]


@contextlib.contextmanager
def user_load(seconds: float, without: Collection[str] = ()) -> Iterator[list[int]]:
    """Runs all programs not in ``without`` until the block exits or ``seconds`` have passed.

    Yields the pids of the timeout(1) processes that run the programs.
    """
    with tempfile.TemporaryDirectory() as folder:
        running = [
            subprocess.Popen(
                ["timeout", "-k", "1", str(seconds), *command],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for command in _commands(Path(folder))
            if Path(command[0]).name not in without
        ]
        try:
            yield [process.pid for process in running]
        finally:
            for process in running:
                process.terminate()
            for process in running:
                process.wait()


if __name__ == "__main__":
    import time

    with user_load(float(sys.argv[1])):
        time.sleep(float(sys.argv[1]))
