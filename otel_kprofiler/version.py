"""The single definition of the package version."""

__version__ = "0.1.0"
