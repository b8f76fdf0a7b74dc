"""Scenarios by kind; each module has a list ``SCENARIOS``."""
