"""Simulated clients of the mesh."""
