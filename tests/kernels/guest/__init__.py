"""Helpers for tests inside a guest; can be imported on the host, but used only in the guest."""
