"""Helpers for tests inside a guest; importable on the host, usable only in the guest."""
