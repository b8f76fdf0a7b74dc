"""A Java program that publishes its spans through ``ddprof``, a part of dd-java-agent."""

import hashlib
import shutil
import subprocess
import time
import zipfile

import pytest

from tests.cache import cache_directory
from tests.thread_contexts import SOURCES

VERSION = "1.68.1"
SHA256 = "86c97c1348277bb024f6185c4fd15a5567c50ab648f88277dffc429adb4bf927"
PROGRAM = SOURCES / "java" / "Program.java"
_CLASSES = "shared/com/datadoghq/profiler/"
_LIBRARY = "shared/META-INF/native-libs/linux-x64/libjavaProfiler.so"
_COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"


def fetch():
    """Returns the path of the agent's cached JAR. Skips the test if the download fails."""
    path = cache_directory() / "java-writer" / f"dd-java-agent-{VERSION}.jar"
    if not path.exists():
        if shutil.which("mvn") is None:
            pytest.skip("needs mvn")
        artifact = f"-Dartifact=com.datadoghq:dd-java-agent:{VERSION}"
        words = ["mvn", "-B", "-q", _COPY, artifact, f"-DoutputDirectory={path.parent}"]
        done = subprocess.run(words, cwd="/", capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stdout.splitlines() if "ERROR" in line]
            pytest.skip(f"cannot fetch dd-java-agent from Maven: {(errors or ['no reason'])[0]}")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256, f"delete {path}"
    return path


def command(directory, log, threads):
    """Unpacks the classes and the library, and returns the command that runs the program."""
    offset = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.monotonic_ns()
    java, library = unpack(directory)
    return list(map(str, [*java, PROGRAM, log, threads, library, offset]))


def unpack(directory):
    """Unpacks the classes and the library; returns the ``java`` command and the library path."""
    if shutil.which("java") is None or shutil.which("javac") is None:
        pytest.skip("needs a JDK")
    library = directory / "libjavaProfiler.so"
    with (
        zipfile.ZipFile(fetch()) as agent,
        zipfile.ZipFile(directory / "ddprof.jar", "w") as classes,
    ):
        library.write_bytes(agent.read(_LIBRARY))
        for name in agent.namelist():
            if name.startswith(_CLASSES) and name.endswith(".classdata"):
                kept = name.removeprefix("shared/").removesuffix("data")
                classes.writestr(kept, agent.read(name))
    return ["java", "-Xmx128m", "-cp", directory / "ddprof.jar"], library
