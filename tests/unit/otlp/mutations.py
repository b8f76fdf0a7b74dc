"""Functions that change a valid message so that it violates a rule."""

from collections import defaultdict


class Mutations(defaultdict):
    """Maps each rule to functions that make a valid message violate it."""

    def __init__(self):
        super().__init__(list)

    def breaks(self, rule):
        def register(mutate):
            self[rule].append(mutate)
            return mutate

        return register
