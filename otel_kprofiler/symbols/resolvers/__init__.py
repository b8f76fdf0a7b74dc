"""Resolvers of addresses, and what combines them."""
