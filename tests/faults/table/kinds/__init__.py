"""Scenarios by kind. Each module has a list ``SCENARIOS``."""
