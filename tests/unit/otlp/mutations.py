"""Violations of rules for profiles, as functions that change a valid message."""

from collections import defaultdict


class Mutations(defaultdict):
    """A dictionary of the functions that violate each rule."""

    def __init__(self):
        super().__init__(list)

    def breaks(self, rule):
        def register(mutate):
            self[rule].append(mutate)
            return mutate

        return register
