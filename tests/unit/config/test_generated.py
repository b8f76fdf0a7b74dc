"""Generated files are up to date and agree with the loader."""

import json
import re

from docs.configuration_files import FILES, ROOT
from otel_kprofiler.config import EXPORTERS, Receiver, load_config


def test_generated_files_are_up_to_date():
    for path, make in FILES.items():
        assert path.read_text() == make(), "run `make generated`"


def test_the_shipped_agent_configuration_has_every_key_with_its_default():
    loaded = load_config(str(ROOT / "config/agent.yaml"), environ={})
    assert loaded.config.receiver == Receiver()
    marks = loaded.document.marks
    assert all(("receivers", "kprofiler", name) in marks for name in Receiver.model_fields)
    for kind, model in EXPORTERS.items():
        assert all(("exporters", kind, name) in marks for name in model.model_fields)


def test_every_field_and_section_is_described():
    def sections(model):
        from otel_kprofiler.config.load import section_of

        for name, field in model.model_fields.items():
            inner = section_of(field)
            assert field.description or (inner and inner.__doc__), f"{model.__name__}.{name}"
            if inner:
                sections(inner)

    for model in (Receiver, *EXPORTERS.values()):
        sections(model)


def test_the_json_schema_contains_exactly_the_loaders_keys_and_accepts_references():
    schema = json.loads((ROOT / "config/schema.json").read_text())
    receiver = schema["$defs"]["Receiver"]
    assert receiver["additionalProperties"] is False
    assert receiver["properties"].keys() == Receiver.model_fields.keys()
    rate = receiver["properties"]["samples_per_second"]
    assert rate["anyOf"][0]["maximum"] == 10_000
    assert re.search(rate["anyOf"][1]["pattern"], "${env:RATE:-99}")
    patterns = schema["properties"]["exporters"]["patternProperties"]
    matching = [entry for pattern, entry in patterns.items() if re.search(pattern, "otlp_grpc/eu")]
    assert matching == [{"anyOf": [{"$ref": "#/$defs/OtlpGrpc"}, {"type": "null"}]}]
