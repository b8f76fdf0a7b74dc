"""The only exception type of the harness, which states the problem and how to fix it."""


class MatrixError(Exception):
    """Raised if the matrix cannot be run, as opposed to a failed test."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
