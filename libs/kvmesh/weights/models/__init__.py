"""Whole model folders in the mesh: their store, and their copies on this machine."""
