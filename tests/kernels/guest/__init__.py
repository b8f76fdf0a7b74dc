"""Helpers for tests inside a guest. The host can import them, but only guests can use them."""
