"""Helpers for tests inside a guest. The host can import but not use the helpers."""
