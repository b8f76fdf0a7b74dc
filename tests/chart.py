"""Writes the Helm chart's ``values.schema.json``, with the agent's schema for ``config``.

Before changing a cluster, Helm validates values against this schema, rejecting invalid agent keys.
"""

import json
import sys
from pathlib import Path
from typing import Any

from docs.configuration_files import json_schema

CHART = Path(__file__).parents[1] / "config/helm/otel-kprofiler"
SCHEMA = CHART / "values.schema.json"

TEXT = {"type": "string"}
NAME = {"type": "string", "pattern": "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$", "maxLength": 63}
FILLED = {"type": "string", "minLength": 1}
OBJECT = {"type": "object"}
"""The schema for Kubernetes' built-in objects, which the API server validates."""
OBJECTS = {"type": "array", "items": OBJECT}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def section(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False, **more}


def values_schema() -> dict[str, Any]:
    config = json_schema()
    definitions = config.pop("$defs")
    dialect = config.pop("$schema")
    count = {"type": "integer", "minimum": 1}
    share = {"type": "string", "pattern": "^([1-9][0-9]?|100)%$"}
    named = {"type": "object", "required": ["name"]}
    image = {
        "repository": FILLED,
        "tag": TEXT,
        "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    }
    account = {"create": {"type": "boolean"}, "name": NAME, "annotations": TEXTS}
    values = {
        "image": section(image, required=["repository"]),
        "imagePullSecrets": {"type": "array", "items": named},
        "nameOverride": NAME,
        "fullnameOverride": NAME,
        "config": {"$ref": "#/$defs/Config"},
        "stateDirectory": {"type": "string", "pattern": "^/."},
        "env": {"type": "array", "items": named},
        "envFrom": OBJECTS,
        "volumes": {"type": "array", "items": named},
        "volumeMounts": {"type": "array", "items": {**named, "required": ["name", "mountPath"]}},
        "serviceAccount": section(account),
        "securityContext": OBJECT,
        "resources": section({"requests": OBJECT, "limits": OBJECT, "claims": OBJECTS}),
        "tolerations": OBJECTS,
        "nodeSelector": TEXTS,
        "affinity": OBJECT,
        "priorityClassName": TEXT,
        "terminationGracePeriodSeconds": count,
        "maxUnavailable": {"anyOf": [count, share]},
        "podAnnotations": TEXTS,
        "podLabels": TEXTS,
        # Helm adds "global" to the values of a subchart.
        "global": OBJECT,
    }
    return {
        "$schema": dialect,
        "title": "Values of the chart otel-kprofiler",
        **section(values, required=["image", "config"]),
        "$defs": {"Config": config, **definitions},
    }


def main() -> None:
    text = json.dumps(values_schema(), indent=1, default=str) + "\n"
    if not SCHEMA.exists() or SCHEMA.read_text() != text:
        SCHEMA.write_text(text)
        sys.stdout.write(f"wrote {SCHEMA}\n")


if __name__ == "__main__":
    main()
