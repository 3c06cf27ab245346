"""Compile caches of engines: kept per environment, and carried between workers of one domain."""
