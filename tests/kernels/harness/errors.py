"""The harness's only error type, which states the problem and its fix."""


class MatrixError(Exception):
    """Raised if the matrix cannot be run, as opposed to a failed test."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
