"""Each violation is reported only by the rule that was violated."""

from __future__ import annotations

import json

import pytest

from otel_kprofiler.model import AttributeForm, Form
from otel_kprofiler.otlp import RULES, check_payload, encode_window
from tests.unit.otlp import dictionary_mutations, profile_mutations
from tests.unit.otlp.mutations import Mutations
from tests.unit.otlp.profile_mutations import wait

MUTATIONS = Mutations()
"""For each rule, functions that make JSON-encoded profiles violate the rule."""

breaks, add = MUTATIONS.breaks, MUTATIONS.add

add("parsable", "cut off", lambda text: text[:-5])
add("parsable", "number", lambda text: text.replace('"mappingTable":[{}', '"mappingTable":[5'))
add("json-names", "snake case", lambda text: text.replace('"stackIndex"', '"stack_index"', 1))
add("json-names", "unknown", lambda text: text.replace('"samples":', '"more":1,"samples":', 1))
add("json-int-numbers", "text", lambda text: text.replace('"stackIndex":1,', '"stackIndex":"1",'))


@breaks("json-long-strings")
def time_as_number(text):
    tree = json.loads(text)
    profile = tree["resourceProfiles"][0]["scopeProfiles"][0]["profiles"][0]
    profile["timeUnixNano"] = int(profile["timeUnixNano"])
    return json.dumps(tree)


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
    [*dictionary_mutations.MUTATIONS.cases(), *profile_mutations.MUTATIONS.cases()],
)
def test_each_mutation_violates_only_the_intended_rule(mutable, rule, mutate):
    mutate(mutable)
    assert mutable.broken_rules() == {rule}


@pytest.mark.parametrize(("rule", "mutate"), MUTATIONS.cases())
def test_each_mutation_of_a_json_payload_violates_only_the_intended_rule(window, rule, mutate):
    text = encode_window(window, form=Form.JSON).batches[0].payload.decode()
    mutated = mutate(text)
    assert mutated != text
    assert {item.rule for item in check_payload(mutated.encode())} == {rule}


def test_consistent_sample_counts_violate_no_rule(mutable):
    profile_mutations.account(
        mutable, window_samples=11, window_taken=3, stream_samples=11, stream_taken=14
    )
    assert mutable.broken_rules() == set()


def test_consistent_wait_attributes_violate_no_rule(mutable):
    wait(mutable, state="interruptible", cause="pipe", is_ended=False)
    assert mutable.broken_rules() == set()


def test_every_rule_has_a_mutation():
    groups = (MUTATIONS, dictionary_mutations.MUTATIONS, profile_mutations.MUTATIONS)
    assert {rule for mutations in groups for rule in mutations} == RULES.keys()
    assert all(RULES.values())
