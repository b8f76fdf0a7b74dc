"""``python -m docs.configuration_files``: generates files from the configuration's schema.

The files are the sample file, the JSON Schema and the reference page.
"""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, get_args

from pydantic.fields import FieldInfo

from otel_kprofiler.config import unsupported_keys
from otel_kprofiler.config.config import Config
from otel_kprofiler.config.dump import scalar
from otel_kprofiler.config.exporter_types import EXPORTERS
from otel_kprofiler.config.load import section_of
from otel_kprofiler.config.receiver import Receiver
from otel_kprofiler.config.section import Exporter, Section, keys_of
from otel_kprofiler.config.service import Service

_WIDTH: Final = 96
_HEADING: Final = """\
# Configuration of otel-kprofiler: every key, set to its default unless a comment says otherwise.
# Generated from the schema by `make generated`. Durations have units: 200ms, 5s, 1m30s. Values may
# contain environment variables, as ${env:NAME} or ${env:NAME:-default}. $$ is a literal $.
"""


def sample() -> str:
    """Returns ``config/agent.yaml``: every key with its default and its description."""
    lines = [_HEADING, "receivers:", "  # The sampler. Keys have the same names as in the"]
    lines += ["  # receiver of opentelemetry-ebpf-profiler if they have the same meaning."]
    lines += ["  kprofiler:", *_sample_lines(Receiver, 2), "", "exporters:"]
    lines += ["  # IDs are type or type/name. Only the exporters in service.pipelines run."]
    for name, model in EXPORTERS.items():
        lines += [*_comment(model, 1), f"  {name}:", *_sample_lines(model, 2)]
    lines += ["", "service:", *_sample_lines(Service, 1)]
    return "\n".join(lines) + "\n"


