"""Provides functions that raise errors."""


def raising(error):
    """Returns a function that raises an error with any arguments."""

    def fail(*_, **__):
        raise error

    return fail
