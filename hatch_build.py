"""If the hook is enabled, compiles the modules listed in `pyproject.toml` with mypyc."""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

BUILD = """
import sys
from mypyc.build import mypycify
from setuptools import Distribution
from setuptools.command.build_ext import build_ext

target, *modules = sys.argv[1:]
options = ["--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
arguments = [*options, f"--cache-dir={target}/mypy", *modules]
# Debug information would contain the temporary path, so that no two builds were equal.
extensions = mypycify(
    arguments, group_name="otel_kprofiler", target_dir=f"{target}/c", debug_level="0"
)
command = build_ext(Distribution({"ext_modules": extensions}))
command.build_lib, command.build_temp = f"{target}/lib", f"{target}/objects"
command.ensure_finalized()
command.run()
"""
"""Writes the extension modules to ``lib``: one per module, and one that contains all code."""


class CompiledModules(BuildHookInterface[Any]):
    """Adds compiled modules to the wheel, next to their sources."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the modules, except in editable installs, where edits must take effect."""
        if version == "editable":
            return
        self._target = TemporaryDirectory()
        command = [sys.executable, "-c", BUILD, self._target.name, *self.config["modules"]]
        subprocess.run(command, cwd=self.root, check=True)
        library = Path(self._target.name, "lib")
        for path in library.rglob("*.so"):
            build_data["force_include"][os.fspath(path)] = str(path.relative_to(library))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the output of the compilers."""
        if version != "editable":
            self._target.cleanup()
