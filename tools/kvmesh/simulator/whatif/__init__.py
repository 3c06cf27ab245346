"""Captured requests of a live mesh, simulated under its present and another configuration."""
