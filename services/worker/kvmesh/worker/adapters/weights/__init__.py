"""Weights of an engine from the copies in the memory of its node."""
