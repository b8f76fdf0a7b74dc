"""docs/embedding.md documents every setting, and its examples are valid."""

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from otel_kprofiler.config import Receiver
from otel_kprofiler.sdk import environment_variables
from otel_kprofiler.sdk.schema import Settings, read_settings

PAGE_PATH = Path(__file__).parents[3] / "docs/embedding.md"
PAGE = PAGE_PATH.read_text()
WITHOUT_DEFAULT = {"OTEL_KPROFILER_FILE", "OTEL_KPROFILER_BAGGAGE_KEYS"}
DOCUMENTED = dict(re.findall(r"^\| `(OTEL_\w+)` \| (?:`(.+?)`)?", PAGE, re.MULTILINE))


def test_every_variable_and_setting_is_documented():
    variables = {name for name in vars(environment_variables) if name.startswith("OTEL_")}
    own = Settings.model_fields.keys() - Receiver.model_fields.keys()
    assert {f"OTEL_KPROFILER_{name.upper()}" for name in own} <= DOCUMENTED.keys() == variables


def test_the_documented_defaults_are_correct():
    settings = {
        name: text
        for name, text in DOCUMENTED.items()
        if name.startswith("OTEL_KPROFILER_") and name not in WITHOUT_DEFAULT
    }
    assert all(settings.values())
    assert read_settings(settings) == read_settings({})


def test_the_examples_compile_and_the_names_they_use_exist():
    blocks = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        compile(block, "docs/embedding.md", "exec")
        for line in block.splitlines():
            if line.startswith("from "):
                exec(line)


def test_a_matching_instrumentation_version_can_be_installed_for_every_supported_sdk():
    """Instrumentation 0.64b0 matches SDK 1.43.0, 0.65b0 matches 1.44.0, and so on."""
    project = tomllib.loads((PAGE_PATH.parents[1] / "pyproject.toml").read_text())["project"]
    sdk = Requirement(next(d for d in project["dependencies"] if d.startswith("opentelemetry-sdk")))
    (extra,) = map(Requirement, project["optional-dependencies"]["instrument"])
    minor = int(str(sdk.specifier).removeprefix(">=1."))
    assert extra.name == "opentelemetry-instrumentation"
    assert str(extra.specifier) == f">=0.{minor + 21}b0"
