"""Provides functions that raise errors."""


def raising(error):
    """Returns a function that accepts any arguments and raises ``error``."""

    def fail(*_, **__):
        raise error

    return fail
