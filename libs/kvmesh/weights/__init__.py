"""Copies of a model's weights: their manifests, their place on a node, and their transfer."""
