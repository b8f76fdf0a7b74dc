"""Violations of rules for profiles, as functions that change a valid message."""

from collections import defaultdict


class Mutations(defaultdict):
    """By rule: functions that violate it."""

    def __init__(self):
        super().__init__(list)

    def breaks(self, rule):
        """Decorates a function that violates a rule."""

        def register(mutate):
            self[rule].append(mutate)
            return mutate

        return register
