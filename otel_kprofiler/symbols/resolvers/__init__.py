"""Address resolvers and their combinations."""