def _sample_lines(model: type[Section], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, field in keys_of(model).items():
        section = section_of(field)
        if section is not None:
            yield from _comment(section, depth)
            yield f"{indent}{name}:"
            yield from _sample_lines(section, depth + 1)
            continue
        text = field.description or ""
        shown = _shown(field)
        if not field.is_required() and shown != field.default:
            text += f" Default: {scalar(field.default)}."
        yield from _wrapped(text, depth)
        yield f"{indent}{name}: {scalar(shown)}"


def _comment(model: type[Section], depth: int) -> list[str]:
    return _wrapped(_summary(model), depth)


def _wrapped(text: str, depth: int) -> list[str]:
    prefix = "  " * depth + "# "
    return textwrap.wrap(text, _WIDTH, initial_indent=prefix, subsequent_indent=prefix)


def _summary(model: type[Section]) -> str:
    return (model.__doc__ or "").partition("\n")[0]


def _shown(field: FieldInfo) -> Any:
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "example" in extra:
        return extra["example"]
    return field.default


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema (2020-12) with which editors check configuration files.

    Every scalar may also be a string with a ``${…}`` reference.
    """
    schema = Config.model_json_schema()
    definitions = schema["$defs"]
    del definitions[Exporter.__name__]
    for model in EXPORTERS.values():
        definitions |= (part := model.model_json_schema()).pop("$defs", {})
        definitions[model.__name__] = part
    schema["$defs"] = dict(sorted(definitions.items()))
    for definition in [schema, *definitions.values()]:
        definition["properties"] = {
            name: _or_reference(entry) for name, entry in definition["properties"].items()
        }
    # A section's value may be null, as in the Collector.
    pattern = {
        rf"^{name}(/\S+)?$": {"anyOf": [{"$ref": f"#/$defs/{model.__name__}"}, {"type": "null"}]}
        for name, model in EXPORTERS.items()
    }
    schema["properties"]["exporters"] = {
        "type": "object",
        "description": "Exporters by id: type or type/name.",
        "patternProperties": pattern,
        "additionalProperties": False,
    }
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _or_reference(entry: dict[str, Any]) -> dict[str, Any]:
    for word in ("title", "example", "format", "writeOnly"):
        entry.pop(word, None)
    typed = {key: value for key, value in entry.items() if key not in ("default", "description")}
    is_scalar = typed.get("type") in ("integer", "number", "boolean") or typed.keys() & {
        "enum", "pattern", "const",
    }  # fmt: skip
    if not is_scalar:
        return entry
    rest = {key: value for key, value in entry.items() if key not in typed}
    return {**rest, "anyOf": [typed, {"type": "string", "pattern": r"\$\{"}]}


def json_schema_text() -> str:
    """Returns ``config/schema.json``."""
    return json.dumps(json_schema(), indent=2, default=str) + "\n"


_PAGE: Final = """\
# Configuration

*This page is generated from the schema by `make generated`. Do not edit it.*

`otel-kprofiler run -c agent.yaml` reads one YAML file in the format of the OpenTelemetry
Collector's configuration. [`config/agent.yaml`](../config/agent.yaml) shows every key.
[`config/schema.json`](../config/schema.json) allows editors to complete and check keys.

- `otel-kprofiler validate -c agent.yaml` reports all errors in one run, with their lines and
  columns. Unknown keys are errors.
- `otel-kprofiler print-config -c agent.yaml` shows the effective values, without secrets. With
  `--origins`, the command also shows where each value was set.
- On SIGHUP, the agent reloads the file without a gap in the samples. If the file is invalid, the
  agent keeps its current configuration.
- Durations use Go's syntax: `200ms`, `5s`, `1m30s`. The unit is optional only for 0.
- `${env:NAME}` and `${NAME}` insert the value of an environment variable. `${env:NAME:-default}`
  inserts the default if the variable is unset or empty. `$$` is a literal `$`. Environment
  references are expanded in values, but not in keys, and inserted text is not expanded again. If a
  reference is not quoted, the type of the value depends on the inserted text. Apart from `${…}`
  references, no key takes its value from the environment.
- YAML anchors and aliases are supported, but merge keys (`<<`) are not.

Set resource attributes as a mapping under `receivers.kprofiler.resource`, as in other receivers of
the Collector such as filelog. All exporters send the same attributes.
"""


def reference() -> str:
    """Returns ``docs/configuration.md``: tables of all keys and of unsupported keys."""
    parts = [_PAGE, "\n## `receivers.kprofiler`\n\n", *_table(Receiver)]
    for name, model in EXPORTERS.items():
        parts += [f"\n## `exporters.{name}`\n\n{_summary(model)}\n\n", *_table(model)]
    parts += ["\n## `service`\n\n", *_table(Service), _UNSUPPORTED_HEADING]
    groups = {
        "top level": unsupported_keys.TOP,
        "receivers.kprofiler": unsupported_keys.RECEIVER,
        "exporters": unsupported_keys.EXPORTERS,
        **{f"exporters.{name}": model.unsupported for name, model in EXPORTERS.items()},
        "otlp_grpc.tls": unsupported_keys.TLS,
        "otlp_http.tls": unsupported_keys.HTTP_TLS,
        "sending_queue": unsupported_keys.QUEUE,
        "file.rotation": unsupported_keys.ROTATION,
        "service": {**unsupported_keys.SERVICE, **unsupported_keys.PIPELINE},
        "service.telemetry": {
            **unsupported_keys.TELEMETRY,
            **unsupported_keys.LOGS,
            **unsupported_keys.METRICS,
        },
    }
    parts += ["\n| In | Key | Reason | Instead |\n|---|---|---|---|\n"]
    parts += [
        f"| {place} | `{key}` | {' | '.join(reason.rpartition('; ')[::2])} |\n"
        for place, reasons in groups.items()
        for key, reason in reasons.items()
    ]
    return "".join(parts)


_UNSUPPORTED_HEADING: Final = """
## Unsupported keys

The agent does not support these keys of the opentelemetry-ebpf-profiler receiver and of the
Collector. Using an unsupported key is an error, so that no setting in a copied configuration is
silently ignored.
"""


def _table(model: type[Section]) -> Iterator[str]:
    yield "| Key | Type | Default | Meaning |\n|---|---|---|---|\n"
    yield from _rows(model, "")


def _rows(model: type[Section], prefix: str) -> Iterator[str]:
    for name, field in keys_of(model).items():
        section = section_of(field)
        if section is None:
            default = "required" if field.is_required() else f"`{scalar(field.default)}`"
            kind = type_name(field.annotation).replace("|", "\\|")
            yield f"| `{prefix}{name}` | {kind} | {default} | {field.description} |\n"
        else:
            default = "none" if field.default is None else ""
            yield f"| `{prefix}{name}` | mapping | {default} | {_summary(section)} |\n"
            yield from _rows(section, f"{prefix}{name}.")


_TYPE_NAMES: Final = {
    "str": "text", "SecretStr": "text", "int": "integer", "float": "number", "bool": "boolean",
    "Duration": "duration",
}  # fmt: skip


def type_name(annotation: Any) -> str:
    """Returns the name of a field's type for the reference page."""
    arguments = get_args(annotation)
    origin = getattr(annotation, "__origin__", None)
    if origin is dict:
        return "mapping"
    if origin is list:
        return "list"
    if arguments and all(isinstance(word, str) for word in arguments):
        return " | ".join(f"`{word}`" for word in arguments)
    if arguments:  # Annotated
        return type_name(arguments[0])
    return _TYPE_NAMES[annotation.__name__]


ROOT: Final = Path(__file__).parents[1]
FILES: Final = {
    ROOT / "config/agent.yaml": sample,
    ROOT / "config/schema.json": json_schema_text,
    ROOT / "docs/configuration.md": reference,
}

if __name__ == "__main__":
    for path, make in FILES.items():
        path.write_text(make())
