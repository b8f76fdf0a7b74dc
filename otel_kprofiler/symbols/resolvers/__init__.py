"""Resolvers of addresses, and their combinations."""
