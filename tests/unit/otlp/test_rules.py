"""Rules about the serialized form are checked, and all rules have mutations."""

from __future__ import annotations

import json

import pytest

from otel_kprofiler.model import AttributeForm, Form
from otel_kprofiler.otlp import (
    RULES,
    check_payload,
    encode_window,
    rules_dictionary,
    rules_profiles,
)
from otel_kprofiler.otlp.check import FORM_RULES
from tests.unit.otlp.mutations import Mutations

MUTATIONS = Mutations()
"""Functions that make the JSON form violate a rule, by rule."""

breaks = MUTATIONS.breaks


@breaks("parsable")
def cut_off(text):
    return text[:-5]


@breaks("parsable")
def no_object(text):
    return text.replace('"mappingTable":[{}', '"mappingTable":[5')


@breaks("json-names")
def snake_case(text):
    return text.replace('"stackIndex"', '"stack_index"', 1)


@breaks("json-names")
def unknown_key(text):
    return text.replace('"samples":', '"more":1,"samples":', 1)


@breaks("json-long-strings")
def time_as_number(text):
    tree = json.loads(text)
    profile = tree["resourceProfiles"][0]["scopeProfiles"][0]["profiles"][0]
    profile["timeUnixNano"] = int(profile["timeUnixNano"])
    return json.dumps(tree)


@breaks("json-int-numbers")
def index_as_text(text):
    return text.replace('"stackIndex":1,', '"stackIndex":"1",')


@breaks("json-hex-ids")
def id_as_base64(text):
    tree = json.loads(text)
    tree["dictionary"]["linkTable"][1]["traceId"] = "AAECAwQFBgcICQoLDA0ODw=="
    return json.dumps(tree)


@pytest.mark.parametrize("form", Form)
@pytest.mark.parametrize("attributes", AttributeForm)
def test_a_valid_payload_violates_no_rule(window, form, attributes):
    encoded = encode_window(window, form=form, attributes=attributes)
    assert check_payload(encoded.batches[0].payload) == []


@pytest.mark.parametrize(
    ("rule", "mutate"),
    [(rule, mutate) for rule, functions in MUTATIONS.items() for mutate in functions],
)
def test_a_mutation_of_the_payload_text_is_caught_only_by_its_rule(window, rule, mutate):
    text = encode_window(window, form=Form.JSON).batches[0].payload.decode()
    mutated = mutate(text)
    assert mutated != text
    assert {item.rule for item in check_payload(mutated.encode())} == {rule}


def test_every_rule_is_known_and_has_a_mutation():
    """Each group of rules has a test file with mutations. Together, the files cover every rule."""
    assert MUTATIONS.keys() == FORM_RULES.keys()
    groups = (FORM_RULES, rules_dictionary.RULES, rules_profiles.RULES)
    assert sum(map(len, groups)) == len(RULES)
    assert all(RULES.values())
