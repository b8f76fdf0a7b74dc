"""Collects functions that change a valid message so that it violates a rule."""

import re
from collections import defaultdict
from functools import partial

PROFILE = "resource_profiles[0].scope_profiles[0].profiles[0]"
SAMPLE = f"{PROFILE}.samples[0]"


class Mutations(defaultdict):
    """Maps each rule to functions that make a valid message violate it.

    ``assignments`` contains (rule, field path, value) tuples. The value is assigned to the field,
    or is appended if the field is repeated.
    """

    def __init__(self, assignments=()):
        super().__init__(list)
        for rule, path, value in assignments:
            self.add(rule, path, partial(assign, path=path, value=value))

    def add(self, rule, name, mutate):
        mutate.__name__ = name  # the name becomes part of the test's id
        self[rule].append(mutate)

    def breaks(self, rule):
        def register(mutate):
            self[rule].append(mutate)
            return mutate

        return register

    def cases(self):
        return [(rule, mutate) for rule, functions in self.items() for mutate in functions]


def assign(mutable, path, value):
    holder = mutable
    *steps, field = re.findall(r"\w+", path)
    for step in steps:
        holder = holder[int(step)] if step.isdigit() else getattr(holder, step)
        holder = holder() if callable(holder) else holder
    if hasattr(getattr(holder, field), "append"):
        getattr(holder, field).append(value)
    else:
        setattr(holder, field, value)
