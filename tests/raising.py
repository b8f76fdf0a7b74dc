"""Makes functions that fail."""


def raising(error):
    """Returns a function that raises an error, whatever its arguments."""

    def fail(*_, **__):
        raise error

    return fail
