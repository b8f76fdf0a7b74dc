"""Scenarios by kind. Each module contains a list ``SCENARIOS``."""
